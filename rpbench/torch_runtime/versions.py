"""Versions: facts about torch's private runtime for tables, by version.

A test compares them with torch's own files; `python -m tests.torch_versions` runs schedules on each version. A torch
newer than the table is treated as the newest one in it, and errors say so.
"""

import inspect
import re
from functools import cache
from typing import Any

import torch

# Names of torch.distributed.pipelining.schedules, and methods, that a run needs.
NEEDED = ("_PipelineScheduleRuntime", "_Action", "record_function", "_get_profiler_function_name")
METHODS = ("_load_csv", "_step_microbatches", "step")

# Minor version -> whether a lowered row has a wait for every send and every reduction.
HAS_WAITS = {(2, 11): False, (2, 12): False, (2, 13): False, (2, 14): False, (2, 15): True}
OLDEST, NEWEST = min(HAS_WAITS), max(HAS_WAITS)


def number_of(version: str) -> tuple[int, int]:
    """The minor version that a version's text begins with."""
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def has_waits(version: str = torch.__version__) -> bool:
    """`HAS_WAITS` of a version, or of the newest known for a newer one; ValueError for one older than the table."""
    number = number_of(version)
    if number < OLDEST:
        raise ValueError(
            f"backend=torch: torch {version} is older than {_text(OLDEST)}; {_way_out()} "
            "(ranks of 2.9 greet each other with messages whose ends differ in size)"
        )
    return HAS_WAITS.get(number, HAS_WAITS[NEWEST])


def newer_note(version: str = torch.__version__) -> str:
    """A note for errors on a torch that is newer than the table; empty on others."""
    if number_of(version) <= NEWEST:
        return ""
    return f"torch {version} is newer than {_text(NEWEST)}, the newest its tables were tried with; {_way_out()}"


@cache
def load_runtime() -> Any:
    """The module of torch with its private runtime for tables; ValueError naming what has moved, and known versions."""
    has_waits()
    missing: list[str]
    try:
        from torch.distributed.pipelining import schedules
    except ImportError as error:
        raise _moved([str(error)]) from None
    missing = [name for name in NEEDED if not hasattr(schedules, name)]
    base = getattr(schedules, "_PipelineScheduleRuntime", None)
    missing += [f"{name} of _PipelineScheduleRuntime" for name in METHODS if base and not hasattr(base, name)]
    if base and not missing and "format" not in inspect.signature(base._load_csv).parameters:
        missing.append("format= of _load_csv")
    if missing:
        raise _moved(missing)
    return schedules


def _moved(missing: list[str]) -> ValueError:
    return ValueError(
        f"backend=torch: torch {torch.__version__} has no {', '.join(missing)} in torch.distributed.pipelining, whose "
        f"runtime for tables is private; {_way_out()}"
    )


def _way_out() -> str:
    return f"take torch {_text(OLDEST)} to {_text(NEWEST)}, or backend=cpu"


def _text(number: tuple[int, int]) -> str:
    return ".".join(map(str, number))
