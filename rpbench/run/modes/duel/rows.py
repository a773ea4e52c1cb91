"""Rows: the fields of a contender's record."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

from rpbench.plan.whole import WholePlan
from rpbench.records.record import Record


class Started(NamedTuple):
    """What a start has done.

    Args:
        about: what is true of all its contenders: seed, turns, seconds, cores, what was done for stability.
        columns: contender -> its runs, column by column.
    """

    about: dict[str, Any]
    columns: dict[str, dict[str, list[Any]]]


class Ratio(NamedTuple):
    """A median over starts, with the least and the greatest: too few for more."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.low:.3f}-{self.high:.3f})"


def ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Ratio:
    """The median of the starts' ratios, and their range.

    Raises:
        ValueError: unless there is one of each for every start.
    """
    ratios = [one / other for one, other in zip(numerators, denominators, strict=True)]
    if not ratios:
        raise ValueError("no start to compare: a ratio needs at least 1")
    return Ratio(median(ratios), min(ratios), max(ratios))


def plan_fields(plan: WholePlan, num_raced: int) -> dict[str, Any]:
    """What a contender runs, and how many plans its run-off timed."""
    shape = plan.schedule.shape
    return {
        "partition_layers": str(plan.schedule.partition),
        "num_stages": shape.num_stages,
        "num_backward_stages": shape.num_backward_stages,
        "round_size": plan.options.get("round_size"),
        "recompute": "except_last" if plan.keeps_last else "all",
        "num_plans_evaluated": plan.num_evaluated,
        "num_plans_raced": num_raced,
        "num_actions": plan.schedule.num_actions,
        "simulated_makespan_s": plan.makespan,
    }


def timed_fields(name: str, starts: Sequence[Started], num_steps: int) -> dict[str, Any]:
    """A contender's runs of every start, and the medians over starts of the medians within each."""
    runs = [start.columns[name] for start in starts]
    others = [cores for cores in map(other_cores, runs) if cores is not None]
    return {
        "makespan_s": _median(runs, "wall_s"),
        "step_time_s": _median(runs, "wall_s") / num_steps,
        "replay_makespan_s": None if runs[0]["replay_s"][0] is None else _median(runs, "replay_s"),
        "cpu_s": _median(runs, "cpu_s"),
        "foreign_cpu_share": median(others) if others else None,
        "starts": [start.about for start in starts],
        "runs": runs,
    }


def _median(runs: Sequence[Mapping[str, Sequence[float]]], key: str) -> float:
    return median(median(start[key]) for start in runs)


def other_cores(columns: Mapping[str, Sequence[Any]]) -> float | None:
    """Cores that other programs kept busy in a contender's runs; None where nobody knows."""
    if any(each is None for each in columns["others_s"]):
        return None
    return max(0.0, sum(columns["others_s"]) / sum(columns["elapsed_s"]))


def calibrated_fields(makespans: Sequence[float], foreign_cores: Sequence[float | None]) -> dict[str, Any]:
    """What `cost=analytic` predicted from the calibrations before, between and after the starts."""
    return {
        "calibrated_makespans_s": list(makespans),
        "calibration_foreign_cores": list(foreign_cores),
    }


def predictions(row: Record) -> list[float]:
    """What was predicted of each start: the mean of the calibrations before and after it, in seconds."""
    found = row["calibrated_makespans_s"]
    return [(before + after) / 2 for before, after in pairwise(found)]


def over_predicted(row: Record, clock: str) -> Ratio:
    """Measured over predicted time, each start by itself."""
    return ratio(times(row, clock), predictions(row))


def drift(row: Record) -> float:
    """How far the predictions of a duel's calibrations are apart, relative to the least."""
    found = row["calibrated_makespans_s"]
    return float(max(found) / min(found) - 1)


def times(row: Record, clock: str) -> list[float]:
    """The median of a contender's runs in each start by a clock, in seconds."""
    return [median(start[f"{clock}_s"]) for start in row["runs"]]
