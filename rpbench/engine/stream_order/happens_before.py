"""Happens-before: the races in a trace, by vector clocks; they depend on what is issued, never on timing.

A timeline's clock says for every timeline how much of its work is known to be done. Work issued to a stream knows what
its thread knows; an event carries a stream's clock to a waiting stream or a synchronising thread; a token carries a
thread's clock to another thread. Two accesses of a storage, one of them a write, are a race unless the later one's
clock includes the earlier. Two threads are not compared: their locks are not in the trace.

Freed memory goes back to the pool of its stream, and any later allocation on that stream may get it, whatever its size.
Other streams' uses of it must then be known as done to that stream or to the freeing thread, or the streams must have
been named by `record_stream`.

Sources: Mattern, "Virtual time and global states of distributed systems", 1989; Flanagan and Freund, "FastTrack",
PLDI'09, section 2; the rules of torch's allocator: "CUDA semantics", section memory management, and
`torch.Tensor.record_stream` in torch's documentation.
"""

from collections import defaultdict
from collections.abc import Hashable
from typing import NamedTuple

from rpbench.engine.stream_order import trace as issued
from rpbench.engine.stream_order.trace import Entry, Storage, Timeline, Trace

Clock = list[int]


class Finding(NamedTuple):
    """A possible error on a device."""

    # RAW, WAR, WAW, REUSE (memory reused while in use), EVENT (waited for, or timed, too early), BLOCKS (a non-blocking
    # copy blocks), DEVICE (memory that the device cannot reach)
    kind: str
    what: str  # in words, with the actions


class _Use(NamedTuple):
    timeline: Timeline
    tick: int
    entry: Entry


