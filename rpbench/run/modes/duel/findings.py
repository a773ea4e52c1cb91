"""Findings: what the records of a duel say, recomputed from the runs in them."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from rpbench.records.record import Record
from rpbench.run.modes.duel.contenders import REFERENCES
from rpbench.run.modes.duel.neighbours import compare, pairs
from rpbench.run.modes.duel.runs import Columns, runs_by
from rpbench.run.modes.duel.verdict import Finding, Rules, StartFinding, find_start, judge

Rows = Mapping[str, Record]


def timed(rows: Rows) -> dict[str, Record]:
    """The contenders that have runs."""
    return {name: row for name, row in rows.items() if row["status"] == "ok"}


def rules_of(rows: Rows) -> Rules:
    """What a verdict of this duel needs."""
    asked = next(iter(rows.values()))["config"]["mode"]
    return Rules(half_width=asked["half_width"], least_starts=max(Rules.least_starts, asked["num_starts"]))


def findings(rows: Rows, clock: str, num_verdicts: int | None = None) -> dict[str, Finding]:
    """The finding of every contender that has runs; empty where no reference has.

    Args:
        rows: contender -> record, of one duel.
        num_verdicts: that are given together, where this duel is part of a larger table.
    """
    fit = timed(rows)
    names = list(fit)
    known = [names.index(name) for name in REFERENCES if name in fit]
    if len(known) < 2:
        return {}
    starts = [_start(columns, clock, known, rules_of(rows)) for columns in _by_start(fit)]
    table = {name: [start[number] for start in starts] for number, name in enumerate(names)}
    return _judged(rows, table, len(known), num_verdicts)


def findings_over(rows: Rows, clock: str, base: str, num_verdicts: int | None = None) -> dict[str, Finding]:
    """The finding of every other contender over one of them, from its runs of the same turns.

    A base runs once a turn where 1F1B runs four times, further away, and all share its luck: intervals are wider than
    those over 1F1B, and more careful than they say; on made-up machines 99 of 100 hold their ratio.

    Args:
        rows: contender -> record, of one duel.
        base: whose speed is 1.
        num_verdicts: that are given together, where this duel is part of a larger table.

    Raises:
        LookupError: if the base has no runs in this duel.
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
    if not (reason := why_none(rows)):
        return found
    return {name: replace(each, verdict="no verdict", reason=reason) for name, each in found.items()}


def why_none(rows: Rows) -> str:
    """Why nothing of this duel can have a verdict, whatever was measured; empty if something can."""
    fit = timed(rows)
    if not any(name in fit for name in REFERENCES):
        return "nobody to compare with: 1F1B has not run"
    row = next(iter(fit.values()))
    least = min(start["num_cores"] for start in row["starts"])
    if least < row["num_devices"]:
        return f"{row['num_devices']} devices on {least} core{'' if least == 1 else 's'}: they take turns"
    if row["foreign_cpu_share"] is None:
        return "this system does not say what other programs do"
    return ""


def false_alarms(found: Mapping[str, Finding]) -> tuple[int, int, int]:
    """Of the contenders that are the base under another name: how many, verdicts of a difference, intervals off 1."""
    same = [each for name, each in found.items() if name.startswith("1f1b")]
    return len(same), sum(each.verdict in ("faster", "slower") for each in same), sum(e.excludes_one for e in same)


def _by_start(rows: Rows) -> list[dict[str, Columns]]:
    num = min(len(row["runs"]) for row in rows.values())
    return [{name: row["runs"][start] for name, row in rows.items()} for start in range(num)]


def _start(columns: Mapping[str, Columns], clock: str, known: Sequence[int], rules: Rules) -> list[StartFinding]:
    runs = runs_by(columns, clock)
    return [find_start(compare(runs, number, known), rules) for number in range(len(columns))]
