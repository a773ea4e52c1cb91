"""Hold-outs: every given row predicted by fits without its model, size of machine or part of its source."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from analysis.predictions.clusters.case import Case, Model, step_log_sd
from analysis.predictions.clusters.fit import PROBLEMS, cases_of, fit
from rpbench.mesh.job import Job

FILE = Path(__file__).resolve().parents[1] / "clusters_holdout.csv"


@dataclass(frozen=True)
class Axis:
    """A grouping of rows; every group is left out once."""

    name: str
    group: Callable[[Case], str]


def of_job(name: Callable[[Job], object]) -> Callable[[Case], str]:
    """A grouping of cases by a property of their jobs."""
    return lambda case: str(name(case.modelled))


length = of_job(lambda job: f"{job.seq_len} tokens")
AXES = {
    "width": Axis("width", of_job(lambda job: job.architecture.hidden)),
    "model": Axis("model", of_job(lambda job: f"{job.architecture.name} {job.architecture.hidden}")),
    "tensor": Axis("mesh", of_job(lambda job: f"tensor {job.mesh.tensor}")),
    "device": Axis("device", of_job(lambda job: job.machine.device.name)),
    "size": Axis("machine", of_job(lambda job: f"{job.machine.size} x {job.machine.device.name}")),
    "release": Axis("release", of_job(lambda job: job.software.name)),
    "length": Axis("length", length),
}


def left_out(cases: Sequence[Case], axes: Iterable[Axis]) -> Iterator[tuple[str, list[Case], list[Case]]]:
    """For every group of every axis: its name, its cases, and the others."""
    for axis in axes:
        groups = [axis.group(case) for case in cases]
        for group in sorted(set(groups)):
            inside = [case for case, own in zip(cases, groups, strict=True) if own == group]
            others = [case for case, own in zip(cases, groups, strict=True) if own != group]
            yield f"{axis.name}: {group}", inside, others


def rows() -> Iterator[dict[str, str]]:
    """Every given row of every axis, predicted without its group."""
    known: dict[str, dict[str, float]] = {}
    for problem in PROBLEMS:
        cases = [case for case in cases_of(problem) if case.step_time_s and case.fits]
        for held_out, inside, others in left_out(cases, map(AXES.__getitem__, problem.axes)):
            if others:
                model = Model(fit(problem, others, known).values)
                for case in inside:
                    yield _row(problem.name, held_out, case, model.step_time_s(case))
        known |= fit(problem, cases, known).values


def _row(problem: str, held_out: str, case: Case, predicted: float) -> dict[str, str]:
    return {
        "set": case.set_name,
        "problem": problem,
        "held_out": held_out,
        "id": case.id,
        "step_time_s": f"{case.measured_s:.5g}",
        "predicted_s": f"{predicted:.5g}",
        "error": f"{predicted / case.measured_s - 1:.4f}",
        "log_sd": f"{step_log_sd(case):.4f}",
    }
