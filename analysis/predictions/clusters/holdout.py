"""Hold-outs: every given row predicted by fits without its model, size of machine or part of its source."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from analysis.predictions.clusters.case import Case, Model, step_log_sd
from analysis.predictions.clusters.fit import PROBLEMS, cases_of, fit
from analysis.records.runs import grouped
from rpbench.mesh.job import Job

FILE = Path(__file__).resolve().parents[1] / "clusters_holdout.csv"


Axis = tuple[str, Callable[[Case], str]]  # its name, and the group of a row; every group is left out once


def of_job(name: Callable[[Job], object]) -> Callable[[Case], str]:
    """A grouping of cases by a property of their jobs."""
    return lambda case: str(name(case.modelled))


length = of_job(lambda job: f"{job.seq_len} tokens")
AXES: dict[str, Axis] = {
    "width": ("width", of_job(lambda job: job.architecture.hidden)),
    "model": ("model", of_job(lambda job: f"{job.architecture.name} {job.architecture.hidden}")),
    "tensor": ("mesh", of_job(lambda job: f"tensor {job.mesh.tensor}")),
    "device": ("device", of_job(lambda job: job.machine.device.name)),
    "size": ("machine", of_job(lambda job: f"{job.machine.size} x {job.machine.device.name}")),
    "release": ("release", of_job(lambda job: job.software.name)),
    "length": ("length", length),
}


def left_out(cases: Sequence[Case], axes: Iterable[Axis]) -> Iterator[tuple[str, list[Case], list[Case]]]:
    """For every group of every axis: its name, its cases, and the others."""
    for axis, group_of in axes:
        for group, inside in sorted(grouped(cases, group_of).items()):
            yield f"{axis}: {group}", inside, [case for case in cases if group_of(case) != group]


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
