"""Summary of a duel: its findings as data and as lines for people, and its calibrations."""

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from rpbench.config.loading import load
from rpbench.cost.hardware.basis import make_basis
from rpbench.cost.hardware.machine import Machine
from rpbench.engine.backends.emulated import EmulatedBackend
from rpbench.engine.executor import execute
from rpbench.engine.measure.calibration import Calibration
from rpbench.engine.program import make_program
from rpbench.mesh.layers.layer_times import setting_of, times_of
from rpbench.plan.whole import WholePlan
from rpbench.records.record import Record
from rpbench.run.cluster_file import cluster_of, to_text
from rpbench.run.modes.duel.contenders import BASE
from rpbench.run.modes.duel.findings import false_alarms, findings, timed, why_none
from rpbench.run.modes.duel.runs import CLOCKS
from rpbench.run.modes.duel.verdict import Finding, Ratio, drift, over_predicted, ratio, times
from rpbench.sim.longest_path import simulate
from rpbench.workload.architecture import Architecture

NAME = "this_machine"


@dataclass
class Survey:
    """Calibrations of one duel, each with its cluster; `num_tokens` are those of a microbatch."""

    measure: Callable[[], Calibration]
    model: Architecture
    num_tokens: int
    num_devices: int
    found: list[tuple[Calibration, Machine]] = field(default_factory=list)

    def __call__(self) -> None:
        """Calibrate once more."""
        calibration = self.measure()
        self.found.append((calibration, cluster_of(NAME, calibration, {"num_devices": self.num_devices})))

    @property
    def foreign_cores(self) -> list[float | None]:
        """Cores that other programs kept busy during each calibration."""
        return [calibration.foreign_cores for calibration, _ in self.found]

    def first_file(self) -> str:
        """The cluster file of the calibration before the first start."""
        calibration, cluster = self.found[0]
        heading = "python -m rpbench calibrate, before the first round of a duel"
        return to_text(cluster, heading, calibration.foreign_cores)

    def makespans(self, plan: WholePlan, *, waits: bool = True) -> list[float]:
        """Seconds of a plan by each calibration; unless it `waits`, of perfectly balanced computation alone."""
        return [self._makespan(plan, cluster, waits) for _, cluster in self.found]

    def _makespan(self, plan: WholePlan, cluster: Machine, waits: bool) -> float:
        cost = load(["cost=analytic"]).cost
        numbers = make_basis(cluster, cost.constants, cost.declared)
        times = times_of(setting_of(self.model, self.num_tokens, numbers, "engine"))
        timeline = simulate(
            plan.schedule,
            times.table(
                plan.schedule.cut,
                recompute_ahead=plan.costs.recompute_ahead,
                fused_ahead=plan.costs.fused_ahead,
                num_head_shards=plan.schedule.shape.num_head_shards,
                keeps_last=plan.keeps_last,
            ),
        )
        if waits:
            return float(timeline.makespan)
        return sum(float(span.end - span.start) for span in timeline.spans()) / plan.schedule.shape.num_ranks


def emulated_makespans(plans: Mapping[str, WholePlan]) -> dict[str, float]:
    """Seconds that each plan takes with emulated durations; all at once, because sleeping takes no core."""

    def emulate(plan: WholePlan) -> float:
        with EmulatedBackend(plan.costs) as backend:
            return float(execute(make_program(plan.schedule, plan.costs), backend.handlers, backend).makespan)

    with ThreadPoolExecutor(max(1, len(plans))) as pool:
        return dict(zip(plans, pool.map(emulate, plans.values()), strict=True))


def summary(rows: Sequence[Record]) -> dict[str, Any]:
    """The duel of one model: speeds over 1F1B by both clocks, verdicts by wall-clock time."""
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
    ends = {key: getattr(found, key) for key in ("ratio", "low", "high", "sure_low", "sure_high")}
    return {
        **{key: value if math.isfinite(value) else None for key, value in ends.items()},  # JSON has no infinity
        "verdict": found.verdict,
        "reason": found.reason,
        "pairs": [start.num_pairs for start in found.starts],
        "disturbed": [start.num_disturbed for start in found.starts],
    }


def lines(found: Mapping[str, Any]) -> list[str]:
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
