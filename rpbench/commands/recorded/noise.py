"""Noise of a run's metrics: how far they may be off by chance, and whether two runs differ by more.

A simulated, derived or predicted number is the same each time; a prediction declares an interval. A measured run says
how long each of its steps took: their range is its noise within the run. Another start of the same run differs by more
(`docs/duel.md`), so that runs of one request, which differ in nothing or in their seed, share the range of all of them.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Literal

from rpbench.finite import is_finite
from rpbench.records.record import Record

Interval = tuple[float, float]
Verdict = Literal["beyond", "within", "equal", "unknown"]

_BY_CHANCE = ("measured", "measured elsewhere")
_ROUNDING = 1e-9  # share of a number
_LEAST_STEPS = 3  # after the first, which finds nothing warm


def noises(rows: Sequence[Record], key: str, groups: Sequence[object]) -> list[Interval | None]:
    """Run -> where a metric would lie were it taken again; None where nothing tells.

    Args:
        groups: run -> what it is a run of; those of one group are repetitions.
    """
    own = [interval(row, key) for row in rows]
    found = []
    for group, each, row in zip(groups, own, rows, strict=True):
        alike = [other[key] for other, named in zip(rows, groups, strict=True) if named == group and _has(other, key)]
        ends = [*alike, *(end for end in each or ())]
        told = each is not None or len(alike) > 1
        found.append((min(ends), max(ends)) if told and _has(row, key) else None)
    return found


def interval(row: Record, key: str) -> Interval | None:
    """The noise that a record tells of a metric of its own; None where it tells none."""
    if not _has(row, key):
        return None
    value = row[key]
    low, high = row.get(f"{key}_low"), row.get(f"{key}_high")
    if is_finite(low) and is_finite(high):
        return min(low, value), max(high, value)
    if row.get("evidence") not in _BY_CHANCE:
        return value, value
    steps = step_seconds(row)
    if len(steps) < _LEAST_STEPS or key not in ("step_time_s", "tokens_per_s"):
        return None
    mean = sum(steps) / len(steps)
    low, high = (value * min(steps) / mean, value * max(steps) / mean)
    return (low, high) if key == "step_time_s" else (value * mean / max(steps), value * mean / min(steps))


def step_seconds(row: Record) -> list[float]:
    """Seconds of each step of a measured run but the first, from the times at which steps ended."""
    ends = row.get("loss_curve_s")
    if not isinstance(ends, list) or not all(map(is_finite, ends)):
        return []
    found = [after - before for before, after in pairwise(ends)]
    return found if all(seconds > 0 for seconds in found) else []


def verdict(first: Interval | None, other: Interval | None) -> Verdict:
    """Whether two intervals are apart; numbers without noise are equal or not."""
    if first is None or other is None:
        return "unknown"
    apart = max(first[0] - other[1], other[0] - first[1])
    if apart > _ROUNDING * max(map(abs, (*first, *other))):
        return "beyond"
    return "equal" if first[0] == first[1] and other[0] == other[1] else "within"


def _has(row: Mapping[str, object], key: str) -> bool:
    return is_finite(row.get(key))
