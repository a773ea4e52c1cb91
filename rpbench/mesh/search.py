"""Search: the fastest plan that fits: closed forms for all, the real schedule and simulator for the best."""

import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from rpbench.mesh.architecture import Architecture
from rpbench.mesh.closed_forms import Question, layer_table, time_plans
from rpbench.mesh.exact import exact_terms
from rpbench.mesh.job import Job
from rpbench.mesh.layer_seconds import Precision
from rpbench.mesh.machine import Machine, machine
from rpbench.mesh.memory import fullest, verdict
from rpbench.mesh.plans import Plans, Space, enumerate_plans
from rpbench.mesh.prediction import Prediction
from rpbench.mesh.software import Software, software

SIMULATED = 50


@dataclass(frozen=True)
class Found:
    """What a search found.

    Args:
        best: predictions with the pipeline simulated, fastest first; none that does not fit.
        num_plans, num_fitting: plans that were timed by closed forms, and those of them that fit.
        closed_form_s, simulated_s: seconds that both parts of the search took.
    """

    best: tuple[Prediction, ...]
    num_plans: int
    num_fitting: int
    closed_form_s: float
    simulated_s: float

    @property
    def plans_per_s(self) -> float:
        """Plans that the closed forms time in a second."""
        return self.num_plans / self.closed_form_s


def search(
    model: Architecture,
    cluster: Machine | str,
    global_batch: int,
    *,
    seq_len: int,
    num_devices: int = 0,
    framework: Software | str = "megatron_core",
    precision: Precision = "bf16",
    space: Space | None = None,
    num_simulated: int = SIMULATED,
) -> Found:
    """The fastest plans of a model on a machine.

    Args:
        cluster: a machine, or the name of one in `conf/machine/`.
        global_batch: sequences of a step.
        num_devices: of the machine to use; 0 for all.
        num_simulated: plans that the real schedule and simulator time.

    Raises:
        ValueError: if no plan divides, or none fits into memory; then with what the smallest plan needs.
    """
    found = machine(cluster) if isinstance(cluster, str) else cluster
    found = found.with_devices(num_devices) if num_devices else found
    known = software(framework) if isinstance(framework, str) else framework
    question = Question(model, found, known, seq_len, global_batch, precision)
    began = time.perf_counter()
    plans = enumerate_plans(model, found, seq_len, global_batch, space or Space())
    timed = time_plans(question, plans, layer_table(question, plans.inners))
    room = found.gpu.memory_bytes - found.reserved_memory_bytes
    need = known.scale * timed.peak_bytes
    fits = need <= room
    order = np.argsort(np.where(fits, timed.step_s, np.inf), kind="stable")[: int(fits.sum())]
    closed = time.perf_counter() - began
    if not fits.any():
        raise ValueError(
            f"{model.name} does not fit on {found.num_devices} x {found.gpu.name}: the smallest plan needs "
            f"{need.min() / 1e9:.0f} GB of {room / 1e9:.0f} GB; take more devices"
        )
    best = _simulated(question, plans, order, num_simulated)
    return Found(best, plans.count, int(fits.sum()), closed, time.perf_counter() - began - closed)


def job_of(question: Question, plans: Plans, number: int) -> Job:
    """A plan as a job."""
    inner = plans.inners[int(plans.inner[number])]
    return Job(
        question.architecture,
        question.machine,
        plans.mesh(number),
        question.software,
        question.seq_len,
        inner.sequences,
        int(plans.microbatches[number]),
        schedule=plans.schedules[int(plans.schedule[number])],
        chunks=int(plans.chunks[number]),
        recompute=inner.recompute,
        precision=question.precision,
    )


def _simulated(question: Question, plans: Plans, order: "np.ndarray[Any, Any]", most: int) -> tuple[Prediction, ...]:
    """The first plans of an order that fit, simulated, fastest first."""
    found: list[Prediction] = []
    for number in order.tolist():
        if len(found) == most:
            break
        prediction = simulate_job(job_of(question, plans, number))
        if prediction is not None:
            found.append(prediction)
    return tuple(sorted(found, key=lambda each: each.step_time_s))


def simulate_job(job: Job) -> Prediction | None:
    """A job with its pipeline simulated; None if its memory, counted from its order, does not fit."""
    rank, classes = fullest(job)
    need = job.software.scale * sum(classes.values()) + job.machine.reserved_memory_bytes
    if need > job.machine.gpu.memory_bytes:
        return None
    return Prediction(job, exact_terms(job), rank, classes, verdict(job))
