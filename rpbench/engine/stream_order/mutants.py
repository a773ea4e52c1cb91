"""Mutants: a trace with one wait dropped, delayed by an action, or put on a neighbour's stream; is each seen?

A run is ordered by waits for events and streams, synchronisations, `record_stream` and pinned memory. Each of them is
changed in turn. A mutant with findings is *seen*. A mutant without findings is equivalent, with a reason:

    known    an earlier entry, which is named, orders the same already
    later    a later entry, which is named, orders the same before it is needed
    idle     nothing that it orders shares memory that is written

Dropping an entry removes more order than delaying or misplacing it.
"""

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from rpbench.engine.stream_order.happens_before import HappensBefore, findings
from rpbench.engine.stream_order.trace import (
    Born,
    Entry,
    Freed,
    Kept,
    Pinned,
    Signalled,
    Storage,
    Synchronised,
    SynchronisedEvent,
    Timeline,
    Trace,
    Waits,
    WaitsForStream,
    Work,
)

_ORDERING = (Waits, WaitsForStream, Synchronised, SynchronisedEvent, Kept, Pinned)


class Mutant(NamedTuple):
    """One change of a trace - an entry dropped, delayed or misplaced - with the changed trace."""

    change: str
    place: int
    entry: Entry
    trace: Trace


class Verdict(NamedTuple):
    """The outcome of a mutant - seen, known, later or idle - and its reason."""

    mutant: str
    outcome: str
    by: str


def mutants(trace: Trace) -> Iterator[Mutant]:
    """Every change of every ordering entry of a trace."""
    neighbours = _neighbours(trace)
    for place, entry in enumerate(trace.entries):
        if not isinstance(entry, _ORDERING):
            continue
        before, after = trace.entries[:place], trace.entries[place + 1 :]
        yield Mutant("dropped", place, entry, replace(trace, entries=[*before, *after]))
        if isinstance(entry, Pinned):
            continue
        ends = (n for n, other in enumerate(after) if isinstance(other, Signalled) and other.thread == entry.thread)
        later = next(ends, len(after) - 1) + 1  # behind the end of its action
        yield Mutant("delayed", place, entry, replace(trace, entries=[*before, *after[:later], entry, *after[later:]]))
        moved = _misplaced(entry, neighbours)
        if moved is not None:
            yield Mutant("misplaced", place, entry, replace(trace, entries=[*before, moved, *after]))


def judged(trace: Trace) -> Iterator[Verdict]:
    """The verdict on every mutant of a trace without findings."""
    small = without_private_memory(trace)
    for mutant in mutants(small):
        name = f"{small.describe(mutant.entry)}, {mutant.change}"
        found = findings(mutant.trace, first=True)
        if found:
            yield Verdict(name, "seen", f"{found[0].kind}: {found[0].what}")
        else:
            yield Verdict(name, *_what_orders(small, mutant))


def summary(trace: Trace) -> dict[str, Any]:
    """The number of mutants by outcome, and the reasons of equivalent ones."""
    verdicts = list(judged(trace))
    outcomes = Counter(verdict.outcome for verdict in verdicts)
    named = Counter((verdict.mutant, verdict.outcome, verdict.by) for verdict in verdicts if verdict.outcome != "seen")
    return {
        "num_mutants": len(verdicts),
        **{f"num_mutants_{outcome}": outcomes[outcome] for outcome in ("seen", "known", "later", "idle")},
        "share_seen": outcomes["seen"] / max(1, len(verdicts)),
        "equivalent": [f"{mutant}: {outcome}, {by}" for mutant, outcome, by in named],
    }


def without_private_memory(trace: Trace) -> Trace:
    """The same trace without storages that one timeline alone uses: no change of waits makes a race of them."""
    users: dict[Storage, set[Timeline]] = defaultdict(set)
    for entry in trace.entries:
        if isinstance(entry, Work):
            for storage in entry.reads | entry.writes:
                users[storage].add(entry.who)
    shared = frozenset(storage for storage, found in users.items() if len(found) > 1)
    entries: list[Entry] = []
    given: set[Timeline] = set()  # streams that have been given memory since the last entry that is kept
    for entry in trace.entries:
        if isinstance(entry, Work):
            entry = replace(entry, reads=entry.reads & shared, writes=entry.writes & shared)
            if not entry.reads and not entry.writes:
                continue
        elif isinstance(entry, Freed | Kept | Pinned) and entry.storage not in shared:
            continue
        elif isinstance(entry, Born) and entry.storage not in shared:
            if entry.stream in given:
                continue
            given.add(entry.stream)
            entries.append(entry)
            continue
        given.clear()
        entries.append(entry)
    return replace(trace, entries=entries)


