"""The event loop of `rpbench.sim.links` on arrays, compiled: where transfers share nothing but the host's memory.

Everything is by topological position. Its functions are compiled when this module is imported, so that they can call
each other; without numba they are plain and slow, and `COMPILES` says so.
"""

import heapq
from typing import NamedTuple

import numpy as np

from rpbench.sim.kernels import Array, compiled


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
    """What actions take: time before and in the main phase; or bytes, the pace of their link, and who shares memory."""

    pre: Array
    main: Array
    carried: Array
    pace: Array
    shares: Array


class Times(NamedTuple):
    """When actions start, begin their main phase and end, and the time that their hops hold up."""

    start: Array
    begun: Array
    end: Array
    exposed: Array


class Flows(NamedTuple):
    """Transfers under way, those with the slowest link first, as max-min fairness fills the memory; and, by position,
    bytes still to come and bytes a second."""

    places: Array
    left: Array
    rates: Array


@compiled
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


@compiled
def finish(place: int, edges: Edges, waiting: Array, ready: Array, num_ready: int) -> int:
    """An action has ended: what waited for it alone is ready; how many are."""
    for edge in range(edges.consumer_start[place], edges.consumer_start[place + 1]):
        consumer = edges.consumers[edge]
        waiting[consumer] -= 1
        if waiting[consumer] == 0:
            ready[num_ready] = consumer
            num_ready += 1
    return num_ready


@compiled
def next_arrival(num_flows: int, flows: Flows, now: float, unit: float) -> float:
    """When the first of the transfers under way would arrive."""
    arrival = np.inf
    for number in range(num_flows):
        flow = flows.places[number]
        arrival = min(arrival, now + flows.left[flow] / flows.rates[flow] * unit)
    return arrival


@compiled
def advance(num_flows: int, flows: Flows, now: float, moment: float, arrival: float, unit: float) -> None:
    """Let bytes flow until a moment; what arrives by then has none left."""
    for number in range(num_flows):
        flow = flows.places[number]
        lasts = now + flows.left[flow] / flows.rates[flow] * unit
        if lasts <= moment and moment == arrival:
            flows.left[flow] = 0.0
        else:
            flows.left[flow] -= min(flows.left[flow], flows.rates[flow] * (moment - now) / unit)


@compiled
def enter(place: int, num_flows: int, flows: Flows, works: Works) -> None:
    """The bytes of a transfer begin to flow; it stands behind those with a link as slow."""
    flows.left[place] = works.carried[place]
    number = num_flows
    while number > 0 and works.pace[flows.places[number - 1]] > works.pace[place]:
        flows.places[number] = flows.places[number - 1]
        number -= 1
    flows.places[number] = place


@compiled
def share(num_flows: int, flows: Flows, works: Works, capacity: float) -> None:
    """Rates anew."""
    sharing = 0
    for number in range(num_flows):
        sharing += works.shares[flows.places[number]]
    room = capacity
    for number in range(num_flows):
        flow = flows.places[number]
        flows.rates[flow] = works.pace[flow]
        if works.shares[flow]:
            flows.rates[flow] = min(works.pace[flow], room / sharing)
            room -= flows.rates[flow]
            sharing -= 1


@compiled
def share_memory(
    edges: Edges, works: Works, latency: float, capacity: float, unit: float, waiting: Array, times: Times
) -> None:
    """Write the times of every action.

    Args:
        latency: before the bytes of a transfer flow.
        capacity: of the memory, in bytes per second.
        unit: of times, a second.
        waiting: for how many others each action waits; it is changed.
    """
    num = len(waiting)
    flows = Flows(np.zeros(num, np.int64), np.zeros(num), np.zeros(num))
    events, num_flows, now = [(0.0, 0, 0)], 0, 0.0  # (moment, action, whether its bytes begin to flow)
    events.pop()
    ready, num_ready = np.zeros(num, np.int64), 0
    for place in range(num):
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
        share(num_flows, flows, works, capacity)


COMPILES = hasattr(share_memory, "py_func")
