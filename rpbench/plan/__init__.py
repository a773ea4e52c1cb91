"""Partitions and plans: which layers make which stage."""

from contextlib import suppress

from rpbench.cost.memory import DeviceMemory
from rpbench.ir.partition import Partition, parse
from rpbench.plan.even import plan_even
from rpbench.plan.greedy import plan_greedy
from rpbench.plan.problem import Plan, Problem
from rpbench.plan.search import BUDGET, Progress, plan_search
from rpbench.registry import unknown_name

METHODS = ("published", "even", "greedy", "search")

__all__ = ["METHODS", "DeviceMemory", "Plan", "Problem", "plan"]


def plan(method: str, problem: Problem, *, budget: int = BUDGET, on_progress: Progress | None = None) -> Plan:
    """The partition a method gives, with its simulated makespan.

    Args:
        method: one of `METHODS`, or a partition as text such as `3-3-4` or `2-2|1-1-2-0*`.
        budget, on_progress: of `search`; see `plan_search`.

    Raises:
        ValueError: for an unknown method, a partition that does not fit the model or the schedule, or a
            published one that does not exist.
    """
    if method == "search":
        found, num_evaluated = plan_search(problem, _seeds(problem), budget=budget, on_progress=on_progress)
        return problem.evaluate(found, method=method, num_evaluated=num_evaluated)
    if method == "published":
        if problem.published is None:
            raise ValueError(
                f"partition=published: none is published for schedule {problem.entry.name} and this model; "
                "use partition=search, even or greedy"
            )
        return problem.evaluate(problem.published, method=method)
    if method in ("even", "greedy"):
        return problem.evaluate((plan_even if method == "even" else plan_greedy)(problem), method=method)
    if not method[:1].isdigit():
        raise ValueError(unknown_name("partition", method, list(METHODS)) + ", or layers per stage such as 3-3-4")
    return problem.evaluate(parse(method), method="given")


def _seeds(problem: Problem) -> list[Partition]:
    """What `search` must not be worse than; the even and the published partition only where there is one."""
    seeds = [plan_greedy(problem)]
    if problem.published is not None and _fits(problem, problem.published):
        seeds.append(problem.published)
    with suppress(ValueError):
        seeds.append(plan_even(problem))
    return seeds


def _fits(problem: Problem, partition: Partition) -> bool:
    bound = not problem.entry.separate_cuts
    if bound and problem.chunks_per_rank not in (None, len(partition.forward) // problem.num_ranks):
        return False
    try:
        problem.graph(partition)
    except ValueError:
        return False
    return True
