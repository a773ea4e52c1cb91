"""Foreign load: how much of the machine other processes used meanwhile, because it spoils what is measured."""

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

_STAT = Path("/proc/stat")
# Columns of the first line that count busy time: user, nice, system, irq, softirq, steal. Guests are within user.
_BUSY = (0, 1, 2, 5, 6, 7)


class ForeignLoad:
    """Measures over a `with` block.

    Args:
        pids: processes that are ours too and still run; ended ones are counted without.

    Attributes:
        elapsed_s: that passed.
        others_s: processor time that others had; None where the system does not say. The system counts in ticks of
            10 ms, so that a short block may find less than nothing: add blocks up before judging them.
    """

    elapsed_s = 0.0
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
    return time.process_time() + used.children_user + used.children_system + sum(map(_used_s, pids))


def _used_s(pid: int) -> float:
    """Processor time of a process that runs, by its own clock: its file in /proc counts in ticks."""
    return time.clock_gettime(~pid << 3 | 2)  # how Linux numbers these clocks: clock_getcpuclockid(3)
