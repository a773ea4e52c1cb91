"""The thread backend: real threads, one long-lived worker a lane; cpu and emulated devices are made of it."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Self

from rpbench.engine.backends.walk import Walk, lane_lost
from rpbench.engine.backends.workers import Workers
from rpbench.engine.executor import Perform
from rpbench.engine.program import Program
from rpbench.ir.timeline import Timeline

POLL_S = 0.1  # how often to look whether a worker has died
IDLE_S = 30.0  # within which an idle worker ends on any machine
# How long a thread keeps the interpreter when another one asks for it. With Python's own 5 ms a step took 1.05 (1F1B)
# and 1.08 (RoundPipe) times its replay on two cores, with this 1.03 and 1.05, in random order; 10 us gains no more.
SWITCH_S = 1e-4
GRACE_S = 0.6  # how long to wait, after an error, for actions that are running


class ThreadBackend:
    """Runs programs in real time. Use it in a `with` block, or close it.

    Args:
        prepare: what each worker does first.
        hop_s: how long after its end an action's output is on another device.

    Attributes:
        pre_cpu_s, main_cpu_s: by action of the last run, the processor time of its two phases.
    """

    def __init__(self, prepare: Callable[[], None], hop_s: float = 0.0) -> None:
        self._workers = Workers(prepare)
        self._hop_s = hop_s
        self.pre_cpu_s: list[float] = []
        self.main_cpu_s: list[float] = []

    def run(self, program: Program, perform: Perform) -> Timeline:
        """When each action ran, in seconds; what ran ahead of a main phase is put directly before it.

        Raises:
            ActionFailed: if one raised; its cause is what it raised.
            ScheduleError: if no lane can move.
            RuntimeError: if a worker has died.
        """
        walk = Walk(program, perform, self._hop_s)
        places = walk.places
        names = [f"device {program.lanes[place].device} {program.lanes[place].name}" for place in places]
        try:
            with _quick_turns():
                self._workers.start([partial(walk.run_lane, place) for place in places], names)
                self._wait(walk, places)
        except BaseException as error:  # Ctrl-C too: nothing begins any more
            walk.fail(error)
            walk.over.wait(GRACE_S)
            self._workers.close(GRACE_S / 2)
            raise
        self.pre_cpu_s, self.main_cpu_s = walk.pre_cpu, walk.main_cpu
        return walk.timeline()

    def close(self) -> None:
        """End the workers, who have nothing to do; one that is in the middle of an action ends after it."""
        self._workers.close(IDLE_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _wait(self, walk: Walk, places: list[int]) -> None:
        while places and not walk.over.wait(POLL_S):
            for number in self._workers.dead():
                walk.fail(lane_lost(walk.program, places[number]))
            if walk.error is not None:
                break
        if walk.error is not None:
            raise walk.error


@contextmanager
def _quick_turns() -> Iterator[None]:
    """Threads take turns with the interpreter at `SWITCH_S`; it is as it was after that."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(min(before, SWITCH_S))
    try:
        yield
    finally:
        sys.setswitchinterval(before)