def _neighbours(trace: Trace) -> dict[Timeline, Timeline]:
    """Stream -> the next one of its device; itself where it is alone."""
    found: dict[int, list[Timeline]] = defaultdict(list)
    for stream, device in trace.devices.items():
        found[device].append(stream)
    return {stream: row[(place + 1) % len(row)] for row in found.values() for place, stream in enumerate(sorted(row))}


def _misplaced(entry: Entry, neighbours: dict[Timeline, Timeline]) -> Entry | None:
    """The entry on a neighbour's stream; None where it names none."""
    if isinstance(entry, Waits | WaitsForStream | Kept):
        return replace(entry, stream=neighbours[entry.stream])
    if isinstance(entry, Synchronised) and len(entry.streams) == 1:
        return replace(entry, streams=(neighbours[entry.streams[0]],))
    return None


# --- equivalent mutants ----------------------------------------------------------------------------------------

_Work = dict[Timeline, int]  # timeline -> how much of its work is to be known as done


def _what_orders(trace: Trace, mutant: Mutant) -> tuple[str, str]:
    """Why a mutant without findings has none."""
    entry = mutant.entry
    if isinstance(entry, Pinned):
        return "idle", "no copy that goes on while the host does reads or writes it"
    if isinstance(entry, Kept):
        return _who_keeps(mutant.trace, entry)
    needed = _carried(trace, mutant.place)
    targets = (entry.thread, entry.stream) if isinstance(entry, Waits | WaitsForStream) else (entry.thread,)
    found = _who_brings(mutant.trace, targets, needed)
    if found is None:
        return _who_orders_uses(mutant.trace, needed)
    place, by = found
    return ("known" if place < mutant.place else "later"), f"brought by {trace.describe(by)}"


def _carried(trace: Trace, place: int) -> _Work:
    """The work that is known as done by an entry."""
    order, done = HappensBefore(trace), dict[Timeline, list[int]]()
    for entry in trace.entries[:place]:
        order.take(entry)
        if isinstance(entry, Work):
            who = entry.who
            done.setdefault(who, []).append(order.clocks[who][who])
    clock = order.carried_by(trace.entries[place])
    found = {who: bisect_right(ticks, clock[who]) for who, ticks in done.items()}
    return {who: done[who][number - 1] for who, number in found.items() if number}


def _who_brings(trace: Trace, targets: Sequence[Timeline], needed: _Work) -> tuple[int, Entry] | None:
    """The first entry, with its index, after which some timelines together know all needed work, if any."""
    order, missing = HappensBefore(trace), dict(needed)
    if not missing:
        return 0, trace.entries[0]
    for place, entry in enumerate(trace.entries):
        order.take(entry)
        for who in [who for who, tick in missing.items() if any(order.clocks[each][who] >= tick for each in targets)]:
            del missing[who]
        if not missing:
            return place, entry
    return None


def _who_orders_uses(trace: Trace, work: _Work) -> tuple[str, str]:
    """The reason that orders work before the next use of its memory, if the mutated wait never knows of it."""
    order, used = HappensBefore(trace), dict[Storage, tuple[Timeline, int]]()
    for entry in trace.entries:
        order.take(entry)
        if not isinstance(entry, Work):
            continue
        who = entry.who
        tick = order.clocks[who][who]
        for storage in sorted(entry.reads | entry.writes):
            maker, made = used.get(storage, (who, tick))
            if maker != who:
                found = _who_brings(trace, (who, entry.thread), {maker: made})
                assert found is not None  # or there would be a finding
                return "later", f"its memory is next used after {trace.describe(found[1])}"
            if tick <= work.get(who, 0):
                used[storage] = who, tick
    return "idle", "nobody else uses the memory of what it waits for"


def _who_keeps(trace: Trace, kept: Kept) -> tuple[str, str]:
    """Why memory need not be kept for a stream, or not by this entry."""
    order, name = HappensBefore(trace), trace.names[kept.stream]
    used, freed, owner = 0, None, None
    for place, entry in enumerate(trace.entries):
        if isinstance(entry, Freed) and entry.storage == kept.storage:
            freed = place, entry
        elif isinstance(entry, Born) and entry.storage == kept.storage:
            owner = entry.stream
        order.take(entry)
        if isinstance(entry, Work) and entry.stream == kept.stream and kept.storage in entry.reads | entry.writes:
            used = order.clocks[kept.stream][kept.stream]
    if not used:
        return "idle", f"{name} never uses it"
    if freed is None or owner is None:
        return "idle", "it is not freed within the run"
    last, freeing = freed
    by_thread = _who_brings(trace, (freeing.thread,), {kept.stream: used})
    if by_thread is not None and by_thread[0] < last:
        return "known", f"freed after {trace.describe(by_thread[1])}"
    by_stream = _who_brings(trace, (owner,), {kept.stream: used})
    if by_stream is None:
        return "idle", f"{trace.names[owner]} is given no memory after it is freed"
    return "later", f"given away after {trace.describe(by_stream[1])}"
