"""Documents to bend: what the program itself has written, or a file that ships with it, by kind."""

import contextlib
import io
import json
from collections.abc import Iterable
from pathlib import Path

from rpbench.cli import _dispatch
from rpbench.commands.recorded.store import canonical, export, pack
from rpbench.cost.constant import constant_times
from rpbench.cost.profiled import to_text
from rpbench.records import record
from rpbench.sweep.lease import Owner

from .guard import ROOT

Documents = dict[str, list[bytes]]
TRAIN = (
    "backend=virtual",
    "model=tiny_gpt",
    "model.num_layers=2",
    "workload.microbatch_sequences=1",
    "num_devices=2",
    "num_microbatches=2",
)
SWEEP = ("-m", "schedule=gpipe,1f1b", "num_devices=2", "num_microbatches=4", "cost=constant")
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192,
    "num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 16, "vocab_size": 128256, "head_dim": 64,
    "hidden_act": "silu", "tie_word_embeddings": True, "attention_bias": False, "torch_dtype": "bfloat16",
    "max_position_embeddings": 131072, "rope_theta": 500000.0, "rms_norm_eps": 1e-05, "attention_dropout": 0.0,
}  # fmt: skip
QWEN = LLAMA | {
    "model_type": "qwen3_moe", "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
    "sliding_window": 4096, "use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"] * 8,
}  # fmt: skip
DEEPSEEK = LLAMA | {
    "model_type": "deepseek_v3", "n_routed_experts": 64, "num_experts_per_tok": 6, "moe_intermediate_size": 1408,
    "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "first_k_dense_replace": 1, "n_shared_experts": 2, "num_nextn_predict_layers": 1,
}  # fmt: skip
EXPERIMENT = b"""# @package _global_
defaults:
  - override /cost: constant
num_microbatches: 4
cost: {forward_ms: 1.0, hop_ms: 0.5}
hydra:
  sweeper:
    params: {schedule: "gpipe,1f1b", cost.hop_ms: "0.0,0.05"}
"""
EVENTS = [
    {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 9, "tid": 1, "ts": 100.5, "dur": 50.25},
    {"ph": "X", "cat": "kernel", "name": "gemm", "pid": 0, "tid": 7, "ts": 110, "dur": 30, "args": {"stream": 7}},
    {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy HtoD", "pid": 0, "tid": 8, "ts": 150, "dur": 10},
    {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "python"}},
    {"ph": "i", "name": "mark", "ts": 3},
]


def documents(folder: Path) -> Documents:
    """Every kind of document; takes a few runs, whose records are in the folder afterwards."""
    here = f"results_dir={folder}"
    _said(*SWEEP, here, "save_timeline=true")
    _said(*TRAIN, "num_steps=2", here, f"checkpoint.save_to={folder / 'state'}")
    _said("profile", "model=tiny_gpt", "cost=constant", f"out={folder / 'layers'}")
    return plain_documents(folder) | {
        "checkpoint": [(folder / "state" / "checkpoint.json").read_bytes()],
        "checkpoint_metadata": [path.read_bytes() for path in (folder / "state").glob("data-*/.metadata")],
        "checkpoint_data": [path.read_bytes() for path in (folder / "state").glob("data-*/*.distcp")],
        "model": _shipped("model", "tiny_gpt", "qwen3_1p7b"),
        "schedule": _schedules(),
        "torch_csv": [_said("show", "schedule=1f1b", *_SMALL, "format=torch_csv").encode()],
        "nodes": [(folder / "layers_nodes.csv").read_bytes()],
        "edges": [(folder / "layers_edges.csv").read_bytes()],
        "text": [b"It was a bright cold day in April. " * 40],
        "request": [
            f"GET {name} HTTP/1.1\r\nHost: HOST\r\n\r\n".encode()
            for name in ("/rows.json", "/timeline/RUN", "http://HOST/", "http://[::1")
        ],
        "sql": [b"select schedule, max(makespan_s) from runs where num_devices = 2 group by schedule order by 2"],
        "words": _command_lines(),
    }


