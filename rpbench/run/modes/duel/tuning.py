"""Tuning: the same search with the same budget for every contender, on times profiled in this very run."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from rpbench.config.request import Request
from rpbench.engine.measure.side_by_side import side_by_side
from rpbench.ir.check import check
from rpbench.plan.problem import Problem
from rpbench.plan.whole import WholePlan, best_plans
from rpbench.registry import entry
from rpbench.run.assemble import pose
from rpbench.run.modes.duel.contenders import Contender
from rpbench.sim.longest_path import simulate

# Plans of a contender that go into the run-off, and the share by which one may simulate worse than the best: the same
# layers profiled twice within an hour put 4-4 of 1F1B 2 % before 5-3, and 4 % behind it.
MOST_PLANS = 3
NEAR = 0.05


def problem_of(request: Request, contender: Contender, *, keeps_last: bool = False) -> Problem:
    """What is to be planned for a contender.

    Args:
        keeps_last: as in `Problem`.

    Raises:
        ValueError: as of `pose`.
    """
    options = {**entry(contender.schedule).options, **contender.options}
    schedule = replace(request.schedule, entry=entry(contender.schedule), options=options)
    problem = pose(replace(request, schedule=schedule))
    return replace(problem, keeps_last=keeps_last)


def shortlists(
    request: Request, entrants: Sequence[Contender], budget: int, *, keeps_last: bool = False
) -> dict[str, list[WholePlan]]:
    """The best plans of every contender that has a search of its own, best first.

    Args:
        budget: plans simulated for each.
        keeps_last: as in `Problem`.

    Raises:
        ValueError: if a schedule cannot be built for these sizes.
    """
    return {
        contender.name: best_plans(
            problem_of(request, contender, keeps_last=keeps_last),
            budget,
            most=MOST_PLANS,
            within=NEAR,
            dispatch=contender.dispatch,
            choices=contender.choices(request.num_microbatches),
        )
        for contender in entrants
        if contender.searches
    }


def complete(entrants: Sequence[Contender], plans: Mapping[str, WholePlan]) -> dict[str, WholePlan]:
    """The plan of every contender, checked: its own, that of another, or that of the limit."""
    found: dict[str, WholePlan] = {}
    for contender in entrants:
        if contender.engine == "side by side":
            streamed = [plan for plan in found.values() if plan.schedule.shape.fused]
            found[contender.name] = min(map(unscheduled, streamed), key=lambda plan: plan.makespan)
        else:
            found[contender.name] = plans[contender.plan_of or contender.name]
            check(found[contender.name].schedule)
    return found


def unscheduled(plan: WholePlan) -> WholePlan:
    """The actions of a plan dealt evenly, each device for itself; its makespan is that of perfect balance."""
    shape, partition = plan.schedule.shape, plan.schedule.partition
    assert partition is not None
    schedule = side_by_side(partition, shape.num_ranks, shape.num_microbatches, shape.num_steps)
    timeline = simulate(schedule, plan.costs)
    busy = sum(float(span.end - span.start) for span in timeline.spans())
    return WholePlan(schedule, plan.costs, {}, busy / shape.num_ranks)
