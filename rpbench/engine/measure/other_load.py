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
        cores: processor cores that others kept busy on average; None where the system does not say.
        elapsed_s: that passed.
    """

    cores: float | None = None
    elapsed_s = 0.0

    def __init__(self, pids: Sequence[int] = ()) -> None:
        self._pids = pids

    def __enter__(self) -> Self:
        self._began, self._busy, self._own = time.perf_counter(), _busy_s(), _own_s(self._pids)
        return self

    def __exit__(self, *exception: object) -> None:
        self.elapsed_s, busy = time.perf_counter() - self._began, _busy_s()
        if busy is not None and self._busy is not None and self.elapsed_s > 0:
            self.cores = max(0.0, (busy - self._busy - (_own_s(self._pids) - self._own)) / self.elapsed_s)


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
    """Processor time of a process that runs; its name, in brackets, may hold anything."""
    columns = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(columns[11]) + int(columns[12])) / os.sysconf("SC_CLK_TCK")  # user and system, the 14th and 15th
