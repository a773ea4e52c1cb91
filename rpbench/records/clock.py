"""The unit of a run's times: seconds, or slots where costs have no seconds and no clock was read."""

from collections.abc import Mapping
from typing import Any, Literal

Clock = Literal["seconds", "slots"]

IN_SLOTS = "times are slots, not seconds; cost=analytic or other costs in seconds give them"


def clock(row: Mapping[str, Any]) -> Clock:
    """In what a record counts its fields that end in `_s`; those of `cost=unit` on a virtual clock are slots.

    So are those of a dry run, whose accelerators are made up.
    """
    if row.get("evidence") == "dry":
        return "slots"
    return "slots" if row.get("cost") == "unit" and row.get("evidence") == "simulated" else "seconds"


def unit(row: Mapping[str, Any]) -> Literal["s", "slots"]:
    """The same as people write it behind a number."""
    return "slots" if clock(row) == "slots" else "s"


def under_unit(row: Mapping[str, Any], key: str) -> str:
    """The name of a record's field where runs of both clocks meet: `makespan_s`, or `makespan_slots`."""
    is_time = key.endswith("_s") and not key.endswith("_per_s")
    return f"{key.removesuffix('_s')}_slots" if is_time and clock(row) == "slots" else key
