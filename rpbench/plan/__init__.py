"""Partitions and plans: the layers of each stage.

Choosing a partition by rule needs the standard library only; searching loads the simulator.
"""

from contextlib import suppress
from typing import NamedTuple

from rpbench.ir.partition import Partition, parse
from rpbench.ir.schedule import Schedule
from rpbench.plan.even_and_greedy import plan_even, plan_greedy
from rpbench.plan.problem import Problem
from rpbench.registry import unknown_name

METHODS = ("published", "even", "greedy", "pipedream", "mobius", "search")

BUDGET = 500_000_000  # actions a search may time by default: seconds on one core for the models of the RoundPipe paper


class Choice(NamedTuple):
    """A partition, and how it was found."""

    partition: Partition
    method: str
    num_evaluated: int = 0  # partitions simulated to find it
    schedule: Schedule | None = None  # None: not made yet
    proven: bool | None = None  # for `mobius`, whether no cut has a shorter step under its own model


def choose(method: str, problem: Problem, *, budget: int = BUDGET) -> Choice:
    """The partition of a method.

    Raises ValueError for an unknown method, a partition that does not fit the model or the schedule, or a published one
    that does not exist.

    Args:
        method: one of `METHODS`, or a partition as text such as `3-3-4` or `2-2|1-1-2-0*`.
        budget: of `search`; see `rpbench.plan.search`.
    """
    if method == "search":
        if problem.entry.extra is not None:
            raise ValueError(
                f"partition=search: {problem.entry.name} solves a program for every cut, and a search tries many; use "
                "partition=even, greedy, or layers per stage such as 3-3-4"
            )
        from rpbench.plan.search import plan_search

        found, num_evaluated = plan_search(problem, _seeds(problem), budget=budget)
        return Choice(found, method, num_evaluated)
    if method == "published":
        if problem.published is None:
            raise ValueError(
                f"partition=published: none is published for schedule {problem.entry.name} and this model; "
                "use partition=search, even or greedy"
            )
        return _checked(problem, problem.published, method)
    if method == "pipedream":
        from rpbench.plan.pipedream import plan_straight

        return _checked(problem, plan_straight(problem), method)
    if method == "mobius":
        from rpbench.plan.mobius import plan_mobius

        cut, program = plan_mobius(problem)
        return _checked(problem, cut, method)._replace(proven=program.proven)
    if method in ("even", "greedy"):
        return _checked(problem, (plan_even if method == "even" else plan_greedy)(problem), method)
    if not method[:1].isdigit():
        raise ValueError(unknown_name("partition", method, list(METHODS)) + ", or layers per stage such as 3-3-4")
    return _checked(problem, _without_idle_stages(problem, parse(method), method), "given")


def _checked(problem: Problem, partition: Partition, method: str) -> Choice:
    return Choice(partition, method, schedule=problem.order(partition))


def _without_idle_stages(problem: Problem, partition: Partition, text: str) -> Partition:
    """The partition; ValueError for an empty inner stage of separate cuts. Bound to a device it passes tensors on."""
    if not problem.entry.separate_cuts:
        return partition
    for counts in (partition.forward, partition.backward):
        for stage, layers in enumerate(counts):
            if not layers and stage not in (0, len(counts) - 1):
                raise ValueError(
                    f"partition={text}: stage {stage} has no layers; only the first, which has the embedding, and the "
                    "last, which has the head, may do without. Give it one, or take fewer stages; partition=search "
                    "chooses both"
                )
    return partition


def _seeds(problem: Problem) -> list[Partition]:
    """The partitions from which `search` starts: greedy, and published, even and Mobius's if they exist."""
    seeds = [plan_greedy(problem)]
    if problem.published is not None and _fits(problem, problem.published):
        seeds.append(problem.published)
    with suppress(ValueError):
        seeds.append(plan_even(problem))
    if problem.entry.lower is not None and problem.traffic is not None:
        from rpbench.plan.mobius import plan_mobius

        with suppress(ValueError):  # stages that do not stream in rotation, or no cut that fits
            seeds.append(plan_mobius(problem)[0])
    return seeds


def _fits(problem: Problem, partition: Partition) -> bool:
    bound = not problem.entry.separate_cuts
    if bound and problem.chunks_per_rank not in (None, len(partition.forward) // problem.num_ranks):
        return False
    try:
        problem.order(partition)
    except ValueError:
        return False
    return True