class HappensBefore:
    """One pass over a trace: its findings, without repeats, and the vector clock of each timeline so far."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.clocks: list[Clock] = [[0] * len(trace.names) for _ in trace.names]
        self.findings: dict[Finding, None] = {}
        self._written: dict[Storage, _Use] = {}
        self._read: dict[Storage, dict[Timeline, _Use]] = defaultdict(dict)
        self._events: dict[int, tuple[Clock, Timeline, int]] = {}
        self._tokens: dict[Hashable, Clock] = {}
        self._owner: dict[Storage, Timeline] = {}
        self._kept: dict[Storage, set[Timeline]] = defaultdict(set)
        self._pinned: set[Storage] = set()
        self._pool: dict[Timeline, list[_Use]] = defaultdict(list)  # freed, and maybe still used

    def take(self, entry: Entry) -> None:
        match entry:
            case issued.Work():
                self._work(entry)
            case issued.Recorded(thread=thread, stream=stream, event=event):
                self._join(self.clocks[stream], self.clocks[thread])
                self._tick(stream)
                self._events[event] = list(self.clocks[stream]), thread, self._tick(thread)
            case issued.Waits(thread=thread, stream=stream) | issued.WaitsForStream(thread=thread, stream=stream):
                self._join(self.clocks[stream], self.clocks[thread])
                self._join(self.clocks[stream], self.carried_by(entry))
            case issued.Synchronised(thread=thread) | issued.SynchronisedEvent(thread=thread):
                self._join(self.clocks[thread], self.carried_by(entry))
            case issued.Signalled(thread=thread, token=token):
                self._tick(thread)
                self._tokens[token] = list(self.clocks[thread])
            case issued.Awaited(thread=thread, token=token):
                self._join(self.clocks[thread], self._tokens.get(token, []))
            case issued.Timed(thread=thread, events=events):
                for event in events:
                    clock = self._event(entry, event)
                    if any(tick > known for tick, known in zip(clock, self.clocks[thread], strict=False)):
                        what = "asks for the time of an event that may not have happened"
                        self._note("EVENT", f"{self.trace.describe(entry)} {what}")
            case issued.Born(thread=thread, stream=stream, storage=storage):
                self._join(self.clocks[stream], self.clocks[thread])
                self._owner[storage] = stream
                self._reuse(entry, stream)
            case issued.Freed(thread=thread, storage=storage):
                self._free(thread, storage)
            case issued.Kept(storage=storage, stream=stream):
                self._kept[storage].add(stream)
            case issued.Pinned(storage=storage):
                self._pinned.add(storage)
            case issued.Misplaced(what=what):
                self._note("DEVICE", f"{what} ({entry.action}, {entry.place})")

    def carried_by(self, entry: Entry) -> Clock:
        """The clock that a waiting entry adds to that of its stream or thread."""
        clock = [0] * len(self.clocks)
        match entry:
            case issued.Waits(event=event) | issued.SynchronisedEvent(event=event):
                self._join(clock, self._event(entry, event))
            case issued.WaitsForStream(other=other):
                self._join(clock, self.clocks[other])
            case issued.Synchronised(streams=streams):
                for stream in streams:
                    self._join(clock, self.clocks[stream])
        return clock

    def _reuse(self, entry: Entry, stream: Timeline) -> None:
        for use in self._pool.pop(stream, ()):
            if not self._knows(stream, use):
                where = f"{self.trace.names[stream]} ({entry.action}, {entry.place})"
                self._find("REUSE", f"{where} may be given memory", use, "may still use")

    def _work(self, entry: issued.Work) -> None:
        who = entry.who
        if entry.stream is not None:
            self._join(self.clocks[who], self.clocks[entry.thread])
        use = _Use(who, self._tick(who), entry)
        for storage in entry.reads | entry.writes:
            written = self._written.get(storage)
            if written is not None and not self._is_ordered(who, written):
                kind = "RAW" if storage in entry.reads else "WAW"
                self._find(kind, f"{self.trace.describe(entry)} takes memory", written, "writes")
        for storage in entry.writes:
            for read in self._read.pop(storage, {}).values():
                if not self._is_ordered(who, read):
                    self._find("WAR", f"{self.trace.describe(entry)} overwrites memory", read, "reads")
            self._written[storage] = use
        for storage in entry.reads - entry.writes:
            self._read[storage][who] = use
        if not entry.hosts <= self._pinned:
            self._note("BLOCKS", f"{self.trace.describe(entry)}: its host memory is not pinned")
            self._join(self.clocks[entry.thread], self.clocks[who])

    def _free(self, thread: Timeline, storage: Storage) -> None:
        owner, kept = self._owner.pop(storage, None), self._kept.pop(storage, ())
        uses = [*self._read.pop(storage, {}).values()]
        written = self._written.pop(storage, None)
        if owner is None:  # of the host: torch keeps pinned memory until copies of it are done
            return
        for use in uses if written is None else [*uses, written]:
            if use.timeline != owner and use.timeline not in kept and not self._knows(thread, use):
                self._pool[owner].append(use)

    def _event(self, entry: Entry, event: int) -> Clock:
        found = self._events.get(event)
        if found is None:
            self._note("EVENT", f"{self.trace.describe(entry)} is for an event not recorded yet")
            return []
        clock, thread, tick = found
        if self.clocks[entry.thread][thread] < tick:
            who = self.trace.names[thread]
            self._note("EVENT", f"{self.trace.describe(entry)} is for an event that {who} may not have recorded")
        return clock

    def _tick(self, timeline: Timeline) -> int:
        self.clocks[timeline][timeline] += 1
        return self.clocks[timeline][timeline]

    def _knows(self, timeline: Timeline, use: _Use) -> bool:
        return self.clocks[timeline][use.timeline] >= use.tick

    def _is_ordered(self, who: Timeline, use: _Use) -> bool:
        threads = self.trace.threads
        return self._knows(who, use) or (who in threads and use.timeline in threads)

    def _find(self, kind: str, what: str, other: _Use, does: str) -> None:
        self._note(kind, f"{what} that {self.trace.describe(other.entry)} {does}, not ordered")

    def _note(self, kind: str, what: str) -> None:
        self.findings[Finding(kind, what)] = None

    @staticmethod
    def _join(mine: Clock, other: Clock) -> None:
        for place, tick in enumerate(other):
            if tick > mine[place]:
                mine[place] = tick


def findings(trace: Trace, *, first: bool = False) -> list[Finding]:
    """The possible errors in the run of a trace: all of them, or none behind the entry of the first."""
    order = HappensBefore(trace)
    for entry in trace.entries:
        order.take(entry)
        if first and order.findings:
            break
    return list(order.findings)
