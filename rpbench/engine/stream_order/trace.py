"""Trace: the entries of a run, in the order they were issued to the streams of a simulated machine.

Threads and streams are *timelines*, with one numbering. Work on a timeline is done in order; work on different
timelines is ordered by entries alone.
"""

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

Timeline = int
Storage = int
Call = tuple[Any, tuple[Any, ...], dict[str, Any], Any]
"""An operation of torch, what it was given, and what came out."""


@dataclass(slots=True)
class Entry:
    """One call issued by a thread, in a schedule's action, at a line of code."""

    thread: Timeline
    action: str
    place: str


@dataclass(slots=True)
class Work(Entry):
    """An operation of a stream, or the thread; `hosts`: pinned storages that it copies without waiting."""

    stream: Timeline | None
    name: str
    reads: frozenset[Storage]
    writes: frozenset[Storage]
    hosts: frozenset[Storage] = frozenset()

    @property
    def who(self) -> Timeline:
        """The timeline that does it."""
        return self.thread if self.stream is None else self.stream


@dataclass(slots=True)
class Recorded(Entry):
    """An event is recorded on a stream."""

    stream: Timeline
    event: int


@dataclass(slots=True)
class Waits(Entry):
    """A stream's later work waits for an event."""

    stream: Timeline
    event: int


@dataclass(slots=True)
class WaitsForStream(Entry):
    """A stream's later work waits for another stream's work so far."""

    stream: Timeline
    other: Timeline


@dataclass(slots=True)
class Synchronised(Entry):
    """The thread has waited for all work of these streams."""

    streams: tuple[Timeline, ...]


@dataclass(slots=True)
class SynchronisedEvent(Entry):
    """The thread has waited for an event."""

    event: int


@dataclass(slots=True)
class Timed(Entry):
    """A thread asks for the times of events: they must have happened."""

    events: tuple[int, ...]


@dataclass(slots=True)
class Signalled(Entry):
    """The thread's work so far is ordered before an `Awaited` of the token."""

    token: Hashable


@dataclass(slots=True)
class Awaited(Entry):
    """The thread has waited for a token."""

    token: Hashable


@dataclass(slots=True)
class Born(Entry):
    """The allocator gives a stream memory."""

    stream: Timeline
    storage: Storage


@dataclass(slots=True)
class Freed(Entry):
    """A storage is freed: its memory goes back to the pool of its stream."""

    storage: Storage


@dataclass(slots=True)
class Kept(Entry):
    """`record_stream`: freed memory is not reused before this stream has done its work up to the freeing."""

    storage: Storage
    stream: Timeline


@dataclass(slots=True)
class Pinned(Entry):
    """A storage of the host is pinned: devices access it asynchronously."""

    storage: Storage


@dataclass(slots=True)
class Misplaced(Entry):
    """An operation on memory that its device cannot reach."""

    what: str


@dataclass
class Trace:
    """All entries of a run, the names of timelines, which of them are threads, and the device of each stream."""

    entries: list[Entry] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    threads: set[Timeline] = field(default_factory=set)
    devices: dict[Timeline, int] = field(default_factory=dict)

    def timeline(self, name: str, device: int | None = None) -> Timeline:
        """A new timeline: a stream of a device, or a thread."""
        number = len(self.names)
        self.names.append(name)
        if device is None:
            self.threads.add(number)
        else:
            self.devices[number] = device
        return number

    def describe(self, entry: Entry) -> str:
        stream = getattr(entry, "stream", None)
        who = self.names[entry.thread if stream is None else stream]
        what = entry.name if isinstance(entry, Work) else type(entry).__name__
        return f"{what} on {who} ({entry.action.partition(' of ')[0]}, {entry.place})"
