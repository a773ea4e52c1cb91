"""Versions: facts about torch's private runtime for tables, by version.

A test compares them with torch's own files; `python -m tests.torch_versions` runs schedules on each version. A torch
newer than the table is treated as the newest one in it, and errors say so.
"""

import inspect
import re
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any, NamedTuple

import torch

# Names of torch.distributed.pipelining.schedules, and methods, that a run needs.
NEEDED = ("_PipelineScheduleRuntime", "_Action", "record_function", "_get_profiler_function_name")
METHODS = ("_load_csv", "_step_microbatches", "step")


@dataclass(frozen=True)
class Facts:
    """The facts of one version of torch."""

    has_waits: bool  # a lowered row has a wait for every send and every reduction
    greeting: str  # the exchange of ranks before their first step, a function of `stage` or `schedules`
    settings: tuple[str, ...]  # keywords of the runtime beside those of all its schedules


_SETTINGS_2_15 = (
    "defer_pp_recv",
    "max_active_stages",
    "unshard_lookahead",
    "defer_reduce_grad_wait",
    "max_outstanding_sends",
)
FACTS = {
    (2, 11): Facts(False, "_prepare_forward_infra", ()),
    (2, 12): Facts(False, "_warmup_forward_vote", ()),
    (2, 13): Facts(False, "_warmup_forward_vote", ("defer_pp_recv",)),
    (2, 14): Facts(False, "_warmup_forward_vote", ("defer_pp_recv",)),
    (2, 15): Facts(True, "_initialize_pipeline_distributed_state", _SETTINGS_2_15),
}
OLDEST, NEWEST = min(FACTS), max(FACTS)


class Runtime(NamedTuple):
    """The parts of torch that a run uses."""

    schedules: ModuleType
    base: Any
    stage: Any


def number_of(version: str) -> tuple[int, int]:
    """The minor version that a version's text begins with."""
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def facts_of(version: str = torch.__version__) -> Facts:
    """The facts of a version, or of the newest known for a newer one; ValueError for one older than the table."""
    number = number_of(version)
    if number < OLDEST:
        raise ValueError(
            f"backend=torch: torch {version} is older than {_text(OLDEST)}; {_way_out()} "
            "(ranks of 2.9 greet each other with messages whose ends differ in size)"
        )
    return FACTS.get(number, FACTS[NEWEST])


def newer_note(version: str = torch.__version__) -> str:
    """A note for errors on a torch that is newer than the table; empty on others."""
    if number_of(version) <= NEWEST:
        return ""
    return f"torch {version} is newer than {_text(NEWEST)}, the newest its tables were tried with; {_way_out()}"


@cache
def load_runtime() -> Runtime:
    """The private runtime of this torch; ValueError naming what has moved, and known versions."""
    facts_of()
    missing: list[str]
    try:
        from torch.distributed.pipelining import PipelineStage, schedules
    except ImportError as error:
        raise _moved([str(error)]) from None
    missing = [name for name in NEEDED if not hasattr(schedules, name)]
    base = getattr(schedules, "_PipelineScheduleRuntime", None)
    missing += [f"{name} of _PipelineScheduleRuntime" for name in METHODS if base and not hasattr(base, name)]
    if base and not missing and "format" not in inspect.signature(base._load_csv).parameters:
        missing.append("format= of _load_csv")
    if missing:
        raise _moved(missing)
    return Runtime(schedules, base, PipelineStage)


def _moved(missing: list[str]) -> ValueError:
    return ValueError(
        f"backend=torch: torch {torch.__version__} has no {', '.join(missing)} in torch.distributed.pipelining, whose "
        f"runtime for tables is private; {_way_out()}"
    )


def _way_out() -> str:
    return f"take torch {_text(OLDEST)} to {_text(NEWEST)}, or backend=cpu"


def _text(number: tuple[int, int]) -> str:
    return ".".join(map(str, number))
