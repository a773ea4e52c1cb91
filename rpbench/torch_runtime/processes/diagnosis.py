"""Diagnosis: which rank stopped a run, at which action, from the board on which all of them say where they stand.

When a rank dies or hangs, the others report closed connections or wait for good. The rank at fault is the one that has
all the messages it needs and does not go on.

A rank's place on the board is a few bytes in a memory-mapped file: a write costs no system call, and the last one
outlives the process. Ranks of other hosts are read from the shared store, which a thread of each rank refreshes.
"""

import mmap
import socket
import struct
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Literal, NamedTuple

from rpbench.ir.action import RECV, SEND, Action, Kind, parts_of
from rpbench.ir.checks.excerpt import broken
from rpbench.ir.index import Index
from rpbench.torch_runtime.lowering import Lowered

_LAYOUT = struct.Struct("<iiid")  # step, position in the lowered row, phase, seconds since the epoch


class Phase(IntEnum):
    """The kind of work a rank is at."""

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
    """This rank's line on the board; only its rank writes it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.write_bytes(bytes(_LAYOUT.size))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _LAYOUT.size)
        self._step = self._position = -1
        self.write(Phase.STARTING)

    def write(self, phase: Phase, position: int | None = None, step: int | None = None) -> None:
        """Write what this rank does now; arguments left out keep their values."""
        self._position = self._position if position is None else position
        self._step = self._step if step is None else step
        _LAYOUT.pack_into(self._map, 0, self._step, self._position, phase, time.time())

    def read(self) -> Standing:
        return unpack(self.pack())

    def pack(self) -> bytes:
        return bytes(self._map)


def unpack(packed: bytes) -> Standing:
    """The standing in some bytes; the initial one if they are incomplete."""
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
    """The standing of a rank from its file if that is on this host, otherwise from the store, which `get` reads."""
    where = (get(f"board/{rank}") or b"").decode()
    host, _, path = where.partition(":")
    found = read_file(Path(path)) if path and host == socket.gethostname() else None
    return found or unpack(get(f"standing/{rank}") or b"")


Cause = Literal["died", "raised", "out of memory", "hung", "stuck", "absent"]
CONNECTION = (
    "connection closed by peer",
    "connection reset",
    "broken pipe",
    "timed out waiting",
    "socket",
    "gloo/transport",
)
MEMORY = ("out of memory", "can't allocate memory", "cannot allocate memory", "memoryerror")


class RunFailed(RuntimeError):
    """A rank died, raised, hung or ran out of memory, and the run with it."""

    def __init__(
        self, message: str, rank: int = -1, cause: Cause = "raised", action: str = "", words: str = ""
    ) -> None:
        super().__init__(message)
        self.rank, self.cause = rank, cause  # the process at fault, among all processes, and why
        self.action = action  # token of its current action, in our numbering; "" between actions
        self.words = words  # its traceback, or the end of its stderr


@dataclass(frozen=True)
class Evidence:
    """The known facts of all ranks when a run has stopped."""

    standings: Sequence[Standing]
    errors: Mapping[int, str]  # process -> the words of the error it raised
    # process -> its exit status, for those that are gone; negative for a signal, None where unknown
    exits: Mapping[int, int | None]
    hosts: Mapping[int, str]
    frozen: frozenset[int] = frozenset()  # processes that are there and run nothing at all, not even a thread beside


def diagnose(lowered: Lowered | None, evidence: Evidence, inner: int = 1) -> RunFailed:
    """The error that names the rank at fault, its action, and shows the rows with every rank's place marked.

    Where ranks run no table, only the rank is named. Each pipeline rank has `inner` processes.
    """
    rank, cause, said = _culprit(lowered, evidence, inner)
    action = _action_at(lowered, evidence.standings[rank], rank // inner) if lowered else None
    host = f" on {evidence.hosts[rank]}" if rank in evidence.hosts else ""
    standing = evidence.standings[rank]
    between = "before its first action" if standing.phase is Phase.STARTING else "between actions"
    where = between if action is None else f"at {action._replace(peer=None)}"
    rule = f"rank {rank}{host} {said} {where} of step {max(standing.step, 0)}"
    if lowered is None:
        return RunFailed(rule, rank, cause)
    numbers, notes = _marks(lowered, evidence, inner)
    error = broken(lowered.schedule, rule, numbers, notes=notes)
    return RunFailed(str(error), rank, cause, "" if action is None else str(action._replace(peer=None)))


def _culprit(lowered: Lowered | None, evidence: Evidence, inner: int) -> tuple[int, Cause, str]:
    gone = [rank for rank, status in evidence.exits.items() if rank not in evidence.errors and status != 0]
    if gone:
        return gone[0], "died", f"died ({_status(evidence.exits[gone[0]])})"
    own = {rank: words for rank, words in evidence.errors.items() if not _says(words, CONNECTION)}
    if own:
        rank = min(own, key=lambda rank: evidence.standings[rank].at_s or float("inf"))
        cause: Cause = "out of memory" if _says(own[rank], MEMORY) else "raised"
        return rank, cause, f"{'ran out of memory' if cause == 'out of memory' else 'failed'} ({_short(own[rank])})"
    silent = [rank for rank in range(len(evidence.standings)) if rank not in evidence.errors]
    if evidence.frozen:
        return min(evidence.frozen), "hung", "is stopped: its process is there and runs nothing,"
    able = [rank for rank in silent if _can_move(lowered, evidence.standings, rank, inner)]
    if able:
        computing = [rank for rank in able if evidence.standings[rank].phase is Phase.COMPUTING]
        rank = min(computing or able, key=lambda rank: evidence.standings[rank].at_s)
        return rank, "hung", "hangs: it has all it waits for and does not go on,"
    rank = (silent or list(evidence.errors) or [0])[0]
    words = evidence.errors.get(rank)
    return rank, "stuck", f"lost a connection ({_short(words)})" if words else "waits for a message that was not sent"


def _status(status: int | None) -> str:
    if status is None:
        return "its process is gone"
    if status >= 0:
        return f"exit status {status}"
    return f"signal {-status}" + (", which the kernel sends when memory is out" if status == -9 else "")


def _says(words: str, parts: Iterable[str]) -> bool:
    return any(part in words.lower() for part in parts)


def _short(words: str) -> str:
    return words.strip().splitlines()[0][:160] if words.strip() else "no words"


def _action_at(lowered: Lowered, standing: Standing, rank: int) -> Action | None:
    row = lowered.row(rank)
    return row[standing.position] if 0 <= standing.position < len(row) else None


def _can_move(lowered: Lowered | None, standings: Sequence[Standing], rank: int, inner: int) -> bool:
    """Whether every message that a rank's action needs has been sent."""
    own, pipeline_rank = standings[rank], rank // inner
    if lowered is None or own.phase in (Phase.COMPUTING, Phase.STARTING):
        return True
    action = _action_at(lowered, own, pipeline_rank)
    if action is None or own.phase is not Phase.WAITING:
        return own.phase is not Phase.DONE
    for send, sender in _awaited(lowered, action):
        other = standings[sender * inner + rank % inner]
        if (other.step, other.position) <= (own.step, send):
            return False
    return True


