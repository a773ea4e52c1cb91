"""Host order: who is told which thread of a run comes after which.

Threads of a run wait for one another at few places, each of which says so here: at their gates (`backends.walk`), and
at the locks of what they share. Nobody listens in a run that trains; a
check of the order listens (`rpbench.engine.stream_order`).
"""

import random
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from threading import Lock, local
from typing import Protocol


class Turns:
    """Lanes that go on one at a time, so that a run is the same each time: who is next is drawn by a seed.

    A turn lasts until its lane comes to an operation or a lock, has ended an action, or has to wait for another lane.
    """

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
        """End the turn of a lane; one that does not go on is left out until somebody wakes it."""
        if not goes_on:
            self._ready.discard(lane)
        self._hand_over()

    def pass_on(self, lane: int) -> None:
        """Give the turn of a lane that goes on, and return when it has another one."""
        self.give(lane, goes_on=True)
        self.take(lane)

    def wake(self, lane: int) -> None:
        """What a lane has waited for is there; by the lane whose turn it is."""
        self._ready.add(lane)

    def end(self) -> None:
        """Everybody goes on at once: the run has failed."""
        self._has_ended = True
        for gate in self._gates.values():
            with suppress(RuntimeError):  # open already
                gate.release()

    def _hand_over(self) -> None:
        if self._ready and not self._has_ended:
            self._gates[self._rng.choice(sorted(self._ready))].release()


class _Own(local):
    """What the calling thread is at: its turns, and how many locks it has."""

    def __init__(self) -> None:
        self.turns: Turns | None = None
        self.lane = self.num_locks = 0


_own = _Own()


def pause() -> None:
    """Let another lane have its turn, where lanes take turns, unless it would wait for a lock that this one has."""
    if _own.turns is not None and not _own.num_locks:
        _own.turns.pass_on(_own.lane)


class HostOrder(Protocol):
    """Told by the threads of a run, each of itself."""

    def begins(self, what: str) -> None:
        """The calling thread begins an action."""

    def signal(self, token: Hashable) -> None:
        """What the calling thread has done so far comes before whatever follows a `wait` for the token."""

    def wait(self, token: Hashable) -> None:
        """The calling thread has waited for the token."""

    def turns(self, lanes: Sequence[int]) -> Turns | None:
        """The order in which the lanes of a run go on; None: all at the same time."""


class _Nobody:
    def begins(self, what: str) -> None:
        pass

    def signal(self, token: Hashable) -> None:
        pass

    def wait(self, token: Hashable) -> None:
        pass

    def turns(self, lanes: Sequence[int]) -> None:
        return None


_listening: list[HostOrder] = [_Nobody()]


def host_order() -> HostOrder:
    """Whom to tell."""
    return _listening[-1]


@contextmanager
def told(order: HostOrder) -> Iterator[None]:
    """Inside, runs that begin tell somebody."""
    _listening.append(order)
    try:
        yield
    finally:
        _listening.remove(order)


class ToldLock:
    """A lock that says who has had it before whom; to be used in a `with` block."""

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
