"""Run-off: plans that simulate nearly alike are timed, each on its contender's own engine, and a faster one is run.

Simulation knows profiled layer times, not what an engine does between two actions. Plans a few per cent apart change
places from one profile to the next, and what is best on one engine need not be so on another. So every contender
sends its best few plans into one start, resident side by side, which run one after the other in every turn: what the
machine does over seconds is common to them, and a plan is held against its rival's run of the same turn. The duel
then times what was chosen anew, so that the luck of a winner does not count.

The plan that simulates best gives way only to one that is faster beyond doubt: with nine comparisons each, taking
whoever came out first lost 4 % twice in one duel; with eight through the runs of 1F1B, each known to 3 to 6 %, a plan
of torch's 1F1B that is 7 % faster was passed over.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from rpbench.config.choices import Duel
from rpbench.config.request import Request
from rpbench.engine.backends.cpu import usable_cores
from rpbench.plan.whole import WholePlan
from rpbench.run.modes.duel.contenders import Contender
from rpbench.run.modes.duel.rows import Started
from rpbench.run.modes.duel.runs import Floats, pairs, runs_by
from rpbench.run.modes.duel.starts import Job, check_parity, planned_job, without

# Clean comparisons of a plan; with fewer it is not chosen.
LEAST_COMPARISONS = 5
# Standard errors by which a plan is faster than the one that simulates best.
BEYOND_DOUBT = 2.0

Shortlists = Mapping[str, Sequence[WholePlan]]


@dataclass(frozen=True)
class Raced:
    """A plan of a run-off.

    Args:
        speed: over the plan of this contender that simulates best, by the clock: a geometric mean; None if it was not
            timed, and for that plan itself.
        error: standard error of its logarithm.
        num_comparisons: clean ones.
    """

    plan: WholePlan
    speed: float | None = None
    error: float = math.inf
    num_comparisons: int = 0

    @property
    def is_faster(self) -> bool:
        """Whether it is faster than what simulates best, beyond doubt."""
        if self.speed is None or self.num_comparisons < LEAST_COMPARISONS:
            return False
        return math.log(self.speed) > BEYOND_DOUBT * self.error


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
    job = _job(request, shortlists, lanes)
    if not job.families:
        return raced
    columns = start(job).columns
    runs, number = runs_by(columns, "wall"), {name: place for place, name in enumerate(columns)}
    for name, plans in raced.items():
        first = number.get(_lane(name, 0))
        for place, each in enumerate(plans[1:], start=1):
            if first is not None and (own := number.get(_lane(name, place))) is not None:
                found = pairs(runs, own, first)
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
    return max((each for each in plans[1:] if each.is_faster), key=lambda each: each.speed or 0.0, default=plans[0])


def told(name: str, plans: Sequence[Raced]) -> str:
    """A line on what a contender runs and why."""
    first, *others = plans
    others_told = ", ".join(
        f"{_named(each)} "
        + ("not timed" if each.speed is None else f"{each.speed:.3f} ±{each.error:.3f} ({each.num_comparisons})")
        for each in others
    )
    return f"{name} runs {_named(chosen(plans))}; over {_named(first)}, which simulates best: {others_told}"


def _named(raced: Raced) -> str:
    rounds = f" in rounds of {raced.plan.options['round_size']}" if "round_size" in raced.plan.options else ""
    return f"{raced.plan.schedule.partition}{rounds}"


def _lane(name: str, place: int) -> str:
    return f"{name}, plan {place + 1}"


def _job(request: Request, shortlists: Shortlists, lanes: Mapping[str, Contender]) -> Job:
    """The start of those plans that train as plain training does; a family has the first plan and another."""
    mode = request.mode
    assert isinstance(mode, Duel)
    plans = {_lane(name, place): plan for name, own in shortlists.items() for place, plan in enumerate(own)}
    asked = planned_job(request, list(lanes.values()), plans)
    job = replace(asked, budget_s=mode.run_off_s, order_seed=asked.order_seed + mode.num_starts)
    fit = without(job, check_parity(job, mode.parity_seq_len))
    names = fit.names
    families = [[_lane(name, place) for place in range(len(own))] for name, own in shortlists.items()]
    able = [[lane for lane in family if lane in names] for family in families if family[0] in names]
    racing = tuple(tuple(family) for family in able if len(family) > 1)
    in_it = {lane for family in racing for lane in family}
    return replace(fit, entrants=tuple(each for each in fit.entrants if each.name in in_it), families=racing)
