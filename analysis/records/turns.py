"""Turns: pairs of schedules whose order changes when more of what a step costs is charged.

Levels are cumulative, each an experiment of its own; a schedule that does not fit takes infinite time. A pair turns at
a level where the one that was ahead falls behind. Equal times, and two that do not fit, leave the order as it was.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from math import inf, isclose
from typing import Any, NamedTuple

# What each level adds to those before it -> the experiment that charges it.
LEVELS: Mapping[str, str] = {
    "order": "turning_order",
    "hops": "turning_hops",
    "transfers": "turning_transfers",
    "memory": "turning_memory",
    "halves": "turning_halves",
    "collectives": "turning_collectives",
}
_REL_TIE = 1e-9  # what rounding makes of equal times


class Turn(NamedTuple):
    """Two schedules that change places at a level.

    Args:
        first, second: who was ahead before it, and who is from then on.
        before, after: lead of `first` at the level before, and of `second` now; infinite where the other is out.
    """

    first: str
    second: str
    level: str
    before: float
    after: float


def step_time_s(run: Mapping[str, Any]) -> float:
    """Seconds of a step in a record; infinite where the schedule does not fit."""
    return float(run["step_time_s"]) if run["status"] == "ok" else inf


def lead(first: float, second: float) -> float:
    """By how much of its time the first is ahead of the second: 0.1 where the second takes 1.1 times as long.

    Returns:
        Infinite where only the second is out.

    Raises:
        ValueError: if both are out.
    """
    if first == second == inf:
        raise ValueError("both are out: neither is ahead; ask at a level where one fits")
    return second / first - 1


def turns(times: Mapping[str, Sequence[float]], levels: Sequence[str]) -> Iterator[Turn]:
    """Every change of order, level by level, pair by pair.

    Args:
        times: seconds of a step of each schedule, one a level.
        levels: their names, least detail first.
    """
    for one, other in combinations(times, 2):
        ahead = ""
        before = 0.0
        for level, mine, theirs in zip(levels, times[one], times[other], strict=True):
            if mine == theirs or isclose(mine, theirs, rel_tol=_REL_TIE):
                before = 0.0 if mine < inf else before
                continue
            now = one if mine < theirs else other
            if ahead and now != ahead:
                yield Turn(ahead, now, level, before, lead(*sorted((mine, theirs))))
            ahead, before = now, lead(*sorted((mine, theirs)))


def counted(found: Sequence[Turn], levels: Sequence[str]) -> dict[str, int]:
    """How many pairs each level turns; the first turns none, for nothing is before it."""
    return {level: sum(turn.level == level for turn in found) for level in levels[1:]}
