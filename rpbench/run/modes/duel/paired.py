"""Ratios over starts, each within its own."""

from collections.abc import Sequence
from statistics import median
from typing import NamedTuple


class Ratio(NamedTuple):
    """A median over starts, with the least and the greatest: too few for more."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.low:.3f}-{self.high:.3f})"


def ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Ratio:
    """The median of the starts' ratios, and their range.

    Raises:
        ValueError: unless there is one of each for every start.
    """
    ratios = [one / other for one, other in zip(numerators, denominators, strict=True)]
    if not ratios:
        raise ValueError("no start to compare: a ratio needs at least 1")
    return Ratio(median(ratios), min(ratios), max(ratios))
