"""The event loop of tasks that share links, memory or an interpreter: in plain Python or compiled, with equal results.

An action begins when all actions that it waits for have ended and its port, if it needs one, is free. A port takes one
action at a time, urgent ones first. An action ends when its own time has passed and its amount, such as bytes, is
served.

A server gives all its actions under way the same rate, so it has one clock of the amount that each has been given. The
action with the lowest end on that clock ends first, and no remaining amounts are stored. Rates are max-min fair and
change whenever an amount begins or ends. Ties go to the lower action, so the order of events is unique.
"""

from collections.abc import Callable
from math import inf
from typing import Any, NamedTuple

import numpy as np

from rpbench.sim.kernels import Array, compiled


class Edges(NamedTuple):
    """The waits of a graph; edges into action a are `pred_start[a]` to `pred_start[a + 1]` - 1."""

    previous: Array  # by action, the one before in its lane; -1: none
    pred_start: Array
    pred: Array  # by edge, the action that is waited for
    consumer_start: Array
    consumers: Array  # the actions that wait for an action, those before in its lane included
    delay: Array  # by edge, the time of a hop
    late: Array  # by edge, whether it holds back only the main phase


class Works(NamedTuple):
    """The work of every action."""

    pre: Array  # time before the main phase
    main: Array  # time of the main phase
    amount: Array  # 0: none
    server: Array  # that serves the amount
    port: Array  # -1: none
    line: Array  # place in the line at the port; 0: urgent


class Servers(NamedTuple):
    """Servers of amounts."""

    pace: Array  # units a second of one action alone
    memory: Array  # the link of the host's memory; -1: not used
    complex: Array  # the link of a root complex or an interpreter; -1: not used
    together: Array  # whether its actions, threads that fill the host's cores, have one part of a link between them
    ssd: Array  # seconds of SSDs for a unit


class Shared(NamedTuple):
    """Links that servers share; the last is that of SSDs, if any. The last three fields are workspace."""

    capacity: Array  # units a second
    beside_host: Array  # units a second while threads of the host run
    room: Array  # units a second that are left
    users: Array  # actions that share these
    taken: Array  # of these units, how many the actions take together for a unit of each


class Queues(NamedTuple):
    """Queues of servers, then of ports, and last of moments; entries are sorted by key, from `head` to `tail`.

    At a moment, an action's own time ends (entry: twice its number) or its amount begins to be served (that plus one).
    """

    key: Array
    entry: Array
    head: Array
    tail: Array


class Way(NamedTuple):
    """The state of the loop."""

    waiting: Array  # by action, how many others it waits for
    open_parts: Array  # by action, how many of its own time and its amount have not ended
    ready: Array  # actions that can begin
    taken: Array  # by port, whether an action has it
    clock: Array  # by server, the amount that each of its actions has been given
    rates: Array  # by server, units a second of each of its actions


class Times(NamedTuple):
    """The times of every action."""

    start: Array
    begun: Array  # begin of the main phase
    end: Array
    exposed: Array  # the time by which hops delay it


def enqueue(queues: Queues, queue: int, key: float, entry: int) -> None:
    """Add an entry behind those with a lower key, or with the same and a lower number."""
    keys, entries, head, tail = queues
    at = tail[queue]
    tail[queue] += 1
    while at > head[queue] and (keys[at - 1] > key or (keys[at - 1] == key and entries[at - 1] > entry)):
        keys[at], entries[at] = keys[at - 1], entries[at - 1]
        at -= 1
    keys[at], entries[at] = key, entry


def begin(place: int, now: float, edges: Edges, pre: Array, times: Times) -> None:
    """Write the start of an action whose inputs have all ended, and that of its main phase."""
    previous = edges.previous[place]
    free = times.end[previous] if previous >= 0 else 0.0
    early, early_free, behind, behind_free = free, free, now, free
    for edge in range(edges.pred_start[place], edges.pred_start[place + 1]):
        bare = times.end[edges.pred[edge]]
        if edges.late[edge]:
            behind = max(behind, bare + edges.delay[edge])
            behind_free = max(behind_free, bare)
        else:
            early = max(early, bare + edges.delay[edge])
            early_free = max(early_free, bare)
    at = max(early + pre[place], behind)
    times.start[place] = at - pre[place] if at > early + pre[place] else early
    times.begun[place] = at
    times.exposed[place] = at - max(early_free + pre[place], behind_free)


