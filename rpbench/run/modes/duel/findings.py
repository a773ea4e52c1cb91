"""Findings: ratios and verdicts of a duel, computed from the runs in its records."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import numpy as np

from rpbench.records.record import Record
from rpbench.run.modes.duel.contenders import groups, is_reference
from rpbench.run.modes.duel.runs import MISSING, Columns, Comparisons, compare, pairs, runs_by
from rpbench.run.modes.duel.verdict import Finding, Rules, StartFinding, find_start, judge

Rows = Mapping[str, Record]


def timed(rows: Rows) -> dict[str, Record]:
    return {name: row for name, row in rows.items() if row["status"] == "ok"}


def rules_of(rows: Rows) -> Rules:
    asked = next(iter(rows.values()))["config"]["mode"]
    return Rules(half_width=asked["half_width"], least_starts=max(Rules.least_starts, asked["num_starts"]))


def find_starts(
    columns: Mapping[str, Columns], clock: str, rules: Rules, *, undisturbed: bool = True
) -> dict[str, StartFinding]:
    """The comparison in one start of every contender that has a reference other than itself.

    If `undisturbed`, comparisons disturbed by other programs are left out.
    """
    found: dict[str, StartFinding] = {}
    for names in groups(columns):
        known = [number for number, name in enumerate(names) if is_reference(name)]
        if len(known) < 2:
            continue
        runs = runs_by({name: columns[name] for name in names}, clock)
        for number, name in enumerate(names):
            each = compare(runs, number, known)
            each = each if undisturbed else each._replace(others=np.zeros_like(each.others))
            found[name] = find_start(each, rules)
    return found


def findings(
    rows: Rows, clock: str, num_verdicts: int | None = None, *, undisturbed: bool = True
) -> dict[str, Finding]:
    """The finding of every contender that has runs and references.

    All verdicts of the duel, or `num_verdicts` of a larger table, share one error rate. Unless `undisturbed`
    (`find_starts`) there are ratios and no verdicts.
    """
    fit = timed(rows)
    starts = [find_starts(columns, clock, rules_of(rows), undisturbed=undisturbed) for columns in _by_start(fit)]
    if not starts or not starts[0]:
        return {}
    table = {name: [start[name] for start in starts] for name in starts[0]}
    num_references = max(sum(map(is_reference, names)) for names in groups(table))
    found = _judged(rows, table, num_references, num_verdicts)
    return found if undisturbed else _without_verdict(found, "other programs' load was not looked at")


def findings_over(rows: Rows, clock: str, base: str, num_verdicts: int | None = None) -> dict[str, Finding]:
    """The finding of every other contender over `base`, from runs of the same turns; LookupError if it has no runs.

    `base` runs once a turn and 1F1B four times, so its runs are further away and fewer. Intervals are wider than those
    over 1F1B, and conservative: on simulated machines 99 of 100 contain the ratio.
    """
    fit = timed(rows)
    if base not in fit:
        raise LookupError(f"{base}: no contender with runs; one of {', '.join(fit)}")
    names, starts = list(fit), [runs_by(columns, clock) for columns in _by_start(fit)]
    table = {
        name: [find_start(pairs(runs, number, names.index(base)), rules_of(rows)) for runs in starts]
        for number, name in enumerate(names)
        if name != base
    }
    return _judged(rows, table, 1, num_verdicts)


def _judged(
    rows: Rows, table: Mapping[str, Sequence[StartFinding]], num_references: int, num_verdicts: int | None
) -> dict[str, Finding]:
    found = judge(table, num_references, rules_of(rows), num_verdicts)
    reason = why_none(rows)
    return _without_verdict(found, reason) if reason else found


def _without_verdict(found: Mapping[str, Finding], reason: str) -> dict[str, Finding]:
    return {name: replace(each, verdict="no verdict", reason=reason) for name, each in found.items()}


def why_none(rows: Rows) -> str:
    """Why no contender of this duel can have a verdict; empty if one can."""
    fit = timed(rows)
    if not any(map(is_reference, fit)):
        return "nobody to compare with: 1F1B has not run"
    row = next(iter(fit.values()))
    least = min(start["num_cores"] for start in row["starts"])
    if least < row["num_devices"]:
        return f"{row['num_devices']} devices on {least} core{'' if least == 1 else 's'}: they take turns"
    if any(others is None for start in row["runs"] for others in start["others_s"]):
        return "this system does not say what other programs do"
    return ""


def false_alarms(found: Mapping[str, Finding]) -> tuple[int, int, int]:
    """Contenders that are the base under another name: how many, verdicts of a difference, intervals without 1."""
    same = [each for name, each in found.items() if name.startswith("1f1b")]
    off_one = sum(not each.low <= 1 <= each.high for each in same)  # without correction for the rest of the table
    return len(same), sum(each.verdict in ("faster", "slower") for each in same), off_one


def _by_start(rows: Rows) -> list[dict[str, Columns]]:
    num = min((len(row["runs"]) for row in rows.values()), default=0)
    return [{name: row["runs"][start] for name, row in rows.items()} for start in range(num)]


# --- steps of a torch duel: the part of a step that replay and prediction explain ----------------------------------


def over_wall(rows: Rows, key: str) -> dict[str, Finding]:
    """`replay` or `predicted` seconds of every contender's runs over the wall-clock time of the step.

    Nothing is compared with a neighbour, so runs disturbed by other programs count.
    """
    rules = rules_of(rows)
    table = {name: [find_start(_over_wall(start, key), rules) for start in row["runs"]] for name, row in rows.items()}
    # Contenders of a start share the machine, which counts like one common reference.
    return judge(table, 1, rules)


def _over_wall(start: Columns, key: str) -> Comparisons:
    runs = zip(start["at_s"], start[f"{key}_s"], start["wall_s"], strict=True)
    pairs = [(at, math.log(value / wall)) for at, value, wall in runs if value]
    at, logs = (np.array(column) for column in zip(*pairs, strict=True)) if pairs else (np.array([]),) * 2
    return Comparisons(logs, at, np.zeros(len(logs)))


def missing_parts(row: Record) -> dict[str, float]:
    """The time that the replay leaves unexplained, by cause, as fractions of the ranks' time: medians over all runs."""
    num = row["num_devices"]
    return {
        part: median(seconds / (num * wall) for seconds, wall in _pairs(row, f"missing_{part}_s", "wall_s"))
        for part in MISSING
    }


