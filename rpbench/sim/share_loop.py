"""The event loop of `rpbench.sim.bandwidth_shares` on arrays, compiled by numba; imported when first needed.

Heap 0 holds the moments at which own times end, heap `s` the turns on the clock of server `s`, and behind them each
port has a heap of the tasks that wait for it. Ties go to the lower task, so the order of events is one.
"""

from typing import Any, NamedTuple

import numpy as np
from numba import njit

Array = Any  # numpy arrays

TIMERS, HOST, LOOP, COPY = 0, 1, 2, 3
COPY_PACE, MEMORY_PACE, GROUP_PACE, LOOP_SHARE = range(4)  # places in `capacity`


class Graph(NamedTuple):
    """Tasks by number, and from `first[task]` to `first[task + 1]` those that follow each."""

    slot: Array
    port: Array
    urgent: Array
    first: Array
    follower: Array


class Heaps(NamedTuple):
    """Heaps of (key, task), one behind the other: heap h begins at `base[h]` and has `size[h]` entries."""

    key: Array
    task: Array
    base: Array
    size: Array


class Way(NamedTuple):
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


@njit(cache=True)  # type: ignore[untyped-decorator]
def push(heaps: Heaps, heap: int, key: float, task: int) -> None:
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


@njit(cache=True)  # type: ignore[untyped-decorator]
def pop(heaps: Heaps, heap: int) -> tuple[float, int]:
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


@njit(cache=True)  # type: ignore[untyped-decorator]
def share_out(num: Array, capacity: Array, rate: Array) -> None:
    """Write the units per second of a task in each queue, by how many there are in each."""
    rate[COPY:] = np.inf
    left, users = capacity[MEMORY_PACE], num[COPY : len(rate)].sum() + (num[HOST] > 0)
    caps = np.minimum(capacity[COPY_PACE], capacity[GROUP_PACE] / np.maximum(1, num[COPY : len(rate)]))
    for place in np.argsort(caps, kind="mergesort"):  # the slowest first, as max-min fairness fills
        group = COPY + place
        if num[group]:
            rate[group] = min(caps[place], left / users)
            if left != np.inf:
                left -= rate[group] * num[group]
                users -= num[group]
    rate[HOST] = left / max(1, num[HOST])
    rate[LOOP] = (capacity[LOOP_SHARE] if num[HOST] else 1.0) / max(1, num[LOOP])


@njit(cache=True)  # type: ignore[untyped-decorator]
def finish(graph: Graph, heaps: Heaps, way: Way, num_servers: int, task: int) -> None:
    """A task has ended: its port is free, and who waited only for it is ready."""
    way.end[task] = way.now[0]
    port = graph.port[task]
    if port >= 0:
        way.taken[port] = False
        if heaps.size[num_servers + port]:
            way.stack[way.num_ready[0]] = pop(heaps, num_servers + port)[1]
            way.num_ready[0] += 1
    for edge in range(graph.first[task], graph.first[task + 1]):
        other = graph.follower[edge]
        way.waits[other] -= 1
        if not way.waits[other]:
            way.stack[way.num_ready[0]] = other
            way.num_ready[0] += 1


@njit(cache=True)  # type: ignore[untyped-decorator]
def begin(graph: Graph, needs: Array, served_by: Array, heaps: Heaps, way: Way, task: int) -> bool:
    """A task begins, unless its port is taken; one that takes nothing has ended. True if a queue has changed."""
    slot, port = graph.slot[task], graph.port[task]
    if port >= 0:
        if way.taken[port]:
            push(heaps, len(way.rate) + port, 0.0 if graph.urgent[task] else 1.0, task)
            return False
        way.taken[port] = True
    way.begin[task] = way.now[0]
    seconds, units, server = needs[0, slot], needs[1, slot], served_by[slot]
    if units > 0:
        push(heaps, server, way.clock[server] + units, task)
    if seconds > 0:
        push(heaps, TIMERS, way.now[0] + seconds, task)
        way.open_parts[task] = 2 if units > 0 else 1
    elif units <= 0:
        way.num_ended[0] += 1
        way.stack[-way.num_ended[0]] = task
    return bool(units > 0)


@njit(cache=True)  # type: ignore[untyped-decorator]
def advance(heaps: Heaps, way: Way) -> int:
    """Go on to the moment at which the next own time or amount ends; the server, or -1 if nothing is under way."""
    moment, source = np.inf, -1
    if heaps.size[TIMERS]:
        moment, source = heaps.key[heaps.base[TIMERS]], TIMERS
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


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def run_events(graph: Graph, needs: Array, served_by: Array, capacity: Array, heaps: Heaps, way: Way) -> None:
    """Write when each task begins and ends."""
    num_servers, changed = len(way.rate), True
    while True:
        while way.num_ready[0] or way.num_ended[0]:
            if way.num_ended[0]:
                way.num_ended[0] -= 1
                finish(graph, heaps, way, num_servers, way.stack[-way.num_ended[0] - 1])
            else:
                way.num_ready[0] -= 1
                changed |= begin(graph, needs, served_by, heaps, way, way.stack[way.num_ready[0]])
        if changed:
            share_out(heaps.size, capacity, way.rate)
        source = advance(heaps, way)
        if source < 0:
            return
        key, task = pop(heaps, source)
        changed = source != TIMERS
        if changed:
            way.clock[source] = key
        way.open_parts[task] -= 1
        if not way.open_parts[task]:
            way.num_ended[0] += 1
            way.stack[-way.num_ended[0]] = task
