"""Jobs of other people's published runs, from `jobs/<set>.csv`, with their measurements.

A column is a field of `Case`, `Job`, `Mesh` or `Sharing` (`shard`); `model.`, `software.` and `constants.` before a
name change what `conf/` says. An empty cell is the default; a row without a model is not modelled, for the reason in
its note. Two configurations of one published row have a row each; the id of the one in brackets ends with `b`.

Runs on one host (PEFT, torchtune, LoHan) are no jobs on a mesh; a few counts and fitted constants predict them.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from analysis.predictions import tables
from analysis.predictions.clusters.case import Case, Row, Said, number
from analysis.records.runs import grouped
from rpbench.cost.hardware.device import names
from rpbench.cost.hardware.machine import machine
from rpbench.mesh.job import Job
from rpbench.mesh.layers.adapters import Adapters
from rpbench.mesh.layout import Mesh, Sharing
from rpbench.mesh.software import Software, software
from rpbench.workload.architecture import Architecture, architecture
from rpbench.yaml_file import read_keys

TABLES = read_keys(Path(__file__).with_suffix(".yaml"))
GIB = 2.0**30

# --- PEFT's comparison of methods --------------------------------------------------------------------------------

LEARNING = 16.0  # bytes of a trained parameter: weight, gradient and two moments in fp32
WHOLE = 8.0  # the same in bf16, if all weights are trained
CAST = 4.0  # bytes of a value of an adapter's input, copied to fp32 and kept for its gradient
DELTA = 4.0  # bytes of a weight's change, if a method computes and keeps the whole change
TOKENS = 4 * 768  # of the fullest batch
_LLAMA = architecture("llama32_3b")
_LAYERS, _H, _KV, _F = _LLAMA.num_layers, _LLAMA.hidden, _LLAMA.key_value_heads * _LLAMA.head_dim, _LLAMA.inner
MAPS = {  # (inputs, outputs) of Llama's linear maps
    "q_proj": (_H, _H),
    "k_proj": (_H, _KV),
    "v_proj": (_H, _KV),
    "o_proj": (_H, _H),
    "gate_proj": (_H, _F),
    "up_proj": (_H, _F),
    "down_proj": (_F, _H),
}
LLAMA_BYTES = 20.2e9  # without a method; fitted on 16 given rows
FLUX_BYTES = 9.6e9  # the same for the diffusion model, whose blocks are checkpointed; 9 given rows
FLUX_CAST, FLUX_DELTA = 0.42e9, 3.3e9  # for adapters' inputs and whole changes of weights there; the same rows


def peft(row: Row) -> list[Case]:
    """The allocator's peak of a fine-tuning method on one L40S."""
    learns, method = float(row["trainable_params"]), "DORA" if "dora" in row["file"].split("/")[-1] else row["method"]
    if "FLUX" in row["model"]:
        light, whole = method in TABLES["light"], method in TABLES["whole_change"]
        found = FLUX_BYTES + FLUX_CAST * (not light) + FLUX_DELTA * whole
    else:
        found = LLAMA_BYTES + _kept_bytes(method, row["target_modules"].split())
    learning = WHOLE - 2.0 if method == "full" else LEARNING  # the weights are already counted
    said = Said(memory_bytes=found + learning * learns)
    memory = number(row.get("memory_max_bytes"))
    return [Case(row["id"], None, memory_bytes=memory, said=said, configuration=row["id"], asks=("memory",))]


def _kept_bytes(method: str, targets: list[str]) -> float:
    """Bytes that a method keeps for the maps it changes, in all layers."""
    maps = [MAPS[name] for name in targets if name in MAPS]
    if method == "IA3":  # scales and keeps outputs, or the input of the last map
        widths = [k if name == "down_proj" else n for name, (k, n) in zip(targets, maps, strict=True)]
        return CAST * TOKENS * _LAYERS * sum(widths)
    found = 0.0 if method in TABLES["light"] else CAST * TOKENS * _LAYERS * sum(k for k, _ in maps)
    return found + (DELTA * _LAYERS * sum(k * n for k, n in maps) if method in TABLES["whole_change"] else 0.0)


