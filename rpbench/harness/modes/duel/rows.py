"""Rows: the record of each contender, and what the rounds say of all of them together."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import Any

from rpbench.harness.allocator import is_tuned
from rpbench.harness.modes.duel.contenders import BASE, LIMIT, TWIN
from rpbench.harness.modes.duel.paired import Ratio, noise, ratio
from rpbench.harness.modes.duel.sample import Sample
from rpbench.harness.record import Record
from rpbench.plan.whole import WholePlan

# Two ways to time a contender: the clock on the wall, and its actions' processor time on the action graph.
CLOCKS = ("wall", "replay")


def plan_fields(plan: WholePlan) -> dict[str, Any]:
    """What a contender runs."""
    shape = plan.schedule.shape
    return {
        "partition_layers": str(plan.schedule.partition),
        "num_stages": shape.num_stages,
        "num_backward_stages": shape.num_backward_stages,
        "round_size": plan.options.get("round_size"),
        "recompute": "except_last" if plan.keeps_last else "all",
        "num_plans_evaluated": plan.num_evaluated,
        "num_actions": plan.schedule.num_actions,
        "simulated_makespan_s": plan.makespan,
    }


def sample_fields(samples: Sequence[Sample], plan: WholePlan) -> dict[str, Any]:
    """A contender's rounds, and their medians."""
    shape = plan.schedule.shape
    walls, replays, cpus = ([getattr(s, name) for s in samples] for name in ("wall_s", "replay_s", "cpu_s"))
    foreign = [sample.foreign_cores for sample in samples]
    known = [share for share in foreign if share is not None]
    return {
        "makespan_s": median(walls),
        "step_time_s": median(walls) / shape.num_steps,
        "replay_makespan_s": median(replays),
        "bubble_makespan": max(
            0.0, 1 - median(cpu / (shape.num_ranks * replay) for cpu, replay in zip(cpus, replays, strict=True))
        ),
        "foreign_cpu_share": median(known) if known else None,
        "malloc_tuned": is_tuned(),
        "round_walls_s": walls,
        "round_replays_s": replays,
        "round_cpus_s": cpus,
        "round_foreign_cores": foreign,
        "loss": samples[-1].loss,
    }


def calibrated_fields(makespans: Sequence[float], foreign_cores: Sequence[float | None]) -> dict[str, Any]:
    """What `cost=analytic` predicted from the calibrations before, between and after the rounds."""
    return {
        "calibrated_makespans_s": list(makespans),
        "calibration_foreign_cores": list(foreign_cores),
    }


def predictions(row: Record) -> list[float]:
    """What was predicted of each round: the mean of the calibrations before and after it, in seconds."""
    found = row["calibrated_makespans_s"]
    return [(before + after) / 2 for before, after in pairwise(found)]


def over_predicted(row: Record, clock: str) -> Ratio:
    """Measured over predicted time, paired within the rounds."""
    return ratio(times(row, clock), predictions(row))


def drift(row: Record) -> float:
    """How far the predictions of a duel's calibrations are apart, relative to the least."""
    found = row["calibrated_makespans_s"]
    return float(max(found) / min(found) - 1)


def times(row: Record, clock: str) -> list[float]:
    """A contender's rounds by a clock, in seconds."""
    return list(row[f"round_{clock}s_s"])


def speed_up(row: Record, over: Record, clock: str) -> Ratio:
    """How many times as fast as another contender."""
    return ratio(times(over, clock), times(row, clock))


def summary(rows: Sequence[Record]) -> dict[str, Any]:
    """The duel of one model: speed-ups over 1F1B and shares of the limit, paired within the rounds."""
    by_name = {row["contender"]: row for row in rows if row["status"] == "ok"}
    base, twin, limit = by_name.get(BASE), by_name.get(TWIN), by_name.get(LIMIT)
    found: dict[str, Any] = {"model": rows[0]["model"], "noise": {}, "contenders": {}}
    for clock in CLOCKS:
        if base and twin:
            found["noise"][clock] = noise(speed_up(twin, base, clock))
    for row in rows:
        own: dict[str, Any] = {"run_id": row["run_id"], "status": row["status"], "reason": row["reason"]}
        if row["contender"] in by_name:
            own |= _measured(row, base, limit, found["noise"])
        found["contenders"][row["contender"]] = own
    return found


def _measured(row: Record, base: Record | None, limit: Record | None, noises: Mapping[str, float]) -> dict[str, Any]:
    own: dict[str, Any] = {
        "partition": row["partition_layers"],
        "round_size": row["round_size"],
        "cpu_s": median(row["round_cpus_s"]),
        "wall_over_replay": ratio(times(row, "wall"), times(row, "replay")),
        "foreign_cores": row["foreign_cpu_share"],
        "replay_over_simulated": row["replay_makespan_s"] / row["simulated_makespan_s"],
        "wall_over_simulated": row["makespan_s"] / row["simulated_makespan_s"],
    }
    if row.get("calibrated_makespans_s"):
        own |= {f"{clock}_over_predicted": over_predicted(row, clock) for clock in CLOCKS}
        own["calibration_drift"] = drift(row)
    for clock in CLOCKS:
        if base:
            found = speed_up(row, base, clock)
            own[f"speed_up_{clock}"] = found
            own[f"differs_{clock}"] = abs(found.median - 1) > noises.get(clock, 0.0)
        if limit:
            own[f"share_of_limit_{clock}"] = speed_up(row, limit, clock)
    return own


def lines(found: Mapping[str, Any]) -> list[str]:
    """A summary for people."""
    noises = ", ".join(f"{clock} {100 * share:.1f} %" for clock, share in found["noise"].items()) or "unknown"
    text = [f"{found['model']}: difference of the twins at most {noises}"]
    for name, own in found["contenders"].items():
        if own["status"] != "ok":
            text.append(f"  {name:18} {own['status']}: {own['reason']}")
            continue
        ratios = [
            f"{clock} x{Ratio(*own[f'speed_up_{clock}'])}{'' if own[f'differs_{clock}'] else ' ~'}"
            + (f", of limit {own[f'share_of_limit_{clock}'][0]:.3f}" if f"share_of_limit_{clock}" in own else "")
            for clock in CLOCKS
            if f"speed_up_{clock}" in own
        ]
        share = "unknown" if own["foreign_cores"] is None else f"{own['foreign_cores']:.2f}"
        text.append(
            f"  {name:18} {'; '.join(ratios)}; cpu {own['cpu_s']:.2f} s, wall/replay {own['wall_over_replay'][0]:.3f}, "
            f"replay/simulated {own['replay_over_simulated']:.3f}, foreign {share}"
            + "".join(
                f", {clock}/predicted {Ratio(*own[f'{clock}_over_predicted'])}"
                for clock in CLOCKS
                if f"{clock}_over_predicted" in own
            )
        )
    return text
