"""The cpu backend: a device is a thread with one core's worth of torch."""

import torch

from rpbench.engine.backends.threads import ThreadBackend


class CpuBackend(ThreadBackend):
    """Real work by the wall clock, on as many threads as the schedule has lanes."""

    def __init__(self) -> None:
        super().__init__(use_one_core)


def use_one_core() -> None:
    """Must be the first thing a worker does: until then, its matrix products use every core there is."""
    torch.set_num_threads(1)
