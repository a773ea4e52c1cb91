"""Levels: how a ranking of schedules turns with what is charged, and which level of detail turned it.

order         every layer takes 1 each for forward, input gradient and weight gradient; nothing else
times         seconds of the kernels, the head on the last stage
hops          and boundary tensors between stages
transfers     and what data parallelism moves, on lane net
memory        schedules that do not fit are out
splitting     and the loss of kernels when backward is split
collectives   and the tensor, context and expert collectives inside layers
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from rpbench.cost.table import LayerTimes
from rpbench.ir.partition import symmetric
from rpbench.mesh.exact import mesh_times, problem_of, timeline
from rpbench.mesh.job import Job
from rpbench.mesh.memory import verdict
from rpbench.plan.evaluate import graph_of
from rpbench.sim.longest_path import simulate_graph

LEVELS = ("order", "times", "hops", "transfers", "memory", "splitting", "collectives")
SCHEDULES: tuple[tuple[str, int], ...] = (
    ("1f1b", 1),
    ("gpipe", 1),
    ("interleaved_1f1b", 2),
    ("zb_h1", 1),
    ("zb_h2", 1),
    ("zb_v", 2),
)


class Ranked(NamedTuple):
    """A ranking at one level of detail.

    Args:
        ranking: (schedule, time over that of the best), fastest first; those that do not fit are missing.
        turned: whether the fastest differs from that of the level before.
    """

    level: str
    ranking: tuple[tuple[str, float], ...]
    turned: bool


def rankings(job: Job, schedules: Sequence[tuple[str, int]] = SCHEDULES) -> list[Ranked]:
    """The ranking of schedules for a job at every level of detail, least detail first.

    Args:
        job: its own schedule and cut do not matter.
        schedules: (name, chunks on a device); those that the job's sizes do not allow are left out.
    """
    jobs = {name: found for name, chunks in schedules if (found := _with(job, name, chunks)) is not None}
    done: list[Ranked] = []
    for level in LEVELS:
        times = {name: _time(found, level) for name, found in jobs.items() if _fits(found, level)}
        order = sorted(times, key=lambda name: times[name])
        best = times[order[0]] if order else 1.0
        ranking = tuple((name, times[name] / best) for name in order)
        turned = bool(done and ranking and done[-1].ranking and ranking[0][0] != done[-1].ranking[0][0])
        done.append(Ranked(level, ranking, turned))
    return done


def _with(job: Job, name: str, chunks: int) -> Job | None:
    try:
        found = replace(job, schedule=name, chunks=chunks, cut=())
        problem_of(found).order(symmetric(found.cut))
    except ValueError:
        return None
    return found


def _fits(job: Job, level: str) -> bool:
    return LEVELS.index(level) < LEVELS.index("memory") or verdict(job).answer != "oom"


def _time(job: Job, level: str) -> float:
    depth = LEVELS.index(level)
    times = level_times(job, level)
    if depth >= LEVELS.index("transfers"):
        return float(np.max(np.asarray(timeline(job, times).end, float)))
    problem = problem_of(job, times)
    partition = symmetric(job.cut)
    found = simulate_graph(graph_of(problem, partition), problem.costs(partition))
    return float(np.max(np.asarray(found.end, float)))


def level_times(job: Job, level: str) -> LayerTimes:
    """Times of a job's layers with what a level charges and nothing beyond it."""
    depth = LEVELS.index(level)
    layers = len(job.architecture.layers)
    if level == "order":
        ones = [1.0] * layers
        return LayerTimes(ones, [0.0] * layers, [2.0] * layers, input_grad=ones, weight_grad=ones)
    if depth < LEVELS.index("splitting"):
        job = replace(job, software=replace(job.software, split_penalty=1.0))
    if depth < LEVELS.index("collectives"):
        job = _without_collectives(job)
    times = mesh_times(job)
    return times if depth >= LEVELS.index("hops") else replace(times, hop=0)


def _without_collectives(job: Job) -> Job:
    """The same job whose layers' collectives take no time: what they move hides entirely."""
    found = replace(job)
    kinds = {
        kind: seconds._replace(forward_exposed=0.0, backward_exposed=0.0, host=0.0)
        for kind, seconds in job.kinds.items()
    }
    found.__dict__["kinds"] = kinds  # a cached property of a frozen class: set before it is asked for
    found.__dict__["head"] = job.head._replace(forward_exposed=0.0, backward_exposed=0.0)
    return found
