"""The outcome of every single change of a plan: a search that has ended leaves none that is faster."""

from collections.abc import Iterator
from typing import NamedTuple

from rpbench.ir.partition import Partition
from rpbench.plan.contest.contender import Setting, Space, space_of
from rpbench.plan.contest.frame import Frames
from rpbench.plan.contest.plans import Outcome, Tuned
from rpbench.plan.contest.restarts import shifted
from rpbench.plan.contest.sketch import Sketcher
from rpbench.plan.contest.terms import Terms

# The cuts of a change are searched with this multiple of the work of the plan's own sketches.
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
    """The outcome of every single change of a plan, with all steps; what the schedule refuses is left out."""
    sketcher = Sketcher(plan.contender, terms, HARDER * plan.budget.climb_work)
    for dimension, setting in (space or space_of(plan.contender, terms)).changes(plan.setting):
        frames = Frames(plan.contender, terms)  # new ones: together those of one large case took 22 GB
        try:
            outcomes = [
                (cut, frames.of(setting, cut, plan.num_steps).outcome(cut, setting.recompute))
                for cut in _cuts(plan, setting, sketcher)
            ]
        except ValueError:
            continue
        cut, outcome = max(outcomes, key=lambda pair: (pair[1].fits, pair[1].tokens_per_s))
        yield Change(dimension, setting, cut, outcome, _gain(plan, outcome))
    frames = Frames(plan.contender, terms)
    for cut in shifted(plan.partition) if cuts else ():
        try:
            frame = frames.of(plan.setting, cut, plan.num_steps)
            outcome = frame.outcome(cut, plan.setting.recompute)
        except ValueError:  # the order follows from times, and that of this cut does not take the setting
            continue
        frames = frames if frame.serves_any_cut else Frames(plan.contender, terms)
        yield Change("partition", plan.setting, cut, outcome, _gain(plan, outcome))


def _cuts(plan: Tuned, setting: Setting, sketcher: Sketcher) -> tuple[Partition, ...]:
    cuts = sketcher.of(setting).cuts
    alike = setting.chunks_per_device == plan.setting.chunks_per_device
    return tuple(dict.fromkeys((plan.partition, *cuts))) if alike else cuts


def _gain(plan: Tuned, outcome: Outcome) -> float:
    return outcome.tokens_per_s / plan.outcome.tokens_per_s - 1 if outcome.fits else -1.0
