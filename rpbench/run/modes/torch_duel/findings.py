"""Findings: what the records of a torch duel say, recomputed from the runs in them, by the duel's rules.

A schedule's entrants are compared with torch's own schedule, which runs twice in every turn; the ratios of a run to its
own replay and to its prediction need no neighbours, so that runs beside other programs count there.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import numpy as np

from rpbench.records.record import Record
from rpbench.run.modes.duel.neighbours import Comparisons, compare
from rpbench.run.modes.duel.runs import Columns, runs_by
from rpbench.run.modes.duel.verdict import Finding, Rules, StartFinding, find_start, judge
from rpbench.run.modes.torch_duel.entrants import REFERENCES, Entrant
from rpbench.run.modes.torch_duel.sample import MISSING

CLOCKS = ("wall", "cpu")


@dataclass(frozen=True)
class Interval:
    """A ratio with the 95 % interval of its blocks and starts."""

    ratio: float
    low: float
    high: float

    def fields(self, name: str) -> dict[str, float | None]:
        """The same as record fields; what is not finite becomes None."""
        values = {name: self.ratio, f"{name}_low": self.low, f"{name}_high": self.high}
        is_known = math.isfinite(self.ratio)
        return {key: value if is_known and math.isfinite(value) else None for key, value in values.items()}


def interval_of(finding: Finding) -> Interval:
    """How many times as long as the reference an entrant takes: a finding says how many times as fast it is."""
    return Interval(1 / finding.ratio, 1 / finding.high, 1 / finding.low if finding.low else math.inf)


def find_starts(
    entrants: Sequence[Entrant], columns: Mapping[str, Columns], clock: str, rules: Rules, *, undisturbed: bool = True
) -> dict[str, StartFinding]:
    """What one start says of every entrant whose schedule has a second run of torch's own.

    Args:
        undisturbed: leave out comparisons in which other programs had a part of the machine.
    """
    found: dict[str, StartFinding] = {}
    for schedule in dict.fromkeys(entrant.schedule for entrant in entrants):
        group = [entrant for entrant in entrants if entrant.schedule == schedule]
        known = [number for number, entrant in enumerate(group) if entrant.is_reference]
        if len(known) < len(REFERENCES):
            continue
        runs = runs_by({entrant.name: columns[entrant.name] for entrant in group}, clock)
        for number, entrant in enumerate(group):
            pairs = compare(runs, number, known)
            pairs = pairs if undisturbed else pairs._replace(others=np.zeros_like(pairs.others))
            found[entrant.name] = find_start(pairs, rules)
    return found


def findings(rows: Mapping[str, Record], clock: str, *, undisturbed: bool = True) -> dict[str, Finding]:
    """The finding of every entrant that has runs; all verdicts of the duel are given together.

    Args:
        rows: contender -> record, of one duel.
    """
    fit = {name: row for name, row in rows.items() if row["status"] == "ok"}
    if not fit:
        return {}
    entrants = [Entrant(row["schedule"], row["role"]) for row in fit.values()]
    rules, first = rules_of(fit), next(iter(fit.values()))
    starts = [
        find_starts(entrants, {name: row["runs"][number] for name, row in fit.items()}, clock, rules,
                    undisturbed=undisturbed)
        for number in range(len(first["runs"]))
    ]  # fmt: skip
    found = judge({name: [start[name] for start in starts] for name in starts[0]}, len(REFERENCES), rules)
    reason = why_none(first) or ("" if undisturbed else "other programs' load was not looked at")
    return {
        name: replace(each, verdict="no verdict", reason=reason) if reason else each for name, each in found.items()
    }


def rules_of(rows: Mapping[str, Record]) -> Rules:
    """What a verdict of this duel needs."""
    asked = next(iter(rows.values()))["config"]["mode"]
    return Rules(half_width=asked["half_width"], least_starts=max(Rules.least_starts, asked["num_starts"]))


def why_none(row: Record) -> str:
    """Why nothing of this duel can have a verdict, whatever was measured; empty if something can."""
    least = min(start["num_cores"] for start in row["starts"])
    if least < row["num_devices"]:
        return f"{row['num_devices']} devices on {least} core{'' if least == 1 else 's'}: they take turns"
    if any(others is None for start in row["runs"] for others in start["others_s"]):
        return "this system does not say what other programs do"
    return ""


def over_wall(rows: Mapping[str, Record], key: str) -> dict[str, Interval]:
    """A column of every entrant's runs over the step by the clock; what differs between starts is known of all.

    Args:
        key: `replay` or `predicted`.
    """
    rules = rules_of(rows)
    table = {name: [find_start(_over_wall(start, key), rules) for start in row["runs"]] for name, row in rows.items()}
    # Entrants of a start share the machine: as if each had been compared with one run that all had in common.
    found = judge(table, 1, rules)
    return {name: Interval(each.ratio, each.low, each.high) for name, each in found.items()}


def _over_wall(start: Columns, key: str) -> Comparisons:
    runs = zip(start["at_s"], start[f"{key}_s"], start["wall_s"], strict=True)
    pairs = [(at, math.log(value / wall)) for at, value, wall in runs if value]
    at, logs = (np.array(column) for column in zip(*pairs, strict=True)) if pairs else (np.array([]),) * 2
    return Comparisons(logs, at, np.zeros(len(logs)))


def missing_parts(row: Record) -> dict[str, float]:
    """What the replay leaves unexplained, by name, as shares of the ranks' time: medians over all runs."""
    found = {}
    for part in MISSING:
        shares = [
            seconds / (row["num_devices"] * wall)
            for start in row["runs"]
            for seconds, wall in zip(start[f"missing_{part}_s"], start["wall_s"], strict=True)
        ]
        found[part] = median(shares)
    return found


def overhead_per_action(row: Record) -> float:
    """Rank-seconds that a step took longer than its replay, for each forward and backward: median over all runs."""
    runs = [pair for start in row["runs"] for pair in zip(start["wall_s"], start["replay_s"], strict=True)]
    return row["num_devices"] * median(wall - replay for wall, replay in runs) / row["num_actions"]


def derived_fields(rows: Mapping[str, Record]) -> dict[str, dict[str, Any]]:
    """Contender -> the fields of its record that follow from everybody's runs."""
    fit = {name: row for name, row in rows.items() if row["status"] == "ok"}
    if not fit:
        return {}
    clean = findings(fit, "wall")
    replays, predictions = over_wall(fit, "replay"), over_wall(fit, "predicted")
    by_clock = {clock: findings(fit, clock, undisturbed=False) for clock in CLOCKS}
    found: dict[str, dict[str, Any]] = {}
    for name, row in fit.items():
        own = replays[name].fields("replay_over_wall") | predictions[name].fields("predicted_over_wall")
        if name in clean:
            own |= interval_of(clean[name]).fields("over_own")
            own |= interval_of(by_clock["wall"][name]).fields("over_own_disturbed")
            own |= interval_of(by_clock["cpu"][name]).fields("cpu_over_own_disturbed")
        found[name] = {
            **own,
            "verdict": clean[name].verdict if name in clean else "no verdict",
            "verdict_reason": clean[name].reason if name in clean else "torch's own schedule has not run twice",
            "overhead_per_action_s": overhead_per_action(row),
            "missing_shares": missing_parts(row),
        }
    return found