# --- torchtune ---------------------------------------------------------------------------------------------------

RECIPE_BYTES = 2.5e9  # activations under checkpointing, chunked logits and contexts; assumed
FOUR_BITS = 0.56  # bytes of a quantised weight with its scales (NF4, blocks of 64, arXiv 2305.14314)


def torchtune(row: Row) -> list[Case]:
    """Peak bytes of a recipe on a device; full training updates in the backward, with the states on the host."""
    known = TABLES["torchtune"]
    if row["model"] not in known:
        why = "model and method are not printed with the row"
        return [Case(row["id"], None, fits=False, asks=("memory",), note=why)]
    own, gpus = architecture(known[row["model"]]), int(row["gpus"])
    matrices = own.embedding_parameters + own.head_parameters
    bits = FOUR_BITS if row["method"] == "QLoRA" else 2.0
    weights = bits * (own.total_parameters - matrices) + 2.0 * matrices
    unit = 2.0 * 2.0 * max(matrices / 2, own.total_parameters / own.num_layers) * (gpus > 1)
    gradients = 2.0 * own.total_parameters / own.num_layers if row["method"] == "full" and gpus == 1 else 0.0
    said = Said(memory_bytes=weights / gpus + unit + gradients + RECIPE_BYTES, devices=gpus)
    memory = number(row.get("peak_memory_GiB_per_gpu"))
    return [
        Case(
            row["id"],
            None,
            memory_bytes=memory and memory * GIB,
            said=said,
            configuration=row["id"],
            fits="host" not in row.get("note", ""),
            asks=("memory",),
            note="batch and length are not printed",
        )
    ]


# --- LoHan -------------------------------------------------------------------------------------------------------

LENGTH = 1024
SEQUENCE_S = 4.0e-11  # device seconds for a parameter and 1,024 tokens, with recomputation; from all given rows
HOST_S = 0.85e-9  # host seconds for a parameter: Adam and conversions; rows with 12 SSDs and small batches
SSD_S = 4.4e-9  # seconds of one SSD for a parameter: 28 bytes at 6.4 GB/s both ways; rows with 1 to 12 SSDs
SHARPNESS = 5.0  # of the maximum of computing and moving, which slow each other a little


def lohan(row: Row) -> list[Case]:
    """A job whose weights and states pass through host and SSDs once a step while the devices compute."""
    gpus, batch, size = int(row["gpus"]), int(row["global_batch"]), float(row["params"])
    computes = SEQUENCE_S * size * batch / gpus
    moves = size * (HOST_S + SSD_S / int(row["ssds"]))
    step = (computes**SHARPNESS + moves**SHARPNESS) ** (1.0 / SHARPNESS)
    tokens, rate = batch * LENGTH, number(row.get("tflops_total"))
    measured = rate and 6.0 * size * tokens / (rate * 1e12)  # the source's way to count FLOPs may differ by a factor
    return [Case(row["id"], None, measured, said=Said(step, tokens, None, gpus), configuration=row["id"])]


ONE_HOST: dict[str, Callable[[Row], list[Case]]] = {
    "peft_method_comparison": peft,
    "torchtune_memory": torchtune,
    "lohan_rtx4090": lohan,
}


FOLDER = Path(__file__).with_name("jobs")
PACES: dict[str, Callable[[Job], int]] = {  # a device's rate -> what it counts
    "tokens_per_s_per_gpu": lambda job: job.tokens,
    "samples_per_s_per_gpu": lambda job: job.global_batch,
}
BRACKETS = re.compile(r"\s*([^()]*?)\s*\(([^)]*)\)\s*")  # such as `64 (0)`, the rates of two configurations


def cases_of_row(row: Row) -> list[Case]:
    """The runs of a row of `analysis/published/measured/` or `challenge/`."""
    name = row["id"].split("/")[0]
    return ONE_HOST[name](row) if name in ONE_HOST else [_case(cells, row) for cells in _rows(name).get(row["id"], ())]


