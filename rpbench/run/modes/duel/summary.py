"""Summary: a duel's findings as data and as lines for people."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rpbench.records.record import Record
from rpbench.run.modes.duel.contenders import BASE
from rpbench.run.modes.duel.findings import false_alarms, findings, timed, why_none
from rpbench.run.modes.duel.rows import Ratio, drift, over_predicted, ratio, times
from rpbench.run.modes.duel.runs import CLOCKS
from rpbench.run.modes.duel.verdict import Finding


def summary(rows: Sequence[Record]) -> dict[str, Any]:
    """The duel of one model: speeds over 1F1B by both clocks, verdicts by the clock on the wall."""
    by_name = {row["contender"]: row for row in rows}
    found = {clock: findings(by_name, clock) for clock in CLOCKS}
    names = ("same_plan", "verdicts", "intervals")
    return {
        "model": rows[0]["model"],
        "no_verdict": why_none(by_name),
        "false_alarms": dict(zip(names, false_alarms(found["wall"]), strict=True)),
        "starts": next((row["starts"] for row in timed(by_name).values()), []),
        "contenders": {name: _contender(row, found) for name, row in by_name.items()},
    }


def _contender(row: Record, found: Mapping[str, Mapping[str, Finding]]) -> dict[str, Any]:
    own: dict[str, Any] = {"run_id": row["run_id"], "status": row["status"], "reason": row["reason"]}
    if row["status"] != "ok":
        return own
    own |= {
        "partition": row["partition_layers"],
        "round_size": row["round_size"],
        "recompute": row["recompute"],
        "cpu_s": row["cpu_s"],
        "wall_over_replay": ratio(times(row, "wall"), times(row, "replay")),
        "foreign_cores": row["foreign_cpu_share"],
        "replay_over_simulated": row["replay_makespan_s"] / row["simulated_makespan_s"],
    }
    if row.get("calibrated_makespans_s"):
        own |= {f"{clock}_over_predicted": over_predicted(row, clock) for clock in CLOCKS}
        own["calibration_drift"] = drift(row)
    for clock in CLOCKS:
        if row["contender"] in found[clock]:
            own[clock] = _finding(found[clock][row["contender"]])
    return own


def _finding(found: Finding) -> dict[str, Any]:
    """Numbers that are not finite become None."""
    ends = {key: getattr(found, key) for key in ("ratio", "low", "high", "sure_low", "sure_high")}
    return {
        **{key: value if math.isfinite(value) else None for key, value in ends.items()},
        "verdict": found.verdict,
        "reason": found.reason,
        "pairs": [start.num_pairs for start in found.starts],
        "disturbed": [start.num_disturbed for start in found.starts],
    }


def lines(found: Mapping[str, Any]) -> list[str]:
    """A summary for people."""
    alarms = found["false_alarms"]
    turns = ", ".join(f"{start['num_turns']} turns in {start['spent_s']:.0f} s" for start in found["starts"])
    text = [
        f"{found['model']}: starts of {turns or 'no turns'}; of {alarms['same_plan']} that are {BASE} itself, "
        f"{alarms['verdicts']} have a verdict of a difference, {alarms['intervals']} an interval without 1"
    ]
    if found["no_verdict"]:
        text.append(f"  no verdict at all: {found['no_verdict']}")
    return text + [f"  {name:18} {_line(own)}" for name, own in found["contenders"].items()]


def _line(own: Mapping[str, Any]) -> str:
    if own["status"] != "ok":
        return f"{own['status']}: {own['reason']}"
    parts = [f"{clock} {_speed(own[clock])}" for clock in CLOCKS if clock in own]
    if "wall" in own:
        wall = own["wall"]
        why = f" ({wall['reason']})" if wall["reason"] else ""
        parts.append(f"{wall['verdict']}{why}, comparisons {wall['pairs']}, disturbed {wall['disturbed']}")
    share = "unknown" if own["foreign_cores"] is None else f"{own['foreign_cores']:.2f}"
    parts.append(f"wall/replay {own['wall_over_replay'][0]:.3f}, foreign {share}")
    parts += [
        f"{clock}/predicted {Ratio(*own[f'{clock}_over_predicted'])}"
        for clock in CLOCKS
        if f"{clock}_over_predicted" in own
    ]
    return "; ".join(parts)


def _speed(found: Mapping[str, Any]) -> str:
    if found["ratio"] is None:
        return "unknown"
    high = "any" if found["high"] is None else f"{found['high']:.3f}"
    return f"x{found['ratio']:.3f} ({found['low']:.3f}-{high})"
