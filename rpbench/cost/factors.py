"""Factors: how often each counted term goes into what probes took, by least squares of relative errors."""

from collections.abc import Sequence
from itertools import combinations

import numpy as np


def factors(counts: Sequence[Sequence[float]], times: Sequence[float]) -> list[float]:
    """The factors f with sum_j counts[i][j] * f[j] nearest to times[i], relative to times[i].

    The terms are few, so every set of them that may differ from 0 is tried: the best solution without a negative
    factor is the least of all (Lawson and Hanson, "Solving Least Squares Problems", 1974, chapter 23).

    Args:
        counts: a row a probe, a column a term.
        times: of each probe, above 0.

    Raises:
        ValueError: without a probe, or if one took no time.
    """
    if not times or min(times) <= 0:
        raise ValueError(f"times of probes {list(times)}: at least 1, each above 0; measure again")
    table = np.asarray(counts, dtype=float) / np.asarray(times, dtype=float)[:, None]
    num_terms = table.shape[1]
    best, least = np.zeros(num_terms), float(len(times))
    for size in range(1, num_terms + 1):
        for chosen in map(list, combinations(range(num_terms), size)):
            found = np.linalg.lstsq(table[:, chosen], np.ones(len(times)), rcond=None)[0]
            left = float(((table[:, chosen] @ found - 1) ** 2).sum())
            if found.min() >= 0 and left < least:
                best, least = np.zeros(num_terms), left
                best[chosen] = found
    return [float(factor) for factor in best]
