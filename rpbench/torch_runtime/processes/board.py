"""Board: where each rank of a run stands, written at every action and readable when the rank has died.

A rank's place is a few bytes in a file that is mapped into memory, so that writing it costs no system call and what was
written last outlives the process. Ranks of other hosts are read from the store that all of them share, which a thread
of theirs refreshes.
"""

import mmap
import socket
import struct
import time
from collections.abc import Callable
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple

_LAYOUT = struct.Struct("<iiid")  # step, position in the lowered row, phase, seconds since the epoch


class Phase(IntEnum):
    """What a rank is doing."""

    STARTING = 0
    WAITING = 1  # in an action, before its computation: it may wait for a message
    COMPUTING = 2
    BETWEEN = 3  # reducing, stepping, gathering
    DONE = 4
    FAILED = 5


class Standing(NamedTuple):
    """Where a rank stands; `position` counts the actions of its lowered row, -1 before the first."""

    step: int = -1
    position: int = -1
    phase: Phase = Phase.STARTING
    at_s: float = 0.0


class Place:
    """This rank's own line, for one writer."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.write_bytes(bytes(_LAYOUT.size))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _LAYOUT.size)
        self._step = self._position = -1
        self.write(Phase.STARTING)

    def write(self, phase: Phase, position: int | None = None, step: int | None = None) -> None:
        """Say what this rank does now; what is not given stays."""
        self._position = self._position if position is None else position
        self._step = self._step if step is None else step
        _LAYOUT.pack_into(self._map, 0, self._step, self._position, phase, time.time())

    def read(self) -> Standing:
        return unpack(bytes(self._map))

    def pack(self) -> bytes:
        return bytes(self._map)

    def close(self) -> None:
        self._map.close()


def unpack(packed: bytes) -> Standing:
    """The standing that some bytes say; the beginning for what has not been written."""
    if len(packed) != _LAYOUT.size:
        return Standing()
    step, position, phase, at_s = _LAYOUT.unpack(packed)
    return Standing(step, position, Phase(phase), at_s)


def read_file(path: Path) -> Standing | None:
    """The standing in a rank's file; None without one."""
    try:
        return unpack(path.read_bytes())
    except OSError:
        return None


def read_standing(get: Callable[[str], bytes | None], rank: int) -> Standing:
    """The standing of a rank: from its file where that is on this host, from the store otherwise.

    Args:
        get: what the store has under a key, or None.
    """
    where = (get(f"board/{rank}") or b"").decode()
    host, _, path = where.partition(":")
    found = read_file(Path(path)) if path and host == socket.gethostname() else None
    return found or unpack(get(f"standing/{rank}") or b"")
