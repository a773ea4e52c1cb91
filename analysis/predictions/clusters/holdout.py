"""Hold-outs on the given rows: a model, a size of machine or a part of a source left out of every fit.

`python -m analysis.predictions.clusters holdout` writes `clusters_holdout.csv`: every given row predicted with
constants that have not seen its group.
"""

import csv
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from analysis.predictions.clusters.case import Case
from analysis.predictions.clusters.fit import fit
from analysis.predictions.clusters.problems import PROBLEMS, cases_of
from analysis.predictions.clusters.spread import step_log_sd

FILE = Path(__file__).resolve().parents[1] / "clusters_holdout.csv"
COLUMNS = ("set", "problem", "held_out", "id", "step_time_s", "predicted_s", "error", "log_sd")


@dataclass(frozen=True)
class Axis:
    """How rows are grouped: every group is left out once."""

    name: str
    group: Callable[[Case], str]


def _model(case: Case) -> str:
    assert case.job is not None
    own = case.job.architecture
    return f"{own.name} {own.hidden} x {own.num_layers}"


def _mesh(case: Case) -> str:
    assert case.job is not None
    return f"tensor {case.job.mesh.tensor}"


def _devices(case: Case) -> str:
    assert case.job is not None
    return f"{case.job.machine.size} x {case.job.machine.device.name}"


def length(case: Case) -> str:
    """Tokens of a sequence, as a group."""
    assert case.job is not None
    return f"{case.job.seq_len} tokens"


# What is left out of each problem, chosen like what is asked of its set: other models, meshes, machines, lengths.
AXES = {
    "deepspeed_2022": (Axis("model", _model),),
    "vocab_parallel": (Axis("length", length),),
    "foundry_a100": (Axis("model", _model),),
    "foundry_h100": (Axis("machine", _devices),),
    "internevo": (Axis("machine", _devices), Axis("mesh", _mesh)),
    "simumax": (Axis("length", length),),
    "bridge_dense": (Axis("model", _model), Axis("machine", _devices)),
    "bridge_experts": (Axis("model", _model), Axis("machine", _devices)),
}


def rows() -> Iterator[dict[str, str]]:
    """Every given row of every axis, predicted without its group."""
    known: dict[str, dict[str, float]] = {}
    for problem in PROBLEMS:
        cases = cases_of(problem)
        whole = fit(problem, cases, known)
        for axis in AXES.get(problem.name, ()):
            for group in sorted({axis.group(case) for case in cases if case.step_time_s and case.fits}):
                seen = [case for case in cases if axis.group(case) != group]
                if not any(case.step_time_s and case.fits for case in seen):
                    continue
                model = fit(problem, seen, known, iterations=3, start=whole).model
                for case in cases:
                    if axis.group(case) == group and case.step_time_s and case.fits:
                        yield _row(problem.name, axis, group, case, model.step_time_s(case))
        known |= whole.values


def _row(problem: str, axis: Axis, group: str, case: Case, predicted: float) -> dict[str, str]:
    assert case.step_time_s is not None
    return {
        "set": case.set_name,
        "problem": problem,
        "held_out": f"{axis.name}: {group}",
        "id": case.id,
        "step_time_s": f"{case.step_time_s:.5g}",
        "predicted_s": f"{predicted:.5g}",
        "error": f"{predicted / case.step_time_s - 1:.4f}",
        "log_sd": f"{step_log_sd(case):.4f}",
    }


def write() -> int:
    """Write the file; returns the number of rows."""
    found = list(rows())
    with FILE.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(found)
    return len(found)
