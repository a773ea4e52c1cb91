"""Fitting: which plans of a search fit into memory, and how many devices a model needs before one does."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from rpbench.mesh.job import Job
from rpbench.mesh.memory import fullest
from rpbench.mesh.plan_search.closed_forms import Question, Timed, balanced, layer_table, time_plans
from rpbench.mesh.plan_search.plans import Floats, Ints, Plans, Space, enumerate_plans

NEAREST = 200  # most plans, slightly too large by closed forms, whose memory is counted from their orders
NEAR = 0.15  # fraction of a device's memory that these may lack; closed forms are off by at most 8 % there
DOUBTED = 0.08  # fraction of a device's memory: plans that lack no more are also counted from their orders
FACTORS = (2, 4, 8, 16, 32, 64)  # times as many devices


def job_of(question: Question, plans: Plans, number: int) -> Job:
    return question.job(
        plans.inners[int(plans.inner[number])],
        question.machine,
        plans.mesh(number),
        num_microbatches=int(plans.microbatches[number]),
        schedule=plans.schedules[int(plans.schedule[number])],
        chunks=int(plans.chunks[number]),
        cut=plans.cut(number, len(question.architecture.layers)),
    )


def timed_plans(question: Question, space: Space) -> tuple[Plans, Timed]:
    """All plans with their seconds and bytes by closed forms; ValueError if none divides.

    Each is cut evenly, or so that its busiest rank has least work, if that fits as well.
    """
    even = enumerate_plans(question.architecture, question.machine, question.seq_len, question.global_batch, space)
    table = layer_table(question, even.inners)
    other = balanced(question, even, table)
    timed, found = time_plans(question, even, table), time_plans(question, other, table)
    better = (spare_bytes(question, found) >= 0) | (found.peak_bytes <= timed.peak_bytes)
    better &= found.step_s < timed.step_s
    columns = (np.where(better, *pair) for pair in zip(found, timed, strict=True))
    return replace(even, last=np.where(better, other.last, even.last)), Timed(*columns)


def spare_bytes(question: Question, timed: Timed) -> Floats:
    """Free bytes of each plan's fullest device, by closed forms; below 0 if the plan does not fit."""
    machine = question.machine
    room = machine.device.memory_bytes - (machine.reserved_memory_bytes or 0)
    return room - question.software.scale * timed.peak_bytes


def fastest_first(timed: Timed, spare: Floats, may_lack: float = 0.0) -> Ints:
    """Numbers of the plans that lack at most `may_lack` bytes by closed forms, the fastest first."""
    fitting = spare >= -may_lack
    return np.argsort(np.where(fitting, timed.step_s, np.inf), kind="stable")[: int(fitting.sum())]


def nearest(question: Question, spare: Floats) -> Ints:
    """Numbers of the plans that lack little by closed forms, and of the smallest plan; the smallest first."""
    order = np.argsort(-spare, kind="stable")[:NEAREST]
    near = spare[order] > -NEAR * question.machine.device.memory_bytes
    near[0] = True
    return order[near]


def job_on_more_devices(question: Question, space: Space) -> Job | None:
    """A plan that fits, with the same global batch, on the smallest tried number of devices that has one.

    On n times as many devices, context parallelism up to n is allowed as well.
    """
    for factor in FACTORS:
        machine = question.machine.with_devices(factor * question.machine.size)
        wider = replace(space, max_context=max(space.max_context, factor))
        job = next(_fitting_jobs(question._replace(machine=machine), wider), None)
        if job is not None:
            return job
    return None


def _fitting_jobs(question: Question, space: Space) -> Iterator[Job]:
    """Plans that fit, with memory counted from their orders: by closed forms the fastest first, then the nearest."""
    try:
        plans, timed = timed_plans(question, space)
    except ValueError:  # the batch is too small for so many devices
        return
    spare = spare_bytes(question, timed)
    for number in (*fastest_first(timed, spare).tolist(), *nearest(question, spare).tolist()):
        job = job_of(question, plans, number)
        if not fullest(job).lacks:
            yield job