def plain_documents(folder: Path) -> Documents:
    """Those that take no run beside the records, manifests and timelines of a folder."""
    rows = canonical(folder)
    table = io.StringIO()
    export([f"results_dir={folder}"], table)
    runs = [
        {"config": {"schedule": {"name": row["schedule"]}, "num_devices": {"value": 2}}, "summary": row} for row in rows
    ]
    owner = Owner.me().__dict__
    records = _bytes(folder.glob("*/record.json"))
    return {
        "record": records,
        "old record": [unsealed(document) for document in records],
        "pack": [pack(folder)[0].read_bytes()],
        "plan": _bytes(folder.glob("manifests/*/plan.json")),
        "journal": _bytes(folder.glob("manifests/*/*.jsonl")),
        "timeline": _bytes(folder.glob("*/timeline.csv")),
        "lease": [json.dumps(owner | change).encode() for change in ({}, {"host": "another"}, {"boot": ""})],
        "kineto": [json.dumps({"schemaVersion": 1, "traceEvents": EVENTS}).encode()],
        "wandb": [json.dumps(runs[0]).encode(), "\n".join(map(json.dumps, runs)).encode()],
        "table": [table.getvalue().encode()],
        "config": [json.dumps(each).encode() for each in (LLAMA, QWEN, DEEPSEEK)],
        "cluster": _shipped("cluster", "8x_rtx4090", "local"),
        "experiment": [EXPERIMENT],
        "places": [b"path: [mine]\n", b"path:\n  - mine\n  - yours\n"],
        "profile": [to_text(constant_times(16, 2, **_MS)).encode()],
    }


_SMALL = ("num_devices=3", "num_microbatches=4")
_MS = {"forward_ms": 1.0, "input_grad_ms": 1.0, "weight_grad_ms": 1.0, "recompute_ms": 0.5, "hop_ms": 0.1}


def unsealed(document: bytes) -> bytes:
    """A record as programs before this one wrote it, without the digest that guards its values."""
    row = json.loads(document)
    row.pop("digest", None)
    return json.dumps(row | {"schema": record.SCHEMA - 1}).encode()


def _said(*words: str) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        assert _dispatch(list(words)) == 0, words
    return out.getvalue()


def _bytes(paths: Iterable[Path]) -> list[bytes]:
    found = [path.read_bytes() for path in sorted(paths)]
    assert found
    return found


def _shipped(group: str, *names: str) -> list[bytes]:
    return [(ROOT / "conf" / group / f"{name}.yaml").read_bytes() for name in names]


def _schedules() -> list[bytes]:
    names = ("1f1b", "interleaved_1f1b", "zb_h1", "roundpipe", "chimera")
    sizes = ("num_devices=4", "num_microbatches=4")
    return [_said("show", f"schedule={name}", *sizes).encode() for name in names]


def _command_lines() -> list[bytes]:
    """Command lines, a word a line; RUN stands for a record's name."""
    lines = (
        "compare RUN OTHER results_dir=results",
        "explain RUN OTHER results_dir=results",
        "explain RUN tokens_per_s=100 model=tiny_gpt num_devices=2 results_dir=results",
        "pivot --rows model --columns schedule --value makespan_s --baseline 1f1b results_dir=results",
        "export --format jsonl results_dir=results",
        "show schedule=1f1b num_devices=3 num_microbatches=4 format=text",
        "schedule=zb_h1 num_devices=4 num_microbatches=8 cost=constant cost.forward_ms=2 results_dir=out",
        "-m --dry-run schedule=gpipe,1f1b num_devices=2,4 results_dir=results",
        "plan plan=pipedream profile=n.csv edges=e.csv num_machines=4 bandwidth_bytes_per_s=1e9",
        "list models --json",
        "import csv table.csv results_dir=out",
        "completion bash",
    )
    return [line.replace(" ", "\n").encode() for line in lines]
