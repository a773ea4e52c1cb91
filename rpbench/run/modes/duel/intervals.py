"""Intervals: quantiles of Student's t, order statistics, and block means of what is correlated in time."""

import math
from collections.abc import Sequence
from functools import cache

import numpy as np

from rpbench.run.modes.duel.neighbours import Floats

TRIMMED = 0.2  # share of each end of a block that its mean leaves out


def block_means(values: Floats, num_blocks: int) -> Floats:
    """Trimmed means of blocks of neighbours, as equally long as possible.

    Neighbours in time are correlated, far blocks are hardly: their spread tells how well the mean is known where that
    of single values does not. A fifth of each end is left out, because single runs are interrupted.

    Raises:
        ValueError: if there are fewer values than blocks.
    """
    if len(values) < num_blocks:
        raise ValueError(f"{len(values)} values in {num_blocks} blocks: a block holds at least 1")
    return np.array([_trimmed_mean(block) for block in np.array_split(values, num_blocks)])


def _trimmed_mean(values: Floats) -> float:
    cut = int(TRIMMED * len(values))
    return float(np.sort(values)[cut : len(values) - cut].mean())


def order_interval(values: Floats, confidence: float) -> tuple[float, float]:
    """The interval of a median between order statistics: exact for any continuous distribution of independent values.

    Between the two pairs of order statistics on either side of the confidence it is interpolated; where even the least
    and the greatest value have less confidence, it is nothing less than everything.

    Source: Hettmansperger and Sheather, "Confidence intervals based on interpolated order statistics", Statistics and
    Probability Letters 4 (1986).
    """
    ordered, num = np.sort(values), len(values)
    covered = [1 - 2 * sum(math.comb(num, k) for k in range(depth)) / 2**num for depth in range(1, num // 2 + 1)]
    depths = [depth for depth, share in enumerate(covered, start=1) if share >= confidence]
    if not depths:
        return -math.inf, math.inf
    depth = depths[-1]
    low, high = float(ordered[depth - 1]), float(ordered[num - depth])
    if depth == len(covered):
        return low, high
    inner = (covered[depth - 1] - confidence) / (covered[depth - 1] - covered[depth])
    weight = (num - depth) * inner / (depth + (num - 2 * depth) * inner)
    low += weight * (float(ordered[depth]) - low)
    high -= weight * (high - float(ordered[num - depth - 1]))
    return low, high


@cache
def student_quantile(confidence: float, freedom: int) -> float:
    """The t that Student's distribution stays below in absolute value with this confidence.

    Source: the finite series of Abramowitz and Stegun, 26.7.3 and 26.7.4, bisected.
    """
    low, high = 0.0, 1e6
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if _inside(middle, freedom) < confidence else (low, middle)
    return high


def _inside(t: float, freedom: int) -> float:
    """Probability that |T| <= t."""
    angle = math.atan(t / math.sqrt(freedom))
    cosine = math.cos(angle)
    odd = freedom % 2
    term = cosine if odd else 1.0
    total = term if freedom > 1 else 0.0
    for k in range(2 + odd, freedom - 1, 2):
        term *= cosine**2 * (k - 1) / k
        total += term
    inside = math.sin(angle) * total
    return (angle + inside) * 2 / math.pi if odd else inside


def mean_square(rows: Sequence[Floats]) -> float:
    """Variance of values around the mean of their own row, over all rows; 0 where no row has two."""
    freedom = sum(len(row) - 1 for row in rows)
    return sum(float(((row - row.mean()) ** 2).sum()) for row in rows) / freedom if freedom > 0 else 0.0
