"""Shares: an event simulation of tasks that share links, a host's memory and an interpreter, made for speed.

A task begins when all that it waits for has ended - the order of a lane is one more thing to wait for - and its port,
if it needs one, is free; it ends when its own seconds have passed and its amount has been served. A port takes one
task at a time, urgent ones first. What serves amounts:

    copies    bytes over a link; at most the pace of a link each, what the copies of a root complex share, and a fair
              share of the host's memory
    host      bytes the host's threads read and write for one task: what copies leave of the memory, and at least the
              share of one of them
    loop      seconds of one interpreter, which takes turns among all that wait for it

Transfers of one kind all have the same rate at any moment, and so share a clock of bytes: the task that ends first is
the one whose turn on that clock is first, and no rate need be stored for each. `rpbench.sim.links` has no such limit
and times schedules as data; both give the same times where both apply.

Heap 0 holds the moments at which own times end, heap `s` the turns on the clock of server `s`, and behind them each
port has a heap of the tasks that wait for it. Ties go to the lower task, so the order of events is one.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from math import inf
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rpbench.sim.kernels import Array, compiled

Integers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

NOTHING, HOST, LOOP, COPY = 0, 1, 2, 3  # what serves the amount; COPY + g: over the links of group g
_TIMERS = NOTHING  # whose heap has own times
_COPY_PACE, _MEMORY_PACE, _GROUP_PACE, _LOOP_SHARE = range(4)  # places in `Capacity.paces`


@dataclass
class Tasks:
    """Tasks with what they wait for; their times and amounts stand apart, by slot, so that they can be varied.

    Attributes:
        slot: what the times of a task are looked up by.
        waits: how many tasks it waits for.
        followers: the tasks that wait for it.
        port: what it occupies; -1 for nothing.
        urgent: whether it goes before others that wait for the same port.
    """

    slot: list[int] = field(default_factory=list)
    port: list[int] = field(default_factory=list)
    urgent: list[bool] = field(default_factory=list)
    waits: list[int] = field(default_factory=list)
    followers: list[list[int]] = field(default_factory=list)

    def add(self, slot: int, *after: int, port: int = -1, urgent: bool = False) -> int:
        """A task that waits for others (negative numbers for none); its number."""
        number = len(self.slot)
        self.slot.append(slot)
        self.port.append(port)
        self.urgent.append(urgent)
        self.followers.append([])
        count = 0
        for other in after:
            if other >= 0:
                self.followers[other].append(number)
                count += 1
        self.waits.append(count)
        return number

    def link(self, before: int, after: int) -> None:
        """Let one task wait for another as well."""
        self.followers[before].append(after)
        self.waits[after] += 1


@dataclass(frozen=True)
class Capacity:
    """What is shared.

    Args:
        copy_bytes_per_s: pace of one copy alone.
        host_bytes_per_s: of the host's memory, all copies and the host's own threads together.
        group_bytes_per_s: of all copies of one group: one way through one root complex.
        loop_share: of a core that the interpreter has while the host's threads fill them all.

    Raises:
        ValueError: for a share that is not one.
    """

    copy_bytes_per_s: float = inf
    host_bytes_per_s: float = inf
    group_bytes_per_s: float = inf
    loop_share: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.loop_share <= 1:
            raise ValueError(f"loop_share={self.loop_share}: a share of a core, above 0 and at most 1")

    @property
    def paces(self) -> tuple[float, float, float, float]:
        """As the loop takes them."""
        return self.copy_bytes_per_s, self.host_bytes_per_s, self.group_bytes_per_s, self.loop_share


def run(
    tasks: Tasks, own_s: Sequence[float], amount: Sequence[float], served_by: Sequence[int], capacity: Capacity
) -> tuple[list[float], list[float]]:
    """When each task begins and ends, in seconds.

    Args:
        own_s, amount, served_by: by slot: seconds of a task, what must be served besides, and by what.
    """
    num_servers = max(COPY, *served_by) + 1
    first = np.cumsum([0, *map(len, tasks.followers)])
    followers = np.fromiter(chain.from_iterable(tasks.followers), np.int64)
    graph = _Graph(np.array(tasks.slot), np.array(tasks.port), np.array(tasks.urgent), first, followers)
    servers, needs = np.array(served_by), np.array([own_s, amount], float)
    heaps = _Heaps(*_heaps(graph, needs, servers, num_servers))
    num, num_ports = len(tasks.slot), len(heaps.size) - num_servers
    ready = np.flatnonzero(np.array(tasks.waits) == 0)
    way = _Way(
        waits=np.array(tasks.waits),
        begin=np.zeros(num),
        end=np.zeros(num),
        open_parts=np.ones(num, np.int64),
        taken=np.zeros(num_ports, np.bool_),
        clock=np.zeros(num_servers),
        rate=np.zeros(num_servers),
        stack=np.concatenate((ready, np.zeros(num + 1 - len(ready), np.int64))),
        num_ready=np.array([len(ready)]),
        num_ended=np.zeros(1, np.int64),
        now=np.zeros(1),
    )
    compiled(_run_events, *_PARTS)(graph, needs, servers, np.array(capacity.paces), heaps, way)
    return way.begin.tolist(), way.end.tolist()


def _heaps(graph: "_Graph", needs: Floats, servers: Integers, num_servers: int) -> tuple[Any, ...]:
    """Empty heaps of own times, of each server and of each port, as large as they can become."""
    timed, served = needs[:, graph.slot] > 0
    sizes = np.bincount(servers[graph.slot][served], minlength=num_servers)
    sizes[NOTHING] = timed.sum()
    sizes = np.concatenate((sizes, np.bincount(graph.port[graph.port >= 0], minlength=1)))
    base = np.cumsum(sizes) - sizes
    return np.zeros(sizes.sum()), np.zeros(sizes.sum(), np.int64), base, np.zeros(len(sizes), np.int64)


# --- the event loop, on arrays; compiled ------------------------------------------------------------------------


class _Graph(NamedTuple):
    """Tasks by number, and from `first[task]` to `first[task + 1]` those that follow each."""

    slot: Array
    port: Array
    urgent: Array
    first: Array
    follower: Array


class _Heaps(NamedTuple):
    """Heaps of (key, task), one behind the other: heap h begins at `base[h]` and has `size[h]` entries."""

    key: Array
    task: Array
    base: Array
    size: Array


class _Way(NamedTuple):
    """What changes on the way. `stack` holds what is ready from below, what has ended from above."""

    waits: Array
    begin: Array
    end: Array
    open_parts: Array
    taken: Array
    clock: Array
    rate: Array
    stack: Array
    num_ready: Array
    num_ended: Array
    now: Array


def _push(heaps: _Heaps, heap: int, key: float, task: int) -> None:
    """Add an entry to a heap."""
    base, at = heaps.base[heap], heaps.size[heap]
    heaps.size[heap] += 1
    while at > 0:
        above = (at - 1) >> 1
        if (heaps.key[base + above], heaps.task[base + above]) < (key, task):
            break
        heaps.key[base + at], heaps.task[base + at] = heaps.key[base + above], heaps.task[base + above]
        at = above
    heaps.key[base + at], heaps.task[base + at] = key, task


def _pop(heaps: _Heaps, heap: int) -> tuple[float, int]:
    """Take the least entry of a heap."""
    base = heaps.base[heap]
    heaps.size[heap] -= 1
    size = heaps.size[heap]
    least = heaps.key[base], heaps.task[base]
    key, task = heaps.key[base + size], heaps.task[base + size]
    at = 0
    while 2 * at + 1 < size:
        below = base + 2 * at + 1
        if 2 * at + 2 < size and (heaps.key[below + 1], heaps.task[below + 1]) < (heaps.key[below], heaps.task[below]):
            below += 1
        if (key, task) < (heaps.key[below], heaps.task[below]):
            break
        heaps.key[base + at], heaps.task[base + at] = heaps.key[below], heaps.task[below]
        at = below - base
    heaps.key[base + at], heaps.task[base + at] = key, task
    return least


def share_out(num: Array, capacity: Array, rate: Array) -> None:
    """Write the units per second of a task in each queue, by how many there are in each."""
    rate[COPY:] = np.inf
    left, users = capacity[_MEMORY_PACE], num[COPY : len(rate)].sum() + (num[HOST] > 0)
    caps = np.minimum(capacity[_COPY_PACE], capacity[_GROUP_PACE] / np.maximum(1, num[COPY : len(rate)]))
    for place in np.argsort(caps, kind="mergesort"):  # the slowest first, as max-min fairness fills
        group = COPY + place
        if num[group]:
            rate[group] = min(caps[place], left / users)
            if left != np.inf:
                left -= rate[group] * num[group]
                users -= num[group]
    rate[HOST] = left / max(1, num[HOST])
    rate[LOOP] = (capacity[_LOOP_SHARE] if num[HOST] else 1.0) / max(1, num[LOOP])


def _finish(graph: _Graph, heaps: _Heaps, way: _Way, num_servers: int, task: int) -> None:
    """A task has ended: its port is free, and who waited only for it is ready."""
    way.end[task] = way.now[0]
    port = graph.port[task]
    if port >= 0:
        way.taken[port] = False
        if heaps.size[num_servers + port]:
            way.stack[way.num_ready[0]] = _pop(heaps, num_servers + port)[1]
            way.num_ready[0] += 1
    for edge in range(graph.first[task], graph.first[task + 1]):
        other = graph.follower[edge]
        way.waits[other] -= 1
        if not way.waits[other]:
            way.stack[way.num_ready[0]] = other
            way.num_ready[0] += 1


def _begin(graph: _Graph, needs: Array, served_by: Array, heaps: _Heaps, way: _Way, task: int) -> bool:
    """A task begins, unless its port is taken; one that takes nothing has ended. True if a queue has changed."""
    slot, port = graph.slot[task], graph.port[task]
    if port >= 0:
        if way.taken[port]:
            _push(heaps, len(way.rate) + port, 0.0 if graph.urgent[task] else 1.0, task)
            return False
        way.taken[port] = True
    way.begin[task] = way.now[0]
    seconds, units, server = needs[0, slot], needs[1, slot], served_by[slot]
    if units > 0:
        _push(heaps, server, way.clock[server] + units, task)
    if seconds > 0:
        _push(heaps, _TIMERS, way.now[0] + seconds, task)
        way.open_parts[task] = 2 if units > 0 else 1
    elif units <= 0:
        way.num_ended[0] += 1
        way.stack[-way.num_ended[0]] = task
    return bool(units > 0)


def _advance(heaps: _Heaps, way: _Way) -> int:
    """Go on to the moment at which the next own time or amount ends; the server, or -1 if nothing is under way."""
    moment, source = np.inf, -1
    if heaps.size[_TIMERS]:
        moment, source = heaps.key[heaps.base[_TIMERS]], _TIMERS
    now = way.now[0]
    for server in range(HOST, len(way.rate)):
        if heaps.size[server]:
            at = now + (heaps.key[heaps.base[server]] - way.clock[server]) / way.rate[server]
            if at < moment:
                moment, source = at, server
    passed = moment - now
    if source >= 0 and passed > 0:
        for server in range(HOST, len(way.rate)):
            if heaps.size[server]:
                way.clock[server] += way.rate[server] * passed
        way.now[0] = moment
    return source


def _run_events(graph: _Graph, needs: Array, served_by: Array, capacity: Array, heaps: _Heaps, way: _Way) -> None:
    """Write when each task begins and ends."""
    num_servers, changed = len(way.rate), True
    while True:
        while way.num_ready[0] or way.num_ended[0]:
            if way.num_ended[0]:
                way.num_ended[0] -= 1
                _finish(graph, heaps, way, num_servers, way.stack[-way.num_ended[0] - 1])
            else:
                way.num_ready[0] -= 1
                changed |= _begin(graph, needs, served_by, heaps, way, way.stack[way.num_ready[0]])
        if changed:
            share_out(heaps.size, capacity, way.rate)
        source = _advance(heaps, way)
        if source < 0:
            return
        key, task = _pop(heaps, source)
        changed = source != _TIMERS
        if changed:
            way.clock[source] = key
        way.open_parts[task] -= 1
        if not way.open_parts[task]:
            way.num_ended[0] += 1
            way.stack[-way.num_ended[0]] = task


_PARTS = (_push, _pop, share_out, _finish, _begin, _advance)  # what `_run_events` calls, compiled before it
