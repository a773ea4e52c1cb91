"""The whole plan that simulates best: cuts, stages per device and options such as the round size together.

`rpbench.plan.search` times the order of a generator, without the optimizer, for given options. Here every candidate is
the schedule that would run: dealt by its dispatch rule, with steps on the compute lanes. That takes milliseconds a
candidate instead of microseconds, which is little for models of a dozen layers.

Either every stage recomputes every layer, and a fused stage holds the head alone, so that schedules are compared on
the same work. Or (`Problem.keeps_last`) the last stage recomputes nothing if its backward directly follows its
forward (`rpbench.ir.checks.residency`), and a fused stage, which never recomputes, may hold layers as well.

Best first: every move is applied to the best candidate that has not been changed yet, until the budget is used.
"""

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np

from rpbench.cost.table import CostTable
from rpbench.ir.checks.residency import turns_at_once
from rpbench.ir.partition import Partition, split_evenly, symmetric
from rpbench.ir.schedule import Schedule
from rpbench.passes.lower import add_steps
from rpbench.plan.counts import single_moves
from rpbench.plan.problem import Problem
from rpbench.sim.events import deal
from rpbench.sim.longest_path import simulate

# Numbers of stages to start from in each direction, if forward and backward are cut apart.
STARTS = range(1, 5)

Cut = tuple[int, ...]
Options = Mapping[str, Any]


@dataclass(frozen=True)
class WholePlan:
    """A simulated schedule."""

    schedule: Schedule
    costs: CostTable
    options: Options  # the chosen options of the schedule
    makespan: float  # first start to last end, steps included, in the unit of the costs
    num_evaluated: int = 1  # candidates simulated to find it
    keeps_last: bool = False  # whether the last stage's layers are not recomputed


def best_plans(
    problem: Problem,
    budget: int,
    *,
    most: int = 1,
    within: float = 0.0,
    dispatch: str = "round_robin",
    choices: Sequence[Options] = ({},),
) -> list[WholePlan]:
    """The best plan and those nearly as good, best first.

    Raises ValueError if no candidate can be built.

    Args:
        budget: candidates to simulate.
        within: fraction by which a plan may take longer than the best.
        dispatch: how the jobs of a streamed schedule find their devices; see `rpbench.sim.events`.
        choices: options of the schedule to try, such as `[{"round_size": 1}, {"round_size": 8}]`.
    """
    found: list[WholePlan] = []
    seen: set[tuple[int, Partition]] = set()
    waiting: list[tuple[float, int, int]] = []  # makespan, number in `found`, choice: a heap
    refused = ""

    def look_at(choice: int, partition: Partition) -> None:
        nonlocal refused
        if (choice, partition) in seen or len(found) >= budget:
            return
        seen.add((choice, partition))
        try:
            plan = evaluate_whole(problem, partition, dispatch, choices[choice])
        except ValueError as error:  # some schedules take only some numbers of stages
            refused = str(error)
            return
        heapq.heappush(waiting, (plan.makespan, len(found), choice))
        found.append(plan)

    starts = list(_starts(problem))
    for choice, partition in product(range(len(choices)), starts):
        look_at(choice, partition)
    if not found:
        raise ValueError(refused or f"budget={budget}: at least 1 candidate is simulated")
    while waiting and len(found) < budget:
        _, number, choice = heapq.heappop(waiting)
        cut = found[number].schedule.partition
        assert cut is not None
        for partition in _neighbours(cut, problem.keeps_last):
            look_at(choice, partition)
    ranked = sorted(found, key=lambda plan: plan.makespan)
    near = [plan for plan in ranked if plan.makespan <= (1 + within) * ranked[0].makespan]
    return [replace(plan, num_evaluated=len(found)) for plan in near[:most]]


def evaluate_whole(problem: Problem, partition: Partition, dispatch: str, options: Options) -> WholePlan:
    """The simulated schedule that would run; ValueError if the partition or the options do not fit the schedule."""
    posed = replace(problem, options={**problem.options, **options})
    order = posed.order(partition)
    if posed.keeps_last and not turns_at_once(order):
        posed = replace(posed, keeps_last=False)
    costs = posed.costs(partition)
    schedule = add_steps(deal(order, costs, dispatch), lane="compute")
    makespan = float(simulate(schedule, costs).makespan)
    return WholePlan(schedule, costs, options, makespan, keeps_last=posed.keeps_last)


def _starts(problem: Problem) -> Iterator[Partition]:
    """Even cuts for each number of stages, with and without the head in a stage of its own."""
    layers, ranks = problem.num_layers, problem.num_ranks
    if problem.entry.separate_cuts:
        for forward, backward in product(STARTS, STARTS):
            if max(forward, backward) <= layers:
                below = split_evenly(layers, backward)
                yield Partition(split_evenly(layers, forward), (*below, 0), fused=True)
        return
    chunks = range(2, max(2, (layers + 1) // ranks) + 1) if problem.entry.looped else range(1, 2)
    for stages in (ranks * number for number in chunks):
        yield symmetric(split_evenly(layers, stages))
        if stages > 1:
            yield symmetric((*split_evenly(layers, stages - 1), 0))


def _neighbours(partition: Partition, opens_top: bool) -> Iterator[Partition]:
    """The partitions one move away; stages cut apart also merge and split, a fused one changes with `opens_top`."""
    if not partition.fused:
        yield from map(symmetric, _shifted(partition.forward))
        return
    forward, (*below, top) = partition.forward, partition.backward
    for cut in _recut(forward):
        yield Partition(cut, partition.backward, fused=True)
    for cut in _recut(tuple(below)):
        yield Partition(forward, (*cut, top), fused=True)
    if opens_top and sum(forward) > 1:
        yield Partition(_one_less(forward), (*_one_less(tuple(below)), top + 1), fused=True)
    if opens_top and top:
        yield Partition((*forward[:-1], forward[-1] + 1), (*below[:-1], below[-1] + 1, top - 1), fused=True)


def _one_less(cut: Cut) -> Cut:
    """The cut without its last layer, and without a stage that held only that layer."""
    return (*cut[:-1], cut[-1] - 1) if cut[-1] > 1 else cut[:-1]


def _recut(cut: Cut) -> Iterator[Cut]:
    """A layer moved, two neighbours merged, or a stage split in two; no stage is left empty."""
    yield from (other for other in _shifted(cut) if min(other) > 0)
    for stage in range(len(cut) - 1):
        yield (*cut[:stage], cut[stage] + cut[stage + 1], *cut[stage + 2 :])
    for stage, layers in enumerate(cut):
        for first in range(1, layers):
            yield (*cut[:stage], first, layers - first, *cut[stage + 1 :])


def _shifted(cut: Cut) -> Iterator[Cut]:
    """The cuts with one layer in another stage, near stages first."""
    moved = np.array(cut) + single_moves(len(cut), near_first=True)
    return map(tuple, moved[(moved >= 0).all(axis=1)].tolist())