def follow(place: int, edges: Edges, waiting: Array, queue: Array, ready: int) -> int:
    """Note that an action has ended and append the actions that now wait for nothing; return how many are ready."""
    for edge in range(edges.consumer_start[place], edges.consumer_start[place + 1]):
        consumer = edges.consumers[edge]
        waiting[consumer] -= 1
        if waiting[consumer] == 0:
            queue[ready] = consumer
            ready += 1
    return ready


def end_part(
    place: int, now: float, edges: Edges, port: Array, way: Way, queues: Queues, times: Times, ready: int
) -> int:
    """Note that a part of an action has ended, and with the last part the action; return how many are ready."""
    way.open_parts[place] -= 1
    if way.open_parts[place] == 0:
        times.end[place] = now
        if port[place] >= 0:  # it is free for the first in its line
            line = len(way.clock) + port[place]
            way.taken[port[place]] = False
            if queues.tail[line] > queues.head[line]:
                way.ready[ready] = queues.entry[queues.head[line]]
                queues.head[line] += 1
                ready += 1
        ready = follow(place, edges, way.waiting, way.ready, ready)
    return ready


def begin_all(
    ready: int, now: float, latency: float, edges: Edges, works: Works, way: Way, queues: Queues, times: Times
) -> None:
    """Begin all ready actions, and note when own times end and amounts begin to be served."""
    main, amount, port, moments = works.main, works.amount, works.port, len(queues.head) - 1
    while ready > 0:
        ready -= 1
        place = way.ready[ready]
        if port[place] >= 0 and way.taken[port[place]]:
            enqueue(queues, len(way.clock) + port[place], works.line[place], place)
        else:
            if port[place] >= 0:
                way.taken[port[place]] = True
            begin(place, now, edges, works.pre, times)
            at = times.begun[place]
            if amount[place] > 0:
                way.open_parts[place] += 1
                enqueue(queues, moments, at + latency, 2 * place + 1)
            if main[place] > 0 or amount[place] <= 0:
                way.open_parts[place] += 1
                if at + main[place] > now:
                    enqueue(queues, moments, at + main[place], 2 * place)
                else:
                    ready = end_part(place, now, edges, port, way, queues, times, ready)


def next_served(queues: Queues, way: Way, now: float, unit: float) -> tuple[float, int]:
    """When the first of the amounts under way would end, and its server; -1 without one."""
    moment, first = inf, -1
    for server in range(len(way.clock)):
        head = queues.head[server]
        if queues.tail[server] > head:
            at = now + (queues.key[head] - way.clock[server]) / way.rates[server] * unit
            if at < moment or first < 0:
                moment, first = at, server
    return moment, first


def advance(queues: Queues, way: Way, time: float) -> None:
    """Let every server serve for some time."""
    for server in range(len(way.clock)):
        if queues.tail[server] > queues.head[server]:
            way.clock[server] += way.rates[server] * time


def join(server: int, num: int, rate: float, servers: Servers, shared: Shared) -> None:
    """Add actions of a server to its links; a negative number removes actions that have stopped at a rate."""
    for link in (servers.memory[server], servers.complex[server]):
        if link >= 0:
            shared.room[link] += num * rate
            shared.users[link] += num
            shared.taken[link] += num
    if servers.ssd[server] > 0:
        link = len(shared.room) - 1
        shared.room[link] += num * rate * servers.ssd[server]
        shared.users[link] += num
        shared.taken[link] += num * servers.ssd[server]


def share(queues: Queues, servers: Servers, shared: Shared, rates: Array) -> None:
    """Write max-min fair rates: all rise together, and one that reaches its own pace or a full link stops."""
    (pace, memory, complexes, together, ssd), (_, _, head, tail) = servers, queues
    room, users, taken, drives = shared.room, shared.users, shared.taken, len(shared.room) - 1
    rising, crowded = 0, False
    for server in range(len(pace)):
        crowded = crowded or (together[server] and tail[server] > head[server])
    for link in range(len(room)):
        room[link], users[link] = shared.beside_host[link] if crowded else shared.capacity[link], 0
        taken[link] = 0.0
    for server in range(len(pace)):
        rates[server] = 0.0
        if tail[server] > head[server]:
            rates[server] = -1.0  # still rising
            rising += 1
            join(server, 1 if together[server] else tail[server] - head[server], 0.0, servers, shared)
    while rising > 0:
        tightest, level, slowest = -1, inf, inf
        for link in range(len(room)):
            if users[link] > 0 and room[link] / taken[link] < level:
                tightest, level = link, room[link] / taken[link]
        for server in range(len(pace)):
            if rates[server] < 0 and pace[server] < slowest:
                slowest = pace[server]
        rate = min(slowest, level)
        for server in range(len(pace)):
            held = (
                memory[server] == tightest or complexes[server] == tightest or (tightest == drives and ssd[server] > 0)
            )
            if rates[server] < 0 and (pace[server] == slowest if slowest <= level else held):
                num, rising = tail[server] - head[server], rising - 1
                rates[server] = rate / num if together[server] else rate
                join(server, -1 if together[server] else -num, rate, servers, shared)


