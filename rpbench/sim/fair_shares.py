"""The event loop of transfers that share links: plain Python on lists, or compiled by numba on arrays, with one result.

Everything is by topological position. Links that several transfers share are numbered; the link of a device's own lane
carries one transfer at a time, and is known by its pace.
"""

import heapq
from math import inf
from typing import NamedTuple

from rpbench.sim.kernels import Array


class Edges(NamedTuple):
    """Who waits for whom, and how: `previous` in the same lane, `pred` before an action, `consumers` behind it."""

    previous: Array
    pred_start: Array
    pred: Array
    consumer_start: Array
    consumers: Array
    delay: Array
    late: Array


class Works(NamedTuple):
    """What actions take: time before and in the main phase; or bytes (0: none flow), the pace of their own link, two
    shared links, the host's memory and that of a root complex (-1: none), and seconds of the host's SSDs a byte."""

    pre: Array
    main: Array
    carried: Array
    pace: Array
    memory: Array
    complex: Array
    ssd: Array


class Times(NamedTuple):
    """When actions start, begin their main phase and end, and the time that their hops hold up."""

    start: Array
    begun: Array
    end: Array
    exposed: Array


class Flows(NamedTuple):
    """Transfers under way, those with the slowest link first; by position, bytes still to come and bytes a second."""

    places: Array
    left: Array
    rates: Array


class Shared(NamedTuple):
    """Links that transfers share, the SSDs the last: what each gives in a second, and room to note what is left of it,
    for how many, and what these take of it for a byte each."""

    capacity: Array
    room: Array
    users: Array
    taken: Array


def begin(place: int, edges: Edges, pre: Array, times: Times) -> None:
    """Everything that an action waits for has ended: write its start and the begin of its main phase."""
    previous = edges.previous[place]
    free = times.end[previous] if previous >= 0 else 0.0
    early, early_free, behind, behind_free = free, free, free, free
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


def finish(place: int, edges: Edges, waiting: Array, ready: Array, num_ready: int) -> int:
    """An action has ended: what waited for it alone is ready; how many are."""
    for edge in range(edges.consumer_start[place], edges.consumer_start[place + 1]):
        consumer = edges.consumers[edge]
        waiting[consumer] -= 1
        if waiting[consumer] == 0:
            ready[num_ready] = consumer
            num_ready += 1
    return num_ready


def next_arrival(num_flows: int, flows: Flows, now: float, unit: float) -> float:
    """When the first of the transfers under way would arrive."""
    places, left, rates = flows
    arrival = inf
    for number in range(num_flows):
        flow = places[number]
        arrival = min(arrival, now + left[flow] / rates[flow] * unit)
    return arrival


def advance(num_flows: int, flows: Flows, now: float, moment: float, arrival: float, unit: float) -> None:
    """Let bytes flow until a moment; what arrives by then has none left."""
    places, left, rates = flows
    for number in range(num_flows):
        flow = places[number]
        if moment == arrival and now + left[flow] / rates[flow] * unit <= moment:
            left[flow] = 0.0
        else:
            left[flow] -= min(left[flow], rates[flow] * (moment - now) / unit)


def enter(place: int, num_flows: int, flows: Flows, works: Works) -> None:
    """The bytes of a transfer begin to flow; it stands behind those with a link as slow."""
    flows.left[place] = works.carried[place]
    number = num_flows
    while number > 0 and works.pace[flows.places[number - 1]] > works.pace[place]:
        flows.places[number] = flows.places[number - 1]
        number -= 1
    flows.places[number] = place


def share(num_flows: int, flows: Flows, works: Works, shared: Shared) -> None:
    """Max-min fair rates: all rise together; the slowest of them stops at the pace of its own link, or at the fair part
    of the shared link that is full first, whichever is less."""
    (capacity, room, users, taken), (places, _, rates) = shared, flows
    pace, memory, complexes, ssd, drives = works.pace, works.memory, works.complex, works.ssd, len(shared.capacity) - 1
    for link in range(len(capacity)):
        room[link], users[link], taken[link] = capacity[link], 0, 0.0
    for number in range(num_flows):
        flow = places[number]
        rates[flow] = -1.0  # still rising
        if memory[flow] >= 0:
            users[memory[flow]] += 1
        if complexes[flow] >= 0:
            users[complexes[flow]] += 1
        if ssd[flow] > 0:
            users[drives] += 1
            taken[drives] += ssd[flow]
    for link in range(drives):
        taken[link] = users[link]
    first = 0
    for _ in range(num_flows):
        tightest, level = -1, inf
        for link in range(len(capacity)):
            if users[link] > 0 and room[link] / taken[link] < level:
                tightest, level = link, room[link] / taken[link]
        while rates[places[first]] >= 0:
            first += 1
        flow = places[first]
        rate = pace[flow]
        if rate > level:
            number, rate = first, level
            while rates[flow] >= 0 or (
                memory[flow] != tightest and complexes[flow] != tightest and (tightest != drives or ssd[flow] == 0)
            ):
                number += 1
                flow = places[number]
        rates[flow] = rate
        if memory[flow] >= 0:
            room[memory[flow]] -= rate
            users[memory[flow]] -= 1
            taken[memory[flow]] -= 1
        if complexes[flow] >= 0:
            room[complexes[flow]] -= rate
            users[complexes[flow]] -= 1
            taken[complexes[flow]] -= 1
        if ssd[flow] > 0:
            room[drives] -= rate * ssd[flow]
            users[drives] -= 1
            taken[drives] -= ssd[flow]


def share_links(
    edges: Edges,
    works: Works,
    latency: float,
    shared: Shared,
    unit: float,
    waiting: Array,
    ready: Array,
    flows: Flows,
    times: Times,
) -> None:
    """Write the times of every action.

    Args:
        latency: before the bytes of a transfer flow.
        unit: of times, a second.
        waiting: for how many others each action waits; it is changed.
        ready, flows: room for what is under way.
    """
    events, num_flows, now, num_ready = [(0.0, 0, 0)], 0, 0.0, 0  # (moment, action, whether its bytes begin to flow)
    events.pop()
    for place in range(len(waiting)):
        if waiting[place] == 0:
            ready[num_ready] = place
            num_ready += 1
    while True:
        while num_ready > 0:
            num_ready -= 1
            place = ready[num_ready]
            begin(place, edges, works.pre, times)
            if works.carried[place] > 0:
                heapq.heappush(events, (times.begun[place] + latency, place, 1))
            else:
                times.end[place] = times.begun[place] + works.main[place]
                heapq.heappush(events, (times.end[place], place, 0))
        if len(events) == 0 and num_flows == 0:
            return
        arrival = next_arrival(num_flows, flows, now, unit)
        is_event = len(events) > 0 and events[0][0] <= arrival
        moment = events[0][0] if is_event else arrival
        advance(num_flows, flows, now, moment, arrival, unit)
        now = moment
        if is_event:
            _, place, flows_now = heapq.heappop(events)
            if flows_now == 0:
                num_ready = finish(place, edges, waiting, ready, num_ready)
                continue
            enter(place, num_flows, flows, works)
            num_flows += 1
        else:
            kept = 0
            for number in range(num_flows):
                flow = flows.places[number]
                if flows.left[flow] > 0:
                    flows.places[kept] = flow
                    kept += 1
                else:
                    times.end[flow] = now
                    num_ready = finish(flow, edges, waiting, ready, num_ready)
            num_flows = kept
        share(num_flows, flows, works, shared)


PARTS = (begin, finish, next_arrival, advance, enter, share)  # what `share_links` calls, compiled before it
