"""Changes: what any single change of a plan would bring, so that nothing is left on the table."""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from rpbench.ir.partition import Partition
from rpbench.plan.contest.frame import Outcome
from rpbench.plan.contest.frames import Frames
from rpbench.plan.contest.plans import Tuned
from rpbench.plan.contest.shifted_cuts import shifted
from rpbench.plan.contest.sketch import Sketcher
from rpbench.plan.contest.space import Setting, Space, space_of
from rpbench.plan.contest.terms import Terms

# So many times the work of the plan's own search goes into the cuts of its changes.
HARDER = 4


class Change(NamedTuple):
    """A plan that differs from another in one dimension.

    Args:
        dimension: which; `partition` for a layer that went to a neighbouring stage.
        gain: its pace over that of the plan, less 1; what does not fit brings nothing.
    """

    dimension: str
    setting: Setting
    partition: Partition
    outcome: Outcome
    gain: float


def improvements(
    plan: Tuned, terms: Terms, *, above: float = 0.01, space: Space | None = None, cuts: bool = True
) -> list[Change]:
    """Single changes that fit and make a plan faster by more than a fraction, the best first.

    Args:
        above: the fraction; 0.01 is one percent.
        space: what may be changed; None: all that a search may choose.
        cuts: also move single layers between neighbouring stages.
    """
    found = [change for change in every_change(plan, terms, space=space, cuts=cuts) if change.gain > above]
    return sorted(found, key=lambda change: change.gain, reverse=True)


def every_change(plan: Tuned, terms: Terms, *, space: Space | None = None, cuts: bool = True) -> Iterator[Change]:
    """What every single change of a plan brings, with all steps; what the schedule refuses is left out."""
    frames, sketcher = Frames(plan.contender, terms), Sketcher(plan.contender, terms, HARDER * plan.budget.climb_work)
    for dimension, setting in (space or space_of(plan.contender, terms)).changes(plan.setting):
        try:
            outcomes = [
                (cut, frames.of(setting, cut, plan.num_steps).outcome(cut, setting.recompute))
                for cut in _cuts(plan, setting, sketcher)
            ]
        except ValueError:
            continue
        frames.keep_only_of(plan.setting)  # those of many settings take tens of gigabytes
        cut, outcome = max(outcomes, key=lambda pair: (pair[1].fits, pair[1].tokens_per_s))
        yield Change(dimension, setting, cut, outcome, _gain(plan, outcome))
    for cut in shifted(plan.partition) if cuts else ():
        try:
            outcome = frames.of(plan.setting, cut, plan.num_steps).outcome(cut, plan.setting.recompute)
        except ValueError:  # the order follows from times, and that of this cut does not take the setting
            continue
        frames.keep_only_of(plan.setting)
        yield Change("partition", plan.setting, cut, outcome, _gain(plan, outcome))


def polished(plan: Tuned, terms: Terms, *, space: Space | None = None, rounds: int = 4) -> Tuned:
    """The plan after the best single change, again and again until none brings more than a tenth of a percent.

    A search skips what its sketches say is slow; this does not, and takes as many timelines as there are changes.
    """
    for _ in range(rounds):
        found = improvements(plan, terms, above=0.001, space=space)
        if not found:
            return plan
        best = found[0]
        plan = replace(plan, setting=best.setting, partition=best.partition, outcome=best.outcome)
    return plan


def _cuts(plan: Tuned, setting: Setting, sketcher: Sketcher) -> tuple[Partition, ...]:
    cuts = sketcher.of(setting).cuts
    alike = setting.chunks_per_device == plan.setting.chunks_per_device
    return tuple(dict.fromkeys((plan.partition, *cuts))) if alike else cuts


def _gain(plan: Tuned, outcome: Outcome) -> float:
    return outcome.tokens_per_s / plan.outcome.tokens_per_s - 1 if outcome.fits else -1.0