def overhead_per_action(row: Record) -> float:
    """Rank-seconds of a step beyond its replay, for each forward and backward: median over all runs."""
    overhead_s = median(wall - replay for wall, replay in _pairs(row, "wall_s", "replay_s"))
    return row["num_devices"] * overhead_s / row["num_actions"]


def _pairs(row: Record, *columns: str) -> list[tuple[Any, ...]]:
    return [pair for start in row["runs"] for pair in zip(*(start[column] for column in columns), strict=True)]


def derived_fields(rows: Rows) -> dict[str, dict[str, Any]]:
    """Contender -> record fields of a torch duel that follow from the runs of all contenders."""
    fit = timed(rows)
    if not fit:
        return {}
    replays, predictions = over_wall(fit, "replay"), over_wall(fit, "predicted")
    verdicts = verdict_fields(fit, "torch's own schedule has not run twice")
    return {
        name: {
            **_interval("replay_over_wall", replays[name]),
            **_interval("predicted_over_wall", predictions[name]),
            **verdicts[name],
            "overhead_per_action_s": overhead_per_action(row),
            "missing_shares": missing_parts(row),
        }
        for name, row in fit.items()
    }


def verdict_fields(rows: Rows, alone: str) -> dict[str, dict[str, Any]]:
    """Contender -> its time over its references', and the verdict; `alone` is the reason if references are missing."""
    fit = timed(rows)
    clean = findings(fit, "wall") if fit else {}
    disturbed = {clock: findings(fit, clock, undisturbed=False) for clock in ("wall", "cpu")} if clean else {}
    found: dict[str, dict[str, Any]] = {name: {"verdict": "no verdict", "verdict_reason": alone} for name in fit}
    for name, each in clean.items():
        found[name] = _interval("over_own", each, turned=True)
        found[name] |= _interval("over_own_disturbed", disturbed["wall"][name], turned=True)
        found[name] |= _interval("cpu_over_own_disturbed", disturbed["cpu"][name], turned=True)
        found[name] |= {"verdict": each.verdict, "verdict_reason": each.reason}
    return found


def _interval(name: str, found: Finding, *, turned: bool = False) -> dict[str, float | None]:
    """A ratio with its 95 % interval as record fields, `turned` from speed to time; None where not finite."""
    values = [found.ratio, found.low, found.high]
    if turned:
        values = [1 / value if value else math.inf for value in (found.ratio, found.high, found.low)]
    is_known = math.isfinite(found.ratio)
    keys = (name, f"{name}_low", f"{name}_high")
    return {key: value if is_known and math.isfinite(value) else None for key, value in zip(keys, values, strict=True)}
