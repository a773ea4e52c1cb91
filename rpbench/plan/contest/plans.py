"""Plans: what a search has tried, what it found, and what it may spend."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

from rpbench.ir.partition import Partition
from rpbench.plan.contest.contender import Contender, Setting

# What is better by less is no improvement.
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Budget:
    """The budget of a contender's search.

    Args:
        work: in timelines with all that moves; making what they are timed on counts as `FRAME` of them.
        climb_work: actions timed in one sketch.
        restarts: of a round that tries to beat the plan, beyond `work` (`rpbench.plan.contest.restarts`).

    Raises:
        ValueError: for less than one of either.
    """

    work: int = 320
    climb_work: int = 6_000_000
    restarts: int = 0

    def __post_init__(self) -> None:
        if self.work < 1 or self.climb_work < 1:
            raise ValueError(f"budget of {self.work} timelines, {self.climb_work} actions a sketch: at least 1 each")


@dataclass(frozen=True)
class Outcome:
    """Pace and memory of a cut, simulated.

    Args:
        keeps: stages that recompute nothing.
        peak_bytes: of the fullest device; `host_bytes` beside it.
        misfit: how many times over the limit the fuller of device and host is; at most 1 where the plan fits.
    """

    tokens_per_s: float
    step_time_s: float
    keeps: tuple[int, ...]
    peak_bytes: int
    host_bytes: int
    misfit: float

    @property
    def fits(self) -> bool:
        return self.misfit <= 1


class Tried(NamedTuple):
    """A setting that was looked at: with its best cut if it was timed, or why not."""

    setting: Setting
    partition: Partition | None = None
    outcome: Outcome | None = None
    remark: str = ""

    @property
    def cut(self) -> Partition:
        """The best cut of a setting that was timed."""
        assert self.partition is not None
        return self.partition

    @property
    def timed(self) -> Outcome:
        """The outcome of a setting that was timed."""
        assert self.outcome is not None
        return self.outcome

    @property
    def score(self) -> float:
        """The `rank` of a setting that was timed."""
        return rank(self.timed)


class Restarted(NamedTuple):
    """The random restarts of a search (`rpbench.plan.contest.restarts`).

    Args:
        number: of all rounds.
        gain: that the last round found over the best plan before it, as a share; None: there was no round.
    """

    number: int = 0
    gain: float | None = None


NONE = Restarted()


@dataclass(frozen=True)
class Tuned:
    """The best plan of a contender.

    Args:
        outcome: of all the steps; where nothing fits, of the plan that lacks least.
        tried: every setting looked at, the plan's own included; paces are those of few steps.
        restarted: what random restarts did; a plan that fits and is hard to beat has a gain near 0.
        work, num_timed, num_sketched: spent of the budget; timelines with all that moves, and cuts timed by their
            computation alone.
        num_steps: in a row, that `outcome` is of.
        is_whole: whether the search came to its end; False where time was over before.
        bound: tokens per second that no plan of the contender exceeds (`rpbench.plan.contest.bounds`); 0: none fits.
        least_bytes: the fullest device holds no less in any plan; 0 where one fits.
    """

    contender: Contender
    setting: Setting
    partition: Partition
    outcome: Outcome
    tried: tuple[Tried, ...] = field(repr=False)
    budget: Budget
    work: int
    num_timed: int
    num_sketched: int
    num_steps: int
    is_whole: bool = True
    bound: float = inf
    least_bytes: int = 0
    restarted: Restarted = NONE

    @property
    def gap(self) -> float:
        """By how much, at most, another plan of the contender is faster, as a share of this one's pace."""
        return max(0.0, self.bound / self.outcome.tokens_per_s - 1)


def rank(outcome: Outcome) -> float:
    """Tokens per second where a plan fits; otherwise below 0, by how much it does not."""
    return outcome.tokens_per_s if outcome.fits else -outcome.misfit


def beats(one: Tried, other: Tried) -> bool:
    """Whether one is better than another, by more than rounding."""
    if one.outcome is None or other.outcome is None:
        return one.outcome is not None
    known = rank(other.outcome)
    return rank(one.outcome) > known + TOLERANCE * abs(known)


def leaders(found: Sequence[Tried], most: int, close: float) -> list[Tried]:
    """The best so many, the best first, as far as they are close to it (a share of its pace)."""
    best = sorted(found, key=lambda each: each.score, reverse=True)[:most]
    worth = best[0].score * (1 - close)
    return [each for each in best if each is best[0] or each.score >= worth]
