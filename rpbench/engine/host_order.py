"""Host order: the threads of a run report here how they wait for one another.

They wait at their gates (`backends.threads`) and at the locks of shared state. A check of the order listens
(`rpbench.engine.stream_order`); in training nothing does.
"""

import random
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from threading import Lock, local


class Turns:
    """Runs lanes one at a time in an order drawn by a seed; a turn ends at an operation, a lock, an action, a wait."""

    def __init__(self, lanes: Sequence[int], seed: int) -> None:
        self._rng, self._ready, self._has_ended = random.Random(seed), set(lanes), False
        self._gates = {lane: Lock() for lane in lanes}  # shut; open where a lane has a turn that it has not begun
        for gate in self._gates.values():
            gate.acquire()
        self._hand_over()

    def take(self, lane: int) -> None:
        """Return when it is the lane's turn."""
        _own.turns, _own.lane = self, lane
        if not self._has_ended:
            self._gates[lane].acquire()

    def give(self, lane: int, *, goes_on: bool) -> None:
        """End the turn of a lane; one that does not go on gets no turn until `wake`."""
        if not goes_on:
            self._ready.discard(lane)
        self._hand_over()

    def pass_on(self, lane: int) -> None:
        """End the turn of a lane, and return at its next turn."""
        self.give(lane, goes_on=True)
        self.take(lane)

    def wake(self, lane: int) -> None:
        """A lane's wait is over; called by the lane whose turn it is."""
        self._ready.add(lane)

    def end(self) -> None:
        """Let all lanes go on at once: the run has failed."""
        self._has_ended = True
        for gate in self._gates.values():
            with suppress(RuntimeError):  # open already
                gate.release()

    def _hand_over(self) -> None:
        if self._ready and not self._has_ended:
            self._gates[self._rng.choice(sorted(self._ready))].release()


class _ThreadState(local):
    """The turns, lane and number of held locks of the calling thread."""

    def __init__(self) -> None:
        self.turns: Turns | None = None
        self.lane = self.num_locks = 0


_own = _ThreadState()


def pause() -> None:
    """Pass the turn on where lanes take turns, unless this lane holds a lock."""
    if _own.turns is not None and not _own.num_locks:
        _own.turns.pass_on(_own.lane)


class HostOrder:
    """Listens to the threads of a run, each of which reports about itself. This class ignores all reports."""

    def begins(self, what: str) -> None:
        """The calling thread begins an action."""

    def signal(self, token: Hashable) -> None:
        """The calling thread's work so far comes before any later `wait` for the token."""

    def wait(self, token: Hashable) -> None:
        """The calling thread has waited for the token."""

    def turns(self, lanes: Sequence[int]) -> Turns | None:
        """The order in which the lanes of a run go on; None: all at the same time."""
        return None


_listening = [HostOrder()]


def host_order() -> HostOrder:
    return _listening[-1]


@contextmanager
def listening(order: HostOrder) -> Iterator[None]:
    """Inside, runs that begin report to `order`."""
    _listening.append(order)
    try:
        yield
    finally:
        _listening.remove(order)


class ReportedLock:
    """A lock that reports the order of its holders; use it in a `with` block."""

    def __init__(self) -> None:
        self._lock = Lock()

    def __enter__(self) -> None:
        pause()
        self._lock.acquire()
        _own.num_locks += 1
        host_order().wait(self)

    def __exit__(self, *exception: object) -> None:
        host_order().signal(self)
        _own.num_locks -= 1
        self._lock.release()
