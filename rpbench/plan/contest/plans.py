"""Plans: settings a search has tried, the best plan it found, and its budget."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

from rpbench.ir.partition import Partition
from rpbench.plan.contest.contender import Contender, Setting

TOLERANCE = 1e-4  # least relative gain in pace that counts as an improvement
PROVEN = 1e-3  # a plan whose bound is at most this much higher is searched no further


@dataclass(frozen=True)
class Budget:
    """The budget of a contender's search; ValueError if `work` or `climb_work` is below 1."""

    work: int = 320  # timelines with all transfers; making a frame counts as `FRAME` of them
    climb_work: int = 6_000_000  # actions timed in one sketch
    restarts: int = 0  # random restarts per round, beyond `work` (`rpbench.plan.contest.restarts`)

    def __post_init__(self) -> None:
        if self.work < 1 or self.climb_work < 1:
            raise ValueError(f"budget of {self.work} timelines, {self.climb_work} actions a sketch: at least 1 each")


@dataclass(frozen=True)
class Outcome:
    """Pace and memory of a cut, simulated."""

    tokens_per_s: float
    step_time_s: float
    keeps: tuple[int, ...]  # layers of each stage that do not recompute
    peak_bytes: int  # bytes on the fullest device
    host_bytes: int
    misfit: float  # largest ratio of bytes needed to the limit, over device, host and SSD; at most 1 if the plan fits

    @property
    def fits(self) -> bool:
        return self.misfit <= 1


class Tried(NamedTuple):
    """A setting that was tried: its best cut and outcome if it was timed, else a remark why not.

    `cut`, `timed` and `score` are for timed settings.
    """

    setting: Setting
    partition: Partition | None = None
    outcome: Outcome | None = None
    remark: str = ""

    @property
    def cut(self) -> Partition:
        assert self.partition is not None
        return self.partition

    @property
    def timed(self) -> Outcome:
        assert self.outcome is not None
        return self.outcome

    @property
    def score(self) -> float:
        return rank(self.timed)


class Restarted(NamedTuple):
    """The number of random restarts (`rpbench.plan.contest.restarts`), and the last round's relative gain in pace."""

    number: int = 0
    gain: float | None = None


NONE = Restarted()


@dataclass(frozen=True)
class Tuned:
    """The best plan of a contender."""

    contender: Contender
    setting: Setting
    partition: Partition
    outcome: Outcome  # over `num_steps` steps in a row; if no plan fits, that of the plan that lacks least memory
    tried: tuple[Tried, ...] = field(repr=False)  # every setting tried, the plan's own included, timed over few steps
    budget: Budget
    work: int  # budget spent
    # num_timed, num_sketched: timelines with all transfers; cuts timed by their computation alone
    num_timed: int
    num_sketched: int
    num_steps: int
    is_whole: bool = True  # whether the search was completed; False if the time limit ended it
    bound: float = inf  # tokens per second that no plan exceeds (`Bounds.best_pace`); infinite if no plan fits
    # lower bounds on the bytes of the fullest device and of the host in every plan; 0 if a plan fits
    least_bytes: int = 0
    least_host_bytes: int = 0
    restarted: Restarted = NONE  # a plan that fits and is hard to beat has a gain near 0

    @property
    def gap(self) -> float:
        """Upper bound on how much faster another plan of the contender is, relative to this plan's pace."""
        return max(0.0, self.bound / self.outcome.tokens_per_s - 1)


def rank(outcome: Outcome) -> float:
    """Tokens per second if the plan fits, else minus its misfit."""
    return outcome.tokens_per_s if outcome.fits else -outcome.misfit


def beats(one: Tried, other: Tried) -> bool:
    """Whether one ranks above another by more than `TOLERANCE`; a timed setting beats one that was not timed."""
    if one.outcome is None or other.outcome is None:
        return one.outcome is not None
    known = rank(other.outcome)
    return rank(one.outcome) > known + TOLERANCE * abs(known)


def leaders(found: Sequence[Tried], most: int, close: float) -> list[Tried]:
    """The best plans, best first: at most `most`, all within the fraction `close` of the best."""
    best = sorted(found, key=lambda each: each.score, reverse=True)[:most]
    worth = best[0].score * (1 - close)
    return [each for each in best if each is best[0] or each.score >= worth]
