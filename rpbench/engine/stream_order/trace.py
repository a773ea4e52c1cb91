"""Trace: what a run has issued, in the order it was issued, to the streams of a machine that has none.

Threads and streams are *timelines*, numbered through. Work on a timeline is done in order; across timelines only what
an entry says orders anything.
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
    """Something that a thread has issued.

    Args:
        thread: the timeline of the thread.
        action: what the thread was at.
        place: the line of code that issued it.
    """

    thread: Timeline
    action: str
    place: str


@dataclass(slots=True)
class Work(Entry):
    """An operation: on a stream, or by the thread itself.

    Args:
        hosts: storages of the host that it copies from or to without waiting; pinned ones alone can be.
    """

    stream: Timeline | None
    name: str
    reads: frozenset[Storage]
    writes: frozenset[Storage]
    hosts: frozenset[Storage] = frozenset()


@dataclass(slots=True)
class Recorded(Entry):
    """An event notes what a stream has been given so far."""

    stream: Timeline
    event: int


@dataclass(slots=True)
class Waits(Entry):
    """What a stream is given from now on waits for an event."""

    stream: Timeline
    event: int


@dataclass(slots=True)
class WaitsForStream(Entry):
    """What a stream is given from now on waits for what another one has been given so far."""

    stream: Timeline
    other: Timeline


@dataclass(slots=True)
class Synchronised(Entry):
    """The thread has waited for all that these streams have been given."""

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
    """What a thread has done so far comes before what follows an `Awaited` of the token."""

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
    """Nobody has a storage any more: its memory goes back to the pool of its stream."""

    storage: Storage


@dataclass(slots=True)
class Kept(Entry):
    """`record_stream`: its memory is not given away before a stream has done what it was given until it is freed."""

    storage: Storage
    stream: Timeline


@dataclass(slots=True)
class Pinned(Entry):
    """A storage of the host can be read and written by devices while the host goes on."""

    storage: Storage


@dataclass(slots=True)
class Misplaced(Entry):
    """An operation that no device could do: of memory that it cannot reach."""

    what: str


@dataclass
class Trace:
    """What a run has issued.

    Args:
        names: by timeline.
        threads: which timelines are threads.
        devices: stream -> its device.
    """

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
        """An entry in words."""
        stream = getattr(entry, "stream", None)
        who = self.names[entry.thread if stream is None else stream]
        what = entry.name if isinstance(entry, Work) else type(entry).__name__
        return f"{what} on {who} ({entry.action.partition(' of ')[0]}, {entry.place})"
