"""Thread backends: one long-lived thread a lane; on cpu it computes on one core."""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import cycle
from queue import SimpleQueue
from typing import Self

import torch

from rpbench.engine.backends.walk import Walk
from rpbench.engine.executor import Perform
from rpbench.engine.program import Program
from rpbench.ir.checks.excerpt import broken
from rpbench.ir.timeline import Timeline

Job = Callable[[], None]


class Workers:
    """Daemon threads that run jobs; each calls `prepare` first. There are as many as ever ran jobs at once."""

    def __init__(self, prepare: Job) -> None:
        self._prepare = prepare
        self._threads: list[threading.Thread] = []
        self._queues: list[SimpleQueue[Job | None]] = []

    def start(self, jobs: Sequence[Job], names: Sequence[str]) -> None:
        """Give job i to worker i; a job must not raise."""
        for number in range(len(self._threads), len(jobs)):
            queue: SimpleQueue[Job | None] = SimpleQueue()
            thread = threading.Thread(target=self._work, args=(queue,), name=names[number], daemon=True)
            self._queues.append(queue)
            self._threads.append(thread)
            thread.start()
        for queue, job in zip(self._queues, jobs, strict=False):
            queue.put(job)

    def dead(self) -> list[int]:
        return [number for number, thread in enumerate(self._threads) if not thread.is_alive()]

    def close(self, timeout_s: float) -> None:
        """End all workers; wait at most `timeout_s` in all."""
        for queue in self._queues:
            queue.put(None)
        end = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        self._threads, self._queues = [], []

    def _work(self, queue: "SimpleQueue[Job | None]") -> None:
        self._prepare()
        while (job := queue.get()) is not None:
            job()


POLL_S = 0.1  # how often to look whether a worker has died
IDLE_S = 30.0  # within which an idle worker ends on any machine
# How long a thread keeps the interpreter when another one asks for it. On two cores, in random order, a step took 1.05
# (1F1B) and 1.08 (RoundPipe) times its replay with Python's default of 5 ms, 1.03 and 1.05 with this. 10 us is no
# better.
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

        Raises as `rpbench.engine.executor.Backend` does, and RuntimeError if a worker has died.
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
        """End the workers, each after the action that it runs."""
        self._workers.close(IDLE_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _wait(self, walk: Walk, places: list[int]) -> None:
        while places and not walk.over.wait(POLL_S):
            for number in self._workers.dead():
                lane = walk.program.lanes[places[number]]
                rule = f"the worker of device {lane.device}, lane {lane.name} has died"
                walk.fail(RuntimeError(str(broken(walk.program.schedule, rule, [lane.start]))))
            if walk.error is not None:
                break
        if walk.error is not None:
            raise walk.error


@contextmanager
def _quick_turns() -> Iterator[None]:
    """Inside, threads take turns with the interpreter at `SWITCH_S`."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(min(before, SWITCH_S))
    try:
        yield
    finally:
        sys.setswitchinterval(before)


class CpuBackend(ThreadBackend):
    """Real work by the wall clock, one thread for each lane, bound to `cores` in turn if there are any."""

    def __init__(self, cores: Sequence[int] = ()) -> None:
        places = cycle(cores)

        def prepare() -> None:
            use_one_core()
            if cores:
                bind(0, next(places))

        super().__init__(prepare)


@contextmanager
def one_thread() -> Iterator[None]:
    """Operations on one core each: with more, sums are split and the last bits depend on the machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def use_one_core() -> None:
    """Call it first in a worker: until then, its matrix products use all cores."""
    torch.set_num_threads(1)


def usable_cores() -> list[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def bind(thread: int, core: int) -> None:
    """Keep a thread on a core, where the system can; 0 is the calling thread, a process id its first thread."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(thread, {core})
