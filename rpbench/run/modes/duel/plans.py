"""Plans: what the contenders of a duel run, as a file that another duel can be given.

Layer times are profiled once, plans are searched once, a run-off chooses between near ones, and every start runs
these. A duel that is repeated elsewhere may be given the file (`mode.plans`), so that both compare the same plans.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rpbench.config.choices import ConfigError, Duel
from rpbench.config.files.source_file import read_source
from rpbench.config.request import Request
from rpbench.cost.profiled import from_text, to_text
from rpbench.cost.table import LayerTimes
from rpbench.engine.measure.side_by_side import side_by_side
from rpbench.ir.checks.check import check
from rpbench.ir.partition import parse
from rpbench.plan.problem import Problem
from rpbench.plan.whole import WholePlan, best_plans, evaluate_whole
from rpbench.registry import entry
from rpbench.run.assemble import pose
from rpbench.run.modes.duel.contenders import Contender
from rpbench.run.modes.duel.run_off import Raced
from rpbench.sim.longest_path import simulate
from rpbench.strict_json import parsed

SCHEMA = "rpbench-duel-plans 1"
# Plans of a contender that go into the run-off, and the share by which one may simulate worse than the best: the same
# layers profiled twice within an hour put 4-4 of 1F1B 2 % before 5-3, and 4 % behind it.
MOST_PLANS = 3
NEAR = 0.05


def make_plans(request: Request, entrants: Sequence[Contender]) -> tuple[LayerTimes, dict[str, list[WholePlan]]]:
    """The layer times, and the plans of every contender that has its own: the best few searched, or the one read.

    Raises:
        ConfigError: if the file of plans is none, or not of these contenders.
        ValueError: if a schedule cannot be built for these sizes.
    """
    mode = request.mode
    assert isinstance(mode, Duel)
    if mode.plans is not None:
        return _read(request, entrants, mode.plans)
    times = problem_of(request, entrants[0]).times
    keeps_last = mode.recompute == "except_last"
    return times, shortlists(request, entrants, mode.search_budget, keeps_last=keeps_last)


def plans_text(times: LayerTimes, plans: Mapping[str, WholePlan], raced: Mapping[str, Sequence[Raced]]) -> str:
    """The file: the profile, each contender's partition and options, and what the run-off chose from."""
    found = {
        name: {
            **_named(plan),
            "num_evaluated": plan.num_evaluated,
            "keeps_last": plan.keeps_last,
            "run_off": [
                _named(each.plan)
                | {
                    "simulated_makespan_s": each.plan.makespan,
                    "speed": each.speed,
                    "error": each.error if each.speed is not None else None,
                    "num_comparisons": each.num_comparisons,
                }
                for each in raced.get(name, ())
            ],
        }
        for name, plan in plans.items()
    }
    return json.dumps({"schema": SCHEMA, "profile": json.loads(to_text(times)), "plans": found}, indent=1) + "\n"


def _named(plan: WholePlan) -> dict[str, Any]:
    return {"partition": str(plan.schedule.partition), "options": dict(plan.options)}


def _read(request: Request, entrants: Sequence[Contender], path: str) -> tuple[LayerTimes, dict[str, list[WholePlan]]]:
    source = read_source("mode.plans", path)
    assert source is not None
    try:
        found = parsed(source.text)
        if found["schema"] != SCHEMA:
            raise ValueError(f"its schema is not {SCHEMA!r}")
        times = from_text(json.dumps(found["profile"]))
        plans = {each.name: [_made(request, each, times, found["plans"])] for each in entrants if each.searches}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"mode.plans={path}: {error}; give the plans.json of a duel with the same sizes") from None
    return times, plans


def _made(request: Request, entrant: Contender, times: LayerTimes, found: Mapping[str, Any]) -> WholePlan:
    own = found[entrant.name]
    unmeasured = replace(request, cost=replace(request.cost, name="constant"))  # whose times are then put in
    problem = replace(problem_of(unmeasured, entrant, keeps_last=own["keeps_last"]), times=times)
    plan = evaluate_whole(problem, parse(own["partition"]), entrant.dispatch, own["options"])
    return replace(plan, num_evaluated=own["num_evaluated"])


# --- the search: the same, with the same budget, for every contender, on times profiled in this very run


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
