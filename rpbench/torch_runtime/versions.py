"""Versions: whether this torch has the runtime that tables are run on, which is private there and may move."""

import inspect
from functools import cache
from types import ModuleType
from typing import Any, NamedTuple

import torch

TESTED = "2.13"
# Names of torch.distributed.pipelining.schedules, and parameters or attributes of theirs, that a run takes for granted.
NEEDED = ("_PipelineScheduleRuntime", "_Action", "record_function", "_get_profiler_function_name")
METHODS = ("_load_csv", "_step_microbatches", "step")
# Before it, ranks greeted each other with messages whose ends differ in size (8 and 4 bytes): gloo ends them in 2.9.1.
GREETING = "_warmup_forward_vote"


class Runtime(NamedTuple):
    """What a run needs of torch."""

    schedules: ModuleType
    base: Any
    stage: Any


@cache
def load_runtime() -> Runtime:
    """The private runtime of this torch.

    Raises:
        ValueError: naming what has moved, and the versions that are known to work.
    """
    missing: list[str]
    try:
        from torch.distributed.pipelining import PipelineStage, schedules
    except ImportError as error:
        raise _moved([str(error)]) from None
    missing = [name for name in NEEDED if not hasattr(schedules, name)]
    base = getattr(schedules, "_PipelineScheduleRuntime", None)
    missing += [f"{name} of _PipelineScheduleRuntime" for name in METHODS if base and not hasattr(base, name)]
    if not hasattr(PipelineStage, GREETING):
        missing.append(f"{GREETING} of PipelineStage")
    if base and not missing and "format" not in inspect.signature(base._load_csv).parameters:
        missing.append("format= of _load_csv")
    if missing:
        raise _moved(missing)
    return Runtime(schedules, base, PipelineStage)


def _moved(missing: list[str]) -> ValueError:
    return ValueError(
        f"backend=torch: torch {torch.__version__} has no {', '.join(missing)} in torch.distributed.pipelining; its "
        f"runtime for tables is private; it works in {TESTED} and does not in 2.9.1; install such a "
        "torch, or use backend=cpu"
    )
