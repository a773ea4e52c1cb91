"""Plans that the contenders of a duel run, and their file, which another duel can take (`mode.plans`).

Layers are profiled once, plans are searched once, a run-off chooses among the best, and every start runs the chosen.

Simulation knows profiled layer times, but not what an engine does between two actions. Plans a few per cent apart
change places from one profile to the next, and from one engine to another. So the best few plans of every contender run
one after the other in each turn of one start, the run-off, and are compared within the turn: they share what the
machine does over seconds. The duel times the chosen plans anew, so that the luck of a winner does not count.

A plan replaces the one that simulates best only if it is faster beyond doubt. With nine comparisons each, taking the
fastest lost 4 % twice in one duel; with eight comparisons through runs of 1F1B, each known to 3 to 6 %, a plan of
torch's 1F1B that is 7 % faster was passed over.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rpbench.config.choices import ConfigError, Duel
from rpbench.config.files import read_source
from rpbench.config.request import Request
from rpbench.cost.profiled import from_text, to_text
from rpbench.cost.table import LayerTimes
from rpbench.engine.backends.threads import usable_cores
from rpbench.engine.measure.layer_times import side_by_side
from rpbench.ir.checks.check import check
from rpbench.ir.partition import parse
from rpbench.plan.problem import Problem
from rpbench.plan.whole import WholePlan, best_plans, evaluate_whole
from rpbench.registry import entry
from rpbench.run.assemble import pose
from rpbench.run.modes.duel.contenders import Contender
from rpbench.run.modes.duel.runs import Floats, pairs, runs_by
from rpbench.run.modes.duel.starts import Job, check_parity, planned_job, without
from rpbench.run.modes.duel.verdict import Started
from rpbench.sim.longest_path import simulate
from rpbench.untrusted import parsed

LEAST_COMPARISONS = 5  # clean ones; a plan with fewer is not chosen
BEYOND_DOUBT = 2.0  # standard errors by which a chosen plan is faster than the one that simulates best

Shortlists = Mapping[str, Sequence[WholePlan]]


@dataclass(frozen=True)
class Raced:
    plan: WholePlan
    # measured, over the contender's plan that simulates best: a geometric mean; None if it was not timed, and for
    # that plan itself
    speed: float | None = None
    error: float = math.inf  # standard error of the logarithm of `speed`
    num_comparisons: int = 0  # clean ones

    @property
    def is_faster(self) -> bool:
        """Whether it is faster than the plan that simulates best, beyond doubt."""
        if self.speed is None or self.num_comparisons < LEAST_COMPARISONS:
            return False
        return math.log(self.speed) > BEYOND_DOUBT * self.error


def run_off(
    request: Request, entrants: Sequence[Contender], shortlists: Shortlists, start: Callable[[Job], Started]
) -> dict[str, list[Raced]]:
    """The plans of every contender that searches, in simulated order; a single plan is not timed."""
    raced = {name: [Raced(plan) for plan in plans] for name, plans in shortlists.items()}
    lanes = {  # contender -> names of its plans in the run-off
        each.name: [f"{each.name}, plan {place}" for place in range(1, len(raced[each.name]) + 1)]
        for each in entrants
        if len(raced.get(each.name, ())) > 1
    }
    if not lanes or len(usable_cores()) < request.num_devices:
        return raced
    job = _job(request, entrants, shortlists, lanes)
    if not job.families:
        return raced
    columns = start(job).columns
    runs, number = runs_by(columns, "wall"), {name: place for place, name in enumerate(columns)}
    for name, (best, *others) in lanes.items():
        for place, lane in enumerate(others, start=1):
            if best in number and lane in number:
                found = pairs(runs, number[lane], number[best])
                raced[name][place] = _timed(raced[name][place], found.log_ratios[found.clean])
    return raced


def _timed(raced: Raced, log_ratios: Floats) -> Raced:
    num = int(log_ratios.size)
    if num < 2:
        return replace(raced, num_comparisons=num)
    error = float(log_ratios.std(ddof=1)) / math.sqrt(num)
    return replace(raced, speed=math.exp(float(log_ratios.mean())), error=error, num_comparisons=num)


def chosen(plans: Sequence[Raced]) -> Raced:
    """The fastest plan that is faster beyond doubt than the one that simulates best; else the latter."""
    return max((each for each in plans[1:] if each.is_faster), key=lambda each: each.speed or 0.0, default=plans[0])


def described(name: str, plans: Sequence[Raced]) -> str:
    """A line on the plan that a contender runs, and why."""
    first, *others = plans
    speeds = ", ".join(
        f"{_raced(each)} "
        + ("not timed" if each.speed is None else f"{each.speed:.3f} ±{each.error:.3f} ({each.num_comparisons})")
        for each in others
    )
    return f"{name} runs {_raced(chosen(plans))}; over {_raced(first)}, which simulates best: {speeds}"


def _raced(raced: Raced) -> str:
    rounds = f" in rounds of {raced.plan.options['round_size']}" if "round_size" in raced.plan.options else ""
    return f"{raced.plan.schedule.partition}{rounds}"


def _job(
    request: Request, entrants: Sequence[Contender], shortlists: Shortlists, lanes: Mapping[str, Sequence[str]]
) -> Job:
    """The start of the run-off: plans that train as plain training does; a family is a first plan and its rivals."""
    mode = request.mode_as(Duel)
    plans = {lane: plan for name, own in lanes.items() for lane, plan in zip(own, shortlists[name], strict=True)}
    racers = [replace(each, name=lane) for each in entrants for lane in lanes.get(each.name, ())]
    asked = planned_job(request, racers, plans)
    job = replace(asked, budget_s=mode.run_off_s, order_seed=asked.order_seed + mode.num_starts)
    fit = without(job, check_parity(job, mode.parity_seq_len))
    able = [[lane for lane in family if lane in fit.names] for family in lanes.values() if family[0] in fit.names]
    racing = tuple(tuple(family) for family in able if len(family) > 1)
    in_it = {lane for family in racing for lane in family}
    return replace(fit, entrants=tuple(each for each in fit.entrants if each.name in in_it), families=racing)


SCHEMA = "rpbench-duel-plans 1"
# Plans of a contender in the run-off, and the fraction by which one may simulate worse than the best: two profiles of
# the same layers within an hour put partition 4-4 of 1F1B 2 % before 5-3, and 4 % behind it.
MOST_PLANS = 3
NEAR = 0.05


def make_plans(request: Request, entrants: Sequence[Contender]) -> tuple[LayerTimes, dict[str, list[WholePlan]]]:
    """The layer times, and the plans of every contender that searches: the best few found, or the one of a file.

    Raises ConfigError for a file without plans of these contenders, ValueError if a schedule cannot be built.
    """
    if (path := request.mode_as(Duel).plans) is not None:
        return _read(request, entrants, path)
    return problem_of(request, entrants[0]).times, shortlists(request, entrants)


def plans_text(times: LayerTimes, plans: Mapping[str, WholePlan], raced: Mapping[str, Sequence[Raced]]) -> str:
    """The file: the profile, and each contender's partition, options and plans of the run-off."""
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
        if not isinstance(found, dict) or found.get("schema") != SCHEMA:
            raise ValueError(f"its schema is not {SCHEMA!r}")
        times = from_text(json.dumps(found["profile"]))
        plans = {each.name: [_made(request, each, times, found["plans"])] for each in entrants if each.searches}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"mode.plans={path}: {error}; give the plans.json of a duel with the same sizes") from None
    return times, plans


