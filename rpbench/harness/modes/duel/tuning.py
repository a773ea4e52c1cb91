"""Tuning: the same search with the same budget for every contender, on times profiled in this very run."""

from dataclasses import replace

from rpbench.engine.measure.side_by_side import side_by_side
from rpbench.harness.assemble import pose
from rpbench.harness.modes.duel.contenders import Contender
from rpbench.harness.request import Request
from rpbench.ir.check import check
from rpbench.plan.problem import Problem
from rpbench.plan.whole import WholePlan, plan_whole
from rpbench.registry import entry
from rpbench.sim.longest_path import simulate


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


def tuned(
    request: Request, entrants: list[Contender], budget: int, *, keeps_last: bool = False
) -> dict[str, WholePlan]:
    """The plan of every contender, checked.

    Args:
        budget: plans simulated for each.
        keeps_last: as in `Problem`.

    Raises:
        ValueError: if a schedule cannot be built for these sizes.
    """
    plans: dict[str, WholePlan] = {}
    for contender in entrants:
        if contender.engine == "side by side":
            streamed = [plan for plan in plans.values() if plan.schedule.shape.fused]
            plans[contender.name] = min(map(unscheduled, streamed), key=lambda plan: plan.makespan)
            continue
        if contender.plan_of:
            plans[contender.name] = plans[contender.plan_of]
            continue
        plans[contender.name] = plan_whole(
            problem_of(request, contender, keeps_last=keeps_last),
            budget,
            dispatch=contender.dispatch,
            choices=contender.choices(request.num_microbatches),
        )
        check(plans[contender.name].schedule)
    return plans


def unscheduled(plan: WholePlan) -> WholePlan:
    """The actions of a plan dealt evenly, each device for itself; its makespan is that of perfect balance."""
    shape, partition = plan.schedule.shape, plan.schedule.partition
    assert partition is not None
    schedule = side_by_side(partition, shape.num_ranks, shape.num_microbatches, shape.num_steps)
    timeline = simulate(schedule, plan.costs)
    busy = sum(float(span.end - span.start) for span in timeline.spans())
    return WholePlan(schedule, plan.costs, {}, busy / shape.num_ranks)
