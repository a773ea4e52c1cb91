"""Host order: who is told which thread of a run comes after which.

Threads of a run wait for one another at few places, each of which says so here: at their gates (`backends.walk`), and
at the locks of what they share. Nobody listens in a run that trains; a
check of the order listens (`rpbench.engine.stream_order`).
"""

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Protocol


class HostOrder(Protocol):
    """Told by the threads of a run, each of itself."""

    def begins(self, what: str) -> None:
        """The calling thread begins an action."""

    def signal(self, token: Hashable) -> None:
        """What the calling thread has done so far comes before whatever follows a `wait` for the token."""

    def wait(self, token: Hashable) -> None:
        """The calling thread has waited for the token."""


class _Nobody:
    def begins(self, what: str) -> None:
        pass

    def signal(self, token: Hashable) -> None:
        pass

    def wait(self, token: Hashable) -> None:
        pass


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
        self._lock.acquire()
        host_order().wait(self)

    def __exit__(self, *exception: object) -> None:
        host_order().signal(self)
        self._lock.release()