def run_events(
    edges: Edges,
    works: Works,
    servers: Servers,
    shared: Shared,
    latency: float,  # before an amount begins to be served
    unit: float,  # of times, a second
    way: Way,
    queues: Queues,
    times: Times,
) -> None:
    """Write the times of every action."""
    key, entry, head, tail = queues
    moments, now, moment, ready, changed = len(head) - 1, 0.0, 0.0, 0, False
    for place in range(len(way.waiting)):
        if way.waiting[place] == 0:
            way.ready[ready] = place
            ready += 1
    while moment < inf:
        begin_all(ready, now, latency, edges, works, way, queues, times)
        ready, first = 0, head[moments]
        if tail[moments] > first and key[first] <= now and entry[first] % 2 == 1:
            place = entry[first] // 2
            server = works.server[place]
            head[moments] += 1
            enqueue(queues, server, way.clock[server] + works.amount[place], place)
            changed = True
        else:
            if changed:
                share(queues, servers, shared, way.rates)
            moment, source = next_served(queues, way, now, unit)
            if tail[moments] > first and key[first] <= moment:
                moment, source = key[first], -1
            if now < moment < inf:
                advance(queues, way, (moment - now) / unit)
                now = moment
            changed = source >= 0
            if changed:
                place = entry[head[source]]
                way.clock[source] = key[head[source]]
                head[source] += 1
                ready = end_part(place, now, edges, works.port, way, queues, times, ready)
            elif moment < inf and entry[first] % 2 == 0:
                head[moments] += 1
                ready = end_part(entry[first] // 2, now, edges, works.port, way, queues, times, ready)


PARTS = (enqueue, begin, follow, end_part, begin_all, next_served, advance, join, share)


def timed(
    edges: Edges,
    works: Works,
    servers: Servers,
    capacity: tuple[Array, Array],  # of the links that servers share, and beside the host's threads
    waiting: Array,  # how many others each action waits for
    *,
    latency: float = 0.0,  # as in `run_events`, and so is `unit`
    unit: float = 1.0,
    compiles: bool = True,  # whether to use the compiled loop, if numba is there
) -> Times:
    """The times of every action, as arrays."""
    num, num_servers = len(waiting), len(servers.pace)
    served, lines = works.server[works.amount > 0], np.bincount(works.port[works.port >= 0])
    sizes = np.concatenate([np.bincount(served, minlength=num_servers), lines, [num + len(served)]])
    base, total = np.cumsum(sizes) - sizes, int(sizes.sum())
    (left, load), users = np.zeros((2, len(capacity[0]))), np.zeros(len(capacity[0]), np.int64)
    open_parts, ready = np.zeros((2, num), np.int64)
    taken, (clock, rates) = np.zeros(len(lines), np.bool_), np.zeros((2, num_servers))
    groups: Any = (
        edges,
        works,
        servers,
        Shared(*capacity, left, users, load),
        Way(waiting.copy(), open_parts, ready, taken, clock, rates),
        Queues(np.zeros(total), np.zeros(total, np.int64), base, base.copy()),
        Times(*np.zeros((4, num))),
    )
    kernel: Callable[..., Any] = compiled(run_events, *PARTS, allocates=False) if compiles else run_events
    if kernel is run_events:  # plain Python is faster on lists
        groups = (type(group)(*(column.tolist() for column in group)) for group in groups)
    edges, works, servers, shared, way, queues, times = groups
    kernel(edges, works, servers, shared, latency, unit, way, queues, times)
    return Times(*map(np.asarray, times))
