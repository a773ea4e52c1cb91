"""Run-off: plans that simulate nearly alike are timed, each on its contender's own engine, and a faster one is run.

Simulation knows profiled layer times, not what an engine does between two actions. Plans a few per cent apart change
places from one profile to the next, and what is best on one engine need not be so on another. So every contender
sends its best few plans into one start, resident side by side with 1F1B, in turns of random order as in the duel.
The duel then times what was chosen anew, so that the luck of a winner does not count.

The plan that simulates best gives way only to one that is faster beyond doubt: with nine comparisons each, taking
whoever came out first lost 4 % twice in one duel.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from rpbench.engine.backends.cpu import usable_cores
from rpbench.harness.choices import Duel
from rpbench.harness.modes.duel.contenders import BASE, REFERENCES, Contender
from rpbench.harness.modes.duel.job import Job, job_of
from rpbench.harness.modes.duel.neighbours import Floats, compare
from rpbench.harness.modes.duel.parity import check_parity, without
from rpbench.harness.modes.duel.runs import runs_by
from rpbench.harness.modes.duel.started import Started
from rpbench.harness.request import Request
from rpbench.plan.whole import WholePlan

# Clean comparisons of a plan; with fewer it is not chosen.
LEAST_COMPARISONS = 5
# Standard errors by which a plan is faster than the one that simulates best.
BEYOND_DOUBT = 2.0

Shortlists = Mapping[str, Sequence[WholePlan]]


@dataclass(frozen=True)
class Raced:
    """A plan of a run-off.

    Args:
        speed: over the plan of 1F1B that simulates best, by the clock: a geometric mean; None if it was not timed.
        error: standard error of its logarithm.
        num_comparisons: clean ones.
    """

    plan: WholePlan
    speed: float | None = None
    error: float = math.inf
    num_comparisons: int = 0


def run_off(
    request: Request, entrants: Sequence[Contender], shortlists: Shortlists, start: Callable[[Job], Started]
) -> dict[str, list[Raced]]:
    """The plans of every contender with a search of its own, as simulation ranks them.

    Args:
        entrants: references and others.
        shortlists: contender -> plans, best first; a contender with one plan is not timed.
        start: plays a job.
    """
    raced = {name: [Raced(plan) for plan in plans] for name, plans in shortlists.items()}
    lanes = {
        _lane(entrant.name, place): replace(entrant, name=_lane(entrant.name, place))
        for entrant in entrants
        if len(raced.get(entrant.name, ())) > 1
        for place in range(len(raced[entrant.name]))
    }
    if not lanes or len(usable_cores()) < request.num_devices:
        return raced
    job = _job(request, entrants, shortlists, lanes)
    if job is None:
        return raced
    columns = start(job).columns
    names = list(columns)
    walls, known = runs_by(columns, "wall"), [names.index(name) for name in REFERENCES if name in names]
    for name, plans in raced.items():
        for place, each in enumerate(plans):
            if (lane := _lane(name, place)) in names:
                found = compare(walls, names.index(lane), known)
                plans[place] = _timed(each, found.log_ratios[found.clean])
    return raced


def _timed(raced: Raced, log_ratios: Floats) -> Raced:
    num = int(log_ratios.size)
    if num < 2:
        return replace(raced, num_comparisons=num)
    error = float(log_ratios.std(ddof=1)) / math.sqrt(num)
    return replace(raced, speed=math.exp(float(log_ratios.mean())), error=error, num_comparisons=num)


def chosen(plans: Sequence[Raced]) -> Raced:
    """The fastest of those plans that are faster than what simulates best, beyond doubt; else what simulates best."""
    first = plans[0]
    faster = [each for each in plans[1:] if _is_faster(each, first)]
    return max(faster, key=lambda each: each.speed or 0.0, default=first)


def _is_faster(raced: Raced, first: Raced) -> bool:
    if raced.speed is None or first.speed is None:
        return False
    known = min(raced.num_comparisons, first.num_comparisons) >= LEAST_COMPARISONS
    return known and math.log(raced.speed / first.speed) > BEYOND_DOUBT * math.hypot(raced.error, first.error)


def told(name: str, plans: Sequence[Raced]) -> str:
    """A line on what a contender runs and why."""
    all_of_them = ", ".join(
        f"{each.plan.schedule.partition}{_rounds(each.plan)} "
        + ("not timed" if each.speed is None else f"{each.speed:.3f} ±{each.error:.3f} ({each.num_comparisons})")
        for each in plans
    )
    best = chosen(plans)
    return f"{name} runs {best.plan.schedule.partition}{_rounds(best.plan)} of {all_of_them}"


def _rounds(plan: WholePlan) -> str:
    return f" in rounds of {plan.options['round_size']}" if "round_size" in plan.options else ""


def _lane(name: str, place: int) -> str:
    return f"{name}, plan {place + 1}"


def _job(
    request: Request, entrants: Sequence[Contender], shortlists: Shortlists, lanes: Mapping[str, Contender]
) -> Job | None:
    """The start of those plans that train as plain training does; none where 1F1B does not."""
    mode = request.mode
    assert isinstance(mode, Duel)
    references = [entrant for entrant in entrants if entrant.name in REFERENCES]
    plans = {entrant.name: shortlists[BASE][0] for entrant in references}
    for name, own in shortlists.items():
        plans |= {_lane(name, place): plan for place, plan in enumerate(own)}
    asked = job_of(request, [*references, *lanes.values()], plans)
    job = replace(asked, budget_s=mode.run_off_s, order_seed=asked.order_seed + mode.num_starts)
    fit = without(job, check_parity(job, mode.parity_seq_len))
    return fit if any(entrant.name in REFERENCES for entrant in fit.entrants) else None
