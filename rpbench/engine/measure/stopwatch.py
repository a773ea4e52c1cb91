"""Stopwatch: the seconds that work takes a device, the least of several repeats; and the load of other programs.

On the processor a device is a thread with one core. All devices do the work at once, each on its own tensors. The
result is the mean of their processor times, to which other programs add nothing. On an accelerator it is the time
between two events of its stream.
"""

import os
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Self

import torch

from rpbench.engine.backends.accelerator import place
from rpbench.engine.backends.threads import Workers, one_thread, use_one_core

_STAT = Path("/proc/stat")
# Columns of the first line that count busy time: user, nice, system, irq, softirq, steal. Guests are within user.
_BUSY = (0, 1, 2, 5, 6, 7)


class ForeignLoad:
    """The load of other programs during a `with` block; `pids`: running processes of this run, ended ones are known."""

    elapsed_s = 0.0  # seconds from start to end
    # processor time of other programs; None where the system does not say. It is counted in ticks of 10 ms, so that it
    # may be below 0 for a short block: add blocks up before judging them
    others_s: float | None = None

    def __init__(self, pids: Sequence[int] = ()) -> None:
        self._pids = pids

    def __enter__(self) -> Self:
        self._began, self._busy = time.perf_counter(), _busy_s()
        self._own = 0.0 if self._busy is None else _own_s(self._pids)
        return self

    def __exit__(self, *exception: object) -> None:
        self.elapsed_s, busy = time.perf_counter() - self._began, _busy_s()
        if busy is not None and self._busy is not None:
            self.others_s = busy - self._busy - (_own_s(self._pids) - self._own)

    @property
    def cores(self) -> float | None:
        """Processor cores that others kept busy on average; None where the system does not say."""
        return None if self.others_s is None else max(0.0, self.others_s / self.elapsed_s)


def _busy_s() -> float | None:
    try:
        columns = _STAT.read_text().split("\n", 1)[0].split()[1:]
    except OSError:
        return None
    return sum(int(columns[column]) for column in _BUSY) / os.sysconf("SC_CLK_TCK")


def _own_s(pids: Sequence[int] = ()) -> float:
    used = os.times()
    # Processes that run, by their own clocks, for /proc counts in ticks; numbered as by clock_getcpuclockid(3).
    running_s = sum(time.clock_gettime(~pid << 3 | 2) for pid in pids)
    return time.process_time() + used.children_user + used.children_system + running_s


Work = Callable[[], object]
Made = Callable[[], Work]  # makes work ready to be done, with its tensors

REPEATS = 5


class CoreStopwatch:
    """Devices that are threads with one core each, `num_workers` at a time. Use it in a `with` block."""

    device, dtype, pins = "cpu", torch.float32, False  # pins: whether host memory is pinned for copies

    def __init__(self, num_workers: int, repeats: int = REPEATS) -> None:
        self.num_workers, self._repeats = num_workers, repeats
        self._workers = Workers(use_one_core)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._workers.close(timeout_s=1.0)

    def seconds(self, made: Made) -> float:
        """Seconds of some work on the device: the mean of the workers' least times."""
        least = [0.0] * self.num_workers
        errors: list[BaseException] = []
        ready, over = threading.Barrier(self.num_workers), threading.Barrier(self.num_workers + 1)

        def timed(worker: int) -> None:
            try:
                work = made()
                work()
                ready.wait()
                least[worker] = _least(work, self._repeats, time.thread_time)
            except BaseException as error:
                errors.append(error)
                ready.abort()
            over.wait()

        workers = range(self.num_workers)
        self._workers.start([partial(timed, worker) for worker in workers], [f"calibration {w}" for w in workers])
        over.wait()
        if errors:
            raise errors[0]
        return mean(least)

    def seconds_together(self, one: Made, other: Made) -> float:
        """Seconds of the slower of two works; they run apart, because a copy within memory is both ways already."""
        return max(self.seconds(one), self.seconds(other))

    def seconds_on_host(self, made: Made) -> float:
        return self.seconds(made)


def _least(work: Work, repeats: int, clock: Callable[[], float]) -> float:
    times = []
    for _ in range(repeats):
        began = clock()
        work()
        times.append(clock() - began)
    return min(times)


class AcceleratorStopwatch:
    """The first accelerator, real or made up; used like a `CoreStopwatch`."""

    dtype, pins, num_workers = torch.float16, True, 1

    def __init__(self, repeats: int = REPEATS) -> None:
        self._place, self._repeats = place(0), repeats
        self.device = str(self._place)

    def __enter__(self) -> "AcceleratorStopwatch":
        return self

    def __exit__(self, *exception: object) -> None:
        torch.accelerator.synchronize(self._place)

    def seconds(self, made: Made) -> float:
        """Between two events of the current stream."""
        work = made()
        work()
        return min(self._between_events(work) for _ in range(self._repeats))

    def seconds_together(self, one: Made, other: Made) -> float:
        """Both on streams of their own, from the first start to the last end: the slower of the two."""
        works = [one(), other()]
        streams = [torch.Stream(device=self._place) for _ in works]

        def both() -> None:
            main = torch.accelerator.current_stream(self._place)
            for work, stream in zip(works, streams, strict=True):
                stream.wait_stream(main)
                with stream:
                    work()
            for stream in streams:  # not before both are issued: the second would come after the first
                main.wait_stream(stream)

        return self.seconds(lambda: both)

    def seconds_on_host(self, made: Made) -> float:
        """By the wall clock, on one core, as on the host lane of a device."""
        with one_thread():
            work = made()
            work()
            return _least(work, self._repeats, time.perf_counter)

    def _between_events(self, work: Work) -> float:
        torch.accelerator.synchronize(self._place)
        start, end = (torch.Event(self._place, enable_timing=True) for _ in range(2))
        with torch.accelerator.device_index(0):
            stream = torch.accelerator.current_stream(self._place)
            start.record(stream)
            work()
            end.record(stream)
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3


Stopwatch = CoreStopwatch | AcceleratorStopwatch
