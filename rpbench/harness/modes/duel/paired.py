"""Paired ratios: two contenders within the same round, so that what slows the machine down slows both."""

from collections.abc import Sequence
from random import Random
from statistics import median
from typing import NamedTuple

RESAMPLES = 2000
CONFIDENCE = 0.95


class Ratio(NamedTuple):
    """A median over rounds with its bootstrap interval."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.low:.3f}-{self.high:.3f})"


def ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Ratio:
    """The median of the rounds' ratios, and the interval that resampled rounds give with 95 % confidence.

    The same rounds always give the same interval. Source: Efron, "Bootstrap Methods", Annals of Statistics 1979.

    Raises:
        ValueError: unless there is one of each for every round.
    """
    ratios = [one / other for one, other in zip(numerators, denominators, strict=True)]
    if not ratios:
        raise ValueError("no round to compare: a ratio needs at least 1")
    draw = Random(0)
    medians = sorted(median(draw.choices(ratios, k=len(ratios))) for _ in range(RESAMPLES))
    edge = int(RESAMPLES * (1 - CONFIDENCE) / 2)
    return Ratio(median(ratios), medians[edge], medians[-1 - edge])


def noise(twins: Ratio) -> float:
    """How far from 1 the ratio of a contender and its twin may be: no difference smaller than that is one."""
    return max(abs(twins.low - 1), abs(twins.high - 1))
