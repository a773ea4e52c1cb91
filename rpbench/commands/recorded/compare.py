"""`compare`: records side by side.

A simulated, derived or predicted number is the same each time; a prediction declares an interval. The range of a
measured run's steps is the noise within the run. Another start of the same run differs by more (`docs/duel.md`), so
runs that differ at most in their seed share the range of all of them.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise, product
from pathlib import Path
from typing import Any, Literal, TextIO

from rpbench.records.describe import IN_SLOTS, clock
from rpbench.records.differing import differing
from rpbench.records.record import Record, find
from rpbench.untrusted import is_finite

Interval = tuple[float, float]
Verdict = Literal["beyond", "within", "equal", "unknown"]

_BY_CHANCE = ("measured", "measured elsewhere")
_SAME = 1e-9  # smaller relative differences are none
_LEAST_STEPS = 3  # after the first, which warms up


def noises(rows: Sequence[Record], key: str, groups: Sequence[object]) -> list[Interval | None]:
    """For each run the interval of a metric measured again, None if unknown; the runs of a group are repetitions."""
    own = [interval(row, key) for row in rows]
    found = []
    for group, each, row in zip(groups, own, rows, strict=True):
        alike = [other[key] for other, named in zip(rows, groups, strict=True) if named == group and _has(other, key)]
        ends = [*alike, *(end for end in each or ())]
        told = each is not None or len(alike) > 1
        found.append((min(ends), max(ends)) if told and _has(row, key) else None)
    return found


def interval(row: Record, key: str) -> Interval | None:
    """The interval of a metric from its record alone; None if the record does not say."""
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
    """Seconds of every step of a measured run except the first, from the ends of the steps."""
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
    if apart > _SAME * max(map(abs, (*first, *other))):
        return "beyond"
    return "equal" if first[0] == first[1] and other[0] == other[1] else "within"


def _has(row: Mapping[str, object], key: str) -> bool:
    return is_finite(row.get(key))


_ROUNDING = 1e-9  # smaller values are rounding errors

_MARKS = {"within": " ~", "unknown": " ?"}
_REMARKS = {
    "within": "~ within the noise of the two runs",
    "unknown": "? no noise is told: one run was measured once; repeat it, as in seed=1,2,3, or ask a duel",
}
_CLOCKS = "some runs count slots and others seconds: their times have no ratio"
_METRICS = (
    *("step_time_s", "makespan_s", "tokens_per_s", "bubble_makespan", "bubble_span", "bubble_over_ideal"),
    *("fill_s", "switch_s", "drain_s", "intra_s", "comm_exposed_s"),
    *("goodput", "goodput_steps_per_s", "goodput_tokens_per_s", "recover_s", "failure_free_step_s", "step_s_after"),
)


def compare_records(results: Path, names: list[str], people: TextIO) -> dict[str, Any]:
    """Print a table of the named runs and return it: choices that differ, metrics, and each metric over the first.

    A difference from the first run is `beyond` the noise of the two, `within` it, or `unknown`; runs that differ in
    their seed alone are repetitions. A name is the beginning of a run_id. ValueError for fewer than two names, or a
    name of no run or of several.
    """
    if len(names) < 2:
        raise ValueError("compare needs two or more run ids, as in: python -m rpbench compare 3f9a 81c2")
    rows = [find(results, name) for name in names]
    differ = {key: [row.get(key) for row in rows] for key in _choice_keys(rows)}
    differ |= {key: values for key, values in differing(rows).items() if key not in differ}
    metrics = [key for key in _METRICS if any(row.get(key) is not None for row in rows)]
    for row, key in product(rows, metrics):
        if row.get(key) is not None and not is_finite(row[key]):
            raise ValueError(f"run {row['run_id'][:8]}: {key} {row[key]!r:.80} is no number; its record is damaged")
    ratios = {key: [_ratio(row, rows[0], key) for row in rows] for key in metrics}
    groups = [tuple(str(values[at]) for key, values in differ.items() if key != "seed") for at in range(len(rows))]
    verdicts = {key: _verdicts(rows, key, groups) for key in metrics}
    cells = {
        key: [
            _cell(row.get(key), ratio, noise)
            for row, ratio, noise in zip(rows, ratios[key], verdicts[key], strict=True)
        ]
        for key in metrics
    }
    _print_table(rows, differ, cells, people)
    for remark in _remarks(rows, verdicts):
        print(f"rpbench: {remark}", file=people)
    return {
        "runs": [row["run_id"] for row in rows],
        "differing": differ,
        "metrics": {key: [row.get(key) for row in rows] for key in metrics},
        "over_first": ratios,
        "noise": verdicts,
    }


def _are_alike(row: Record, first: Record, key: str) -> bool:
    """Whether a metric of two runs has one unit."""
    return not key.endswith("_s") or clock(row) == clock(first)


def _verdicts(rows: list[Record], key: str, groups: list[tuple[str, ...]]) -> list[str | None]:
    """The verdict on each run's metric against the first run's; None for the first, and where there is none."""
    first, *others = zip(rows, noises(rows, key, groups), strict=True)
    found: list[str | None] = [None]
    for row, noise in others:
        has_both = row.get(key) is not None and first[0].get(key) is not None
        found.append(verdict(first[1], noise) if has_both and _are_alike(row, first[0], key) else None)
    return found


def _remarks(rows: list[Record], verdicts: dict[str, list[str | None]]) -> list[str]:
    seen = {each for line in verdicts.values() for each in line}
    found = [text for each, text in _REMARKS.items() if each in seen]
    clocks = {clock(row) for row in rows}
    return [*found, _CLOCKS] if len(clocks) > 1 else [*found, IN_SLOTS] if clocks == {"slots"} else found


def _choice_keys(rows: list[Record]) -> list[str]:
    """Plain fields of the runs that differ: of all keys of their records that are neither metrics nor provenance."""
    besides = {"run_id", "reason", "started_at", "git_commit", "code_version", "digest", *_METRICS}
    return [
        key
        for key in dict.fromkeys(key for row in rows for key in row)
        if key not in besides
        and all(isinstance(row.get(key), str | int | None) for row in rows)
        and len({str(row.get(key)) for row in rows}) > 1
    ]


def _ratio(row: Record, first: Record, key: str) -> float | None:
    """A metric over the first run's; None where units differ, or the first is missing or zero but for rounding."""
    value, base = row.get(key), first.get(key)
    if value is None or base is None or abs(base) <= _ROUNDING or not _are_alike(row, first, key):
        return None
    return float(value / base)


def _cell(value: float | None, ratio: float | None, verdict: str | None) -> str:
    if value is None:
        return "-"
    return f"{value:.6g}" + (f" ({ratio:.3f}x)" if ratio is not None else "") + _MARKS.get(verdict or "", "")


def _print_table(
    rows: list[Record], differ: dict[str, list[Any]], metrics: dict[str, list[str]], people: TextIO
) -> None:
    lines = [["", *(row["run_id"][:8] for row in rows)]]
    lines += [[key, *map(str, values)] for key, values in differ.items()]
    lines += [[key, *cells] for key, cells in metrics.items()]
    widths = [max(len(line[column]) for line in lines) for column in range(len(rows) + 1)]
    for line in lines:
        print("  ".join(map(str.ljust, line, widths)).rstrip(), file=people)
