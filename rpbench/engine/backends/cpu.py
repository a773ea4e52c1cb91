"""The cpu backend: a device is a thread with one core's worth of torch."""

import os
from collections.abc import Sequence
from itertools import cycle

import torch

from rpbench.engine.backends.threads import ThreadBackend


class CpuBackend(ThreadBackend):
    """Real work by the wall clock, on as many threads as the schedule has lanes.

    Args:
        cores: on which workers are bound, one after another; without any they go where the system puts them.
    """

    def __init__(self, cores: Sequence[int] = ()) -> None:
        places = cycle(cores)

        def prepare() -> None:
            use_one_core()
            if cores:
                bind(0, next(places))

        super().__init__(prepare)


def use_one_core() -> None:
    """Must be the first thing a worker does: until then, its matrix products use every core there is."""
    torch.set_num_threads(1)


def usable_cores() -> list[int]:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def bind(thread: int, core: int) -> None:
    """Keep a thread on a core, where the system can; 0 is the calling thread, a process stands for its first one."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(thread, {core})