def _made(request: Request, entrant: Contender, times: LayerTimes, found: Mapping[str, Any]) -> WholePlan:
    own = found[entrant.name]
    unmeasured = replace(request, cost=replace(request.cost, name="constant"))  # the profile's times replace them
    problem = replace(problem_of(unmeasured, entrant, keeps_last=own["keeps_last"]), times=times)
    plan = evaluate_whole(problem, parse(own["partition"]), entrant.dispatch, own["options"])
    return replace(plan, num_evaluated=own["num_evaluated"])


# --- the search: the same for every contender, with the same budget, on times profiled in this run


def problem_of(request: Request, contender: Contender, *, keeps_last: bool = False) -> Problem:
    """The planning problem of a contender; ValueError as of `pose`."""
    options = {**entry(contender.schedule).options, **contender.options}
    schedule = replace(request.schedule, entry=entry(contender.schedule), options=options)
    problem = pose(replace(request, schedule=schedule))
    return replace(problem, keeps_last=keeps_last)


def shortlists(request: Request, entrants: Sequence[Contender]) -> dict[str, list[WholePlan]]:
    """The best plans of every contender that searches, within the duel's budget; ValueError without any."""
    mode = request.mode_as(Duel)
    return {
        contender.name: best_plans(
            problem_of(request, contender, keeps_last=mode.recompute == "except_last"),
            mode.search_budget,
            most=MOST_PLANS,
            within=NEAR,
            dispatch=contender.dispatch,
            choices=contender.choices(request.num_microbatches),
        )
        for contender in entrants
        if contender.searches
    }


def complete(entrants: Sequence[Contender], plans: Mapping[str, WholePlan]) -> dict[str, WholePlan]:
    """The plan of every contender, checked: its own, another's, or the limit without scheduling."""
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
    """The actions of a plan dealt evenly to independent devices; its makespan is that of perfect balance."""
    shape = plan.schedule.shape
    schedule = side_by_side(plan.schedule.cut, shape.num_ranks, shape.num_microbatches, shape.num_steps)
    timeline = simulate(schedule, plan.costs)
    busy = sum(float(span.end - span.start) for span in timeline.spans())
    return WholePlan(schedule, plan.costs, {}, busy / shape.num_ranks)