_TAKES = {Kind.F: Kind.RECV_F, Kind.B: Kind.RECV_B, Kind.I: Kind.RECV_B}


def _awaited(lowered: Lowered, action: Action) -> list[tuple[int, int]]:
    """(place of the SEND in its row, its rank) of each message that an action waits for."""
    index = Index(lowered.schedule)
    parts = [part._replace(kind=_TAKES[part.kind]) for part in parts_of(action) if part.kind in _TAKES]
    receives = [number for number in map(index.find, parts) if number >= 0]
    sends = [send for receive in receives for send in index.producers[receive]]
    return [(send - index.lanes[index.lane_of[send]].start, index.device(send)) for send in sends]


def _marks(lowered: Lowered, evidence: Evidence, inner: int) -> tuple[list[int], dict[int, str]]:
    """The current actions of the pipeline ranks, by their number in the lowered schedule, and a word on each."""
    numbers, notes, first = [], {}, 0
    for rank in range(lowered.num_ranks):
        row = lowered.row(rank)
        standing = evidence.standings[rank * inner]
        if 0 <= standing.position < len(row):
            waits = standing.phase is Phase.WAITING and row[standing.position].kind not in SEND | RECV
            numbers.append(first + standing.position)
            notes[numbers[-1]] = "waits" if waits else standing.phase.name.lower()
        first += len(row)
    return numbers, notes
