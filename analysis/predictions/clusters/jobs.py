"""Jobs: what ran in other people's published runs, from `jobs/<set>.csv`, beside what was measured of it.

A column is a field of `Case`, `Job`, `Mesh` or `Sharing` (`shard`), or of the part that stands before the point: what
an architecture, a software or its constants have other than `conf/` says. An empty cell is the field's default; a row
without a model is not modelled, for the reason in its note. Two configurations of one published row have one row each,
the one that stands in brackets there with a `b` behind its id.
"""

import csv
import json
import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from analysis.predictions.clusters.case import Case, Row, Said
from analysis.predictions.clusters.one_host import ONE_HOST
from rpbench.cost.hardware.device import names
from rpbench.cost.hardware.machine import machine
from rpbench.mesh.job import Job
from rpbench.mesh.layers.layer_seconds import Adapters
from rpbench.mesh.layout import Mesh, Sharing
from rpbench.mesh.software import Software, software
from rpbench.workload.architecture import Architecture, architecture

FOLDER = Path(__file__).with_name("jobs")
# Columns of measurements, and how many of their unit make a second; whose tokens or sequences a device's pace counts;
# bytes of their unit.
SECONDS = {
    "sec_per_iteration": 1,
    "iteration_s": 1,
    "step_s": 1,
    "step_s_median": 1,
    "iteration_ms": 1e3,
    "measured_ms": 1e3,
}
PACES: dict[str, Callable[[Job], int]] = {
    "tokens_per_s_per_gpu": lambda job: job.tokens,
    "samples_per_s_per_gpu": lambda job: job.global_batch,
}
BYTES = {
    "memory_GB": 1e9,
    "memory_GiB": 2**30,
    "measured_alloc_GiB": 2**30,
    "max_allocated_MB": 2**20,  # called MB there
    "max_alloc_bytes": 1,
}


BRACKETS = re.compile(r"\s*([^()]*?)\s*\(([^)]*)\)\s*")  # a cell such as `64 (0)` holds two configurations
SHARING = {"shard": "what", "shard_group": "group", "reshard": "reshard"}


def cases_of_row(row: Row) -> list[Case]:
    """The runs of a row of `analysis/published/measured/` or `challenge/`; results that it lacks are None."""
    name = row["id"].split("/")[0]
    return ONE_HOST[name](row) if name in ONE_HOST else [_case(cells, row) for cells in _rows(name)[row["id"]]]


@cache
def _rows(name: str) -> Mapping[str, list[Row]]:
    """The rows of a set without their empty cells, by the id of the published row."""
    found = defaultdict(list)
    with (FOLDER / f"{name}.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            found[row["id"].rstrip("b")].append({column: cell for column, cell in row.items() if cell})
    return found


def _case(cells: Row, row: Row) -> Case:
    texts = {name: cells.get(name, "") for name in ("id", "note", "configuration")}
    own = {**_fields(Case, cells), **texts, "asks": tuple(cells.get("asks", "time").split())}
    if "model" not in cells:
        said = _fields(Said, cells, "said.")
        return Case(job=None, **{"said": Said(**said) if said else None, "fits": bool(said), **own})
    own["configuration"] = texts["configuration"] or texts["id"]
    job = _job(cells)
    seconds = _seconds(row, job, bracketed=texts["id"].endswith("b"))
    memory = next((float(row[name]) * unit for name, unit in BYTES.items() if row.get(name)), None)
    return Case(job=job, step_time_s=seconds, memory_bytes=memory, **own)


def _job(cells: Row) -> Job:
    own = architecture(cells["model"]) if cells["model"] in names("model") else None
    changed = _fields(Architecture, cells, "model.")
    sharing = {new: _value(cells[name]) for name, new in SHARING.items() if name in cells}
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
    """The framework; tokens beyond an expert's share are dropped where `drops_beyond` says so: no expert has more."""
    found = replace(software(cells["software"]), **_fields(Software, cells, "software."))
    constants = {name.removeprefix("constants."): float(cells[name]) for name in cells if name.startswith("constants.")}
    if "drops_beyond" in cells:  # and no host waits for counts
        constants["imbalance"] = min(float(cells["drops_beyond"]), found.constants["imbalance"])
        constants["dispatch_s"] = software("megatron_bridge_drops").constants["dispatch_s"]
    return found.with_constants(constants) if constants else found


def _seconds(row: Row, job: Job, bracketed: bool) -> float | None:
    """Seconds of a step, from whatever the source prints of it."""
    for name, unit in SECONDS.items():
        if row.get(name):
            return float(row[name]) / unit
    for name, work in PACES.items():
        pace = row.get(name, "")
        if found := BRACKETS.fullmatch(pace):
            pace = found[2 if bracketed else 1]
        if pace:
            return work(job) / float(pace) / job.machine.size
    if rate := row.get("samples_per_s_median"):  # MLPerf: GPT-3's is of tokens
        return int(row["gbs"]) * (job.seq_len if row["benchmark"] == "gpt3" else 1) / float(rate)
    if rate := row.get("tflops_per_gpu") if job.software.name == "atorch" else None:  # counts what is recomputed
        own = job.architecture
        flops = 8.0 * own.total_parameters + 16.0 * own.num_layers * own.hidden * job.seq_len
        return job.tokens * flops / (float(rate) * 1e12 * job.machine.size)
    return None


def _fields(kind: Any, cells: Row, part: str = "") -> dict[str, Any]:
    """The values of the columns that are fields of a class, behind a part's name."""
    known = getattr(kind, "_fields", None) or [each.name for each in fields(kind)]
    return {name: _value(cells[part + name]) for name in known if part + name in cells}


def _value(cell: str) -> Any:
    """A number, true, false or a structure; words are words."""
    try:
        return json.loads(cell)
    except ValueError:
        return cell
