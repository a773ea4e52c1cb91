"""Time to a loss: tokens and seconds a method needs for what plain training reaches with three quarters of them.

A goal is set by a flushed run alone, whatever the others do: the median over the seeds of its loss after `SHARE` of the
tokens, averaged over the last `SMOOTH` batches. All are timed to GPipe's, which of the flushed ones learns slowest. A
method that steps after every microbatch steps more often than GPipe: what its lateness costs in tokens is counted to
the goal of the flushed method that steps as often, against that one.
"""

from collections.abc import Sequence
from math import inf, isinf
from typing import NamedTuple

import numpy as np
import pandas as pd

SHARE = 0.75
SMOOTH = 4  # points a curve is averaged over
PLAIN, PLAIN_BY_MICROBATCH = "gpipe", "one_by_one"


class Spread(NamedTuple):
    """Median, least and most over seeds; infinite where a seed never came to the goal."""

    median: float
    least: float
    most: float


def goal_of(data: pd.DataFrame, method: str = PLAIN) -> float:
    """The loss that a flushed method sets."""
    plain = data[data["method"] == method]
    at = round(SHARE * len(plain["losses"].iloc[0])) - SMOOTH
    return float(np.median([smoothed(losses)[at] for losses in plain["losses"]]))


def reached(data: pd.DataFrame, over: str, goal: float) -> pd.Series:
    """The first point of every run at or below a goal, in `tokens` or `seconds`; infinite for a run that has none."""
    return pd.Series([_first(goal, row["losses"], row[over]) for row in data.to_dict("records")], index=data.index)


def spread(values: Sequence[float]) -> Spread:
    """Median and range of the seeds' values."""
    return Spread(float(np.median(values)), min(values), max(values))


def token_multiples(data: pd.DataFrame, by_batch: Sequence[str]) -> dict[str, Spread]:
    """Tokens to the goal of the flushed method that steps as often, over that method's, seed by seed.

    Args:
        by_batch: methods that step once a batch; the others step after every microbatch.
    """
    found = {}
    for plain, often in ((PLAIN, False), (PLAIN_BY_MICROBATCH, True)):
        needed = data.assign(needed=reached(data, "tokens", goal_of(data, plain))).set_index(["method", "seed"])[
            "needed"
        ]
        for method in data["method"].unique():
            if (method not in by_batch) == often:
                found[method] = spread([_over(own, needed[plain, seed]) for seed, own in needed[method].items()])
    return found


def _over(own: float, plain: float) -> float:
    """A ratio; infinite where neither came to the goal, for nothing is known then."""
    return inf if isinf(plain) else own / plain


def smoothed(values: np.ndarray) -> np.ndarray:
    """Means over `SMOOTH` points in a row."""
    return np.convolve(values, np.ones(SMOOTH) / SMOOTH, mode="valid")


def _first(goal: float, losses: np.ndarray, over: np.ndarray) -> float:
    below = np.flatnonzero(smoothed(losses) <= goal)
    return float(over[SMOOTH - 1 :][below[0]]) if len(below) else float("inf")
