"""Runs as columns, as in records, each compared with the references that ran just before and after it.

    run         R   c   a   R   d   R           the reference at the time of a run is the straight line between the
    time        0   1   2   3   4   5           logarithms of its two neighbours: steady drift cancels exactly

A reference is compared with the other references, so its ratio should be 1.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Columns = Mapping[str, Sequence[Any]]
Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]

CLOCKS = ("wall", "replay")  # wall-clock time, and the processor time of actions replayed on the action graph
DECIMALS = 6  # of a second
MOST_OTHERS = 0.05  # cores: a comparison in which other programs used more does not count
# Rank-seconds of a step that its replay does not explain (`rpbench.torch_runtime.recorded.outcome.unexplained`).
MISSING = ("late", "messages", "after", "between", "outside")


class Runs(NamedTuple):
    """The runs of one start, in their order."""

    who: npt.NDArray[np.int64]  # number of the contender
    at_s: Floats  # middle of each run
    took_s: Floats
    others_s: Floats  # processor time of other programs meanwhile; nan where unknown
    elapsed_s: Floats  # time in which other programs were watched


class Comparisons(NamedTuple):
    """A contender's runs over their neighbours."""

    log_ratios: Floats  # logarithm of the reference's time over its own: above 0 it is faster
    at_s: Floats
    others: Floats  # cores that other programs kept busy in the run and its neighbours; nan where unknown

    @property
    def clean(self) -> Flags:
        """Which comparisons count; one with an unknown load does not."""
        return np.asarray(self.others <= MOST_OTHERS)


def runs_by(columns: Mapping[str, Columns], clock: str) -> Runs:
    """All runs of a start in their order; contenders are numbered in the order of the mapping."""
    who = [number for number, own in enumerate(columns.values()) for _ in own["at_s"]]
    order = np.argsort([at for own in columns.values() for at in own["at_s"]], kind="stable")

    def column(key: str) -> Any:
        values = [math.nan if value is None else value for own in columns.values() for value in own[key]]
        return np.array(values, float)[order]

    return Runs(np.array(who)[order], column("at_s"), column(f"{clock}_s"), column("others_s"), column("elapsed_s"))


def compare(runs: Runs, contender: int, references: Sequence[int]) -> Comparisons:
    """A contender's runs over the references on either side; ValueError if there is no other reference."""
    known = np.flatnonzero(np.isin(runs.who, [number for number in references if number != contender]))
    if not known.size:
        raise ValueError("no reference has run: a comparison needs a run on either side")
    own = np.flatnonzero(runs.who == contender)
    own = own[(own > known[0]) & (own < known[-1])]
    after = np.searchsorted(known, own)
    sides = np.stack([known[after - 1], known[after]])
    reference = np.interp(runs.at_s[own], runs.at_s[known], np.log(runs.took_s[known]))
    both = np.vstack([sides, own])
    others = runs.others_s[both].sum(axis=0) / runs.elapsed_s[both].sum(axis=0)
    return Comparisons(reference - np.log(runs.took_s[own]), runs.at_s[own], others)


def pairs(runs: Runs, contender: int, other: int) -> Comparisons:
    """A contender's run of each turn over another's of the same turn; one of the two may have a warm-up run more."""
    own, others = (np.flatnonzero(runs.who == number) for number in (contender, other))
    num = min(own.size, others.size)
    both = np.stack([own[own.size - num :], others[others.size - num :]])
    took, load = runs.took_s[both], runs.others_s[both].sum(axis=0) / runs.elapsed_s[both].sum(axis=0)
    return Comparisons(np.log(took[1] / took[0]), runs.at_s[both[0]], load)
