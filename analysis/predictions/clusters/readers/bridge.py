"""Rows of Megatron-Bridge's release tables; cells such as `64 (0)` hold two configurations."""

import re
from contextlib import suppress
from dataclasses import replace

from analysis.predictions.clusters.case import Case, Row, machine_of, refused, software_of, whole
from analysis.predictions.clusters.readers.megatron import cut_with_ends
from rpbench.mesh.job import Job
from rpbench.mesh.layer_seconds import Adapters, Precision
from rpbench.mesh.layout import Mesh, Sharing
from rpbench.workload.architecture import Architecture, architecture

MACHINES = {
    "DGX-H100": "dgx_h100",
    "DGX-B200": "dgx_b200",
    "DGX-B300": "dgx_b300",
    "DGX-GB200": "gb200_nvl72",
    "DGX-GB300": "gb300_nvl72",
}
MODELS = {
    "LLAMA3_8B": "llama3_8b",
    "LLAMA3_70B": "llama3_70b",
    "LLAMA3.1_405B": "llama31_405b",
    "DeepSeekV3": "deepseek_v3",
    "GPT OSS 120B": "gpt_oss_120b",
    "Qwen3_30B_a3B": "qwen3_30b_a3b",
    "Qwen3_235B_a22B": "qwen3_235b_a22b",
    "Kimi_K2": "kimi_k2",
}
UNMODELLED = {
    "DeepSeekV4 Flash": "the architecture is not known here",
    "Nemotron": "hybrid Mamba layers are not modelled",
}
COLUMNS = ("fsdp", "tp", "pp", "cp", "vp", "ep", "tokens_per_s_per_gpu")


def bridge(row: Row) -> list[Case]:
    """The configurations of a row, the one outside of brackets first."""
    for name, reason in UNMODELLED.items():
        if row["model"].startswith(name):
            return refused(row, reason)
    found = [_case(row, 0)]
    if "(" in row.get("tokens_per_s_per_gpu", ""):
        with suppress(ValueError):  # what is printed in brackets may be no whole configuration
            found.append(replace(_case(row, 1), id=row["id"] + "b"))
    return found


def _case(row: Row, which: int) -> Case:
    cells = {name: _choice(row.get(name) or "", which) for name in COLUMNS}
    gpus, sequences, seq_len = int(row["gpus"]), int(row["micro_batch"]), int(row["seq"])
    tensor, pipeline, context = whole(cells["tp"]), whole(cells["pp"]), whole(cells["cp"])
    data = gpus // (tensor * pipeline * context)
    own = _architecture(row["model"], row["release"])
    experts = whole(cells["ep"]) if own.experts else 1
    fsdp, chunks = whole(cells["fsdp"], 0), whole(cells["vp"])
    chunks = min(chunks, len(own.layers) // pipeline) if pipeline > 1 else 1
    machine = machine_of(MACHINES[row["system"]], gpus)
    stages = pipeline * chunks
    job = Job(
        own,
        machine,
        Mesh(
            data,
            pipeline,
            tensor,
            context,
            experts,
            sequence_parallel=tensor > 1,
            sharing=Sharing("parameters" if fsdp > 1 else "optimizer", fsdp if 1 < fsdp < data * context else 0),
        ),
        software_of(_software(row, bool(own.experts))),
        seq_len,
        sequences,
        max(1, int(row["global_batch"]) // (data * sequences)),
        schedule="interleaved_1f1b" if chunks > 1 else "1f1b",
        chunks=chunks,
        precision=_precision(row, which),
        cut=cut_with_ends(len(own.layers), stages) if _counts_ends(own, stages) else (),
        adapters=Adapters(16, mlp=False) if "LoRA" in row["task"] else None,
    )
    pace = float(cells["tokens_per_s_per_gpu"]) if cells["tokens_per_s_per_gpu"] else None
    return Case(
        row["id"],
        job,
        pace and job.tokens / pace / gpus,
        configuration=f"{row['system']}{job.precision}{job.mesh}{row['model']}{job.software.name}",
    )


def _counts_ends(own: Architecture, stages: int) -> bool:
    """Whether embedding and head count as layers: where the layers alone do not divide and with them they do."""
    return len(own.layers) % stages != 0 and (len(own.layers) + 2) % stages == 0


def _software(row: Row, routed: bool) -> str:
    """Dense models have one for a device's generation; those with experts one for each way of the host, by release."""
    if not routed:
        return "megatron_bridge_h100" if row["system"] == "DGX-H100" else "megatron_bridge"
    if "tokendrop" in row["model"]:
        return "megatron_bridge_drops"
    major = tuple(int(part) for part in row["release"].split(".")[:2])
    if major >= (26, 6) and row["system"] != "DGX-H100":
        return "megatron_bridge_graphs"
    early = major < (26, 2) or row["release"] == "26.02"
    host = {"DGX-H100": "_h100", "DGX-GB200": "_grace", "DGX-GB300": "_grace"}.get(row["system"], "")
    return f"megatron_bridge_{'early' if early else 'moe'}{host}"


def _architecture(name: str, release: str) -> Architecture:
    plain = re.sub(r" \(.*\)", "", name)
    own = architecture(MODELS[plain])
    if plain == "DeepSeekV3" and "w/o MTP" not in name:
        return replace(own, num_prediction_layers=1)
    return own


def _precision(row: Row, which: int) -> Precision:
    names: dict[str, Precision] = {
        "FP8-CS": "fp8",
        "FP8": "fp8",
        "FP8-MX": "mxfp8",
        "MXFP8": "mxfp8",
        "BF16": "bf16",
        "NVFP4": "nvfp4",
    }
    printed = _choice(row["precision"], which)
    if printed:
        return names[printed]
    return "mxfp8" if which else "fp8"


def _choice(cell: str, which: int) -> str:
    """The first or the bracketed part of a cell such as `64 (0)`; a plain cell has one for both."""
    found = re.fullmatch(r"\s*([^()]*?)\s*\(([^)]*)\)\s*", cell)
    if not found:
        return cell.strip()
    return found.group(2 if which else 1).strip()