@cache
def _rows(name: str) -> Mapping[str, list[Row]]:
    """The rows of a set without empty cells, by the id of the published row."""
    rows = ({column: cell for column, cell in row.items() if cell} for row in tables.read(name, FOLDER))
    return grouped(rows, lambda row: row["id"].rstrip("b"))


def _case(cells: Row, row: Row) -> Case:
    texts = {name: cells.get(name, "") for name in ("id", "note", "configuration")}
    own = {**_fields(Case, cells), **texts, "asks": tuple(cells.get("asks", "time").split())}
    if "model" not in cells:
        said = _fields(Said, cells, "said.")
        return Case(job=None, **{"said": Said(**said) if said else None, "fits": bool(said), **own})
    own["configuration"] = texts["configuration"] or texts["id"]
    job = _job(cells)
    seconds = _seconds(row, job, bracketed=texts["id"].endswith("b"))
    memory = next((float(row[name]) * unit for name, unit in TABLES["bytes"].items() if row.get(name)), None)
    return Case(job=job, step_time_s=seconds, memory_bytes=memory, **own)


def _job(cells: Row) -> Job:
    own = architecture(cells["model"]) if cells["model"] in names("model") else None
    changed = _fields(Architecture, cells, "model.")
    sharing = {new: _value(cells[name]) for name, new in TABLES["sharing"].items() if name in cells}
    mesh = _fields(Mesh, cells) | {"sharing": Sharing(**sharing)}
    if "order" in cells:
        mesh["order"] = cells["order"].split()
    run = _fields(Job, cells)
    if "cut" in cells:
        run["cut"] = tuple(map(int, cells["cut"].split()))
    if "adapters" in cells:
        rank, *only = cells["adapters"].split()
        run["adapters"] = Adapters(int(rank), mlp=not only)
    return Job(
        **run
        | {
            "architecture": replace(own, **changed) if own else Architecture(cells["model"], **changed),
            "machine": machine(cells["machine"]).with_devices(int(cells["gpus"])),
            "mesh": Mesh(**mesh),
            "software": _software(cells),
        }
    )


def _software(cells: Row) -> Software:
    """The framework; with `drops_beyond`, it drops tokens beyond that multiple of an expert's mean."""
    found = replace(software(cells["software"]), **_fields(Software, cells, "software."))
    constants = {name.removeprefix("constants."): float(cells[name]) for name in cells if name.startswith("constants.")}
    if "drops_beyond" in cells:  # then the host does not wait for counts
        constants["imbalance"] = min(float(cells["drops_beyond"]), found.constants["imbalance"])
        constants["dispatch_s"] = software("megatron_bridge_drops").constants["dispatch_s"]
    return found.with_constants(constants) if constants else found


def _seconds(row: Row, job: Job, bracketed: bool) -> float | None:
    """Seconds of a step from the time or rate that the source prints."""
    for name, unit in TABLES["seconds"].items():
        if row.get(name):
            return float(row[name]) / unit
    for name, work in PACES.items():
        pace = row.get(name, "")
        if found := BRACKETS.fullmatch(pace):
            pace = found[2 if bracketed else 1]
        if pace:
            return work(job) / float(pace) / job.machine.size
    if rate := row.get("samples_per_s_median"):  # MLPerf; for GPT-3 in tokens
        return int(row["gbs"]) * (job.seq_len if row["benchmark"] == "gpt3" else 1) / float(rate)
    if rate := row.get("tflops_per_gpu") if job.software.name == "atorch" else None:  # counts what is recomputed
        own = job.architecture
        flops = 8.0 * own.total_parameters + 16.0 * own.num_layers * own.hidden * job.seq_len
        return job.tokens * flops / (float(rate) * 1e12 * job.machine.size)
    return None


def _fields(kind: Any, cells: Row, part: str = "") -> dict[str, Any]:
    """The values of the columns that are fields of a class, with a prefix."""
    known = getattr(kind, "_fields", None) or [each.name for each in fields(kind)]
    return {name: _value(cells[part + name]) for name in known if part + name in cells}


def _value(cell: str) -> Any:
    """A JSON value, or else the text."""
    try:
        return json.loads(cell)
    except ValueError:
        return cell
