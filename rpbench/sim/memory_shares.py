"""The event loop of `rpbench.sim.links` on arrays, compiled: where transfers share nothing but the host's memory.

A search asks for thousands of timelines of a few graphs. What does not depend on the costs is prepared once a graph,
and the compiled loop takes a hundredth of the plain one. Both give the same times up to rounding. A root complex that
devices share is left to the plain loop.
"""

import heapq

import numpy as np
import numpy.typing as npt

from rpbench.cost.table import CostTable
from rpbench.cost.transfers import TransferTimes
from rpbench.ir.timeline import Timeline
from rpbench.sim.graph import Graph
from rpbench.sim.kernels import Array, compiled
from rpbench.sim.links import simulate_links
from rpbench.sim.longest_path import late_edges, simulate_graph, works_by_slot

Floats = npt.NDArray[np.float64]


class MovingGraph:
    """A graph whose transfers and host steps share the host's memory, ready to be timed with any costs."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        first, consumers = _consumers(graph)
        edges = (graph.previous, graph.pred_start, graph.pred, first, consumers)
        self._edges = tuple(column.astype(np.int64) for column in edges)
        self._waiting = np.diff(graph.pred_start).astype(np.int64) + (graph.previous >= 0)

    def simulate(self, costs: CostTable) -> Timeline:
        """When each action runs, in the costs' unit: as `rpbench.sim.links.simulate_charged`."""
        graph, times = self.graph, costs.transfer_time
        if not (isinstance(times, TransferTimes) and graph.cargo and times.cluster.shares_links):
            return simulate_graph(graph, costs)
        cluster, kernel = times.cluster, compiled(share_memory)
        complexes = cluster.devices_per_root_complex is not None and cluster.root_complex_bytes_per_s is not None
        if complexes or kernel is share_memory:
            return simulate_links(graph, costs, times)
        slot, works = works_by_slot(graph, costs)
        found = np.zeros((4, graph.num_actions))
        kernel(
            *self._edges,
            np.where(graph.crosses, float(costs.hop), 0.0),
            late_edges(graph, costs),
            np.array([float(work.pre) for work in works])[slot],
            np.array([float(work.main) for work in works])[slot],
            *(column[graph.slot] for column in _flows(graph, times)),
            cluster.transfer_latency_s * costs.units_per_second,
            float(cluster.shared_host_bytes_per_s or np.inf),
            float(costs.units_per_second),
            self._waiting.copy(),
            *found,
        )
        start, main, end, exposed = found[:, graph.rank]
        hops = graph.num_hops * costs.hop
        return Timeline(graph.schedule, start, main, end, exposed, hops, costs.units_per_second)


def _consumers(graph: Graph) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """What waits for each action, by topological position, and where the list of each begins."""
    num = graph.num_actions
    places = np.arange(num)
    behind = graph.previous >= 0
    producer = np.concatenate([graph.pred, graph.previous[behind]])
    consumer = np.concatenate([np.repeat(places, np.diff(graph.pred_start)), places[behind]])
    sequence = np.argsort(producer, kind="stable")
    first = np.concatenate([[0], np.cumsum(np.bincount(producer, minlength=num))])
    return first, consumer[sequence]


def _flows(graph: Graph, times: TransferTimes) -> tuple[Floats, Floats, npt.NDArray[np.bool_]]:
    """By slot: bytes that flow (0: none do), the pace of the link alone, and whether the host's memory is used."""
    carried, pace = np.zeros(len(graph.slots)), np.full(len(graph.slots), np.inf)
    shares = np.zeros(len(graph.slots), bool)
    for number, cargo in enumerate(graph.cargo):
        if cargo is None or not times(cargo):
            continue
        carried[number] = times.bytes_of(cargo)
        own = None if cargo.lane == "host" else times.bytes_per_s(cargo)
        pace[number] = np.inf if own is None else own
        shares[number] = cargo.lane != "net"
    return carried, pace, shares


def share_memory(
    previous: Array,
    pred_start: Array,
    pred: Array,
    consumer_start: Array,
    consumers: Array,
    delay: Array,
    late: Array,
    pre: Array,
    main: Array,
    carried: Array,
    pace: Array,
    shares: Array,
    latency: float,
    capacity: float,
    unit: float,
    waiting: Array,
    start: Array,
    begun: Array,
    end: Array,
    exposed: Array,
) -> None:
    """Write start, begin of the main phase, end and exposed time of every action, by topological position.

    `flows` lists the transfers under way, those with the slowest link first: the order in which max-min fairness
    fills the memory.
    """
    num = len(previous)
    events = [(0.0, 0, 0)]
    events.pop()
    ready = [0]
    ready.pop()
    flows = np.zeros(num, np.int64)
    left, rates = np.zeros(num), np.zeros(num)
    num_flows = 0
    now = 0.0
    for place in range(num):
        if waiting[place] == 0:
            ready.append(place)  # noqa: PERF401  compiled: a loop is as fast
    while True:
        while len(ready) > 0:  # everything that these wait for has ended: find their times
            place = ready.pop()
            free = end[previous[place]] if previous[place] >= 0 else 0.0
            early, early_free, behind, behind_free = free, free, free, free
            for edge in range(pred_start[place], pred_start[place + 1]):
                bare = end[pred[edge]]
                if late[edge]:
                    behind = max(behind, bare + delay[edge])
                    behind_free = max(behind_free, bare)
                else:
                    early = max(early, bare + delay[edge])
                    early_free = max(early_free, bare)
            at = max(early + pre[place], behind)
            start[place] = at - pre[place] if at > early + pre[place] else early
            begun[place] = at
            exposed[place] = at - max(early_free + pre[place], behind_free)
            if carried[place] > 0:
                heapq.heappush(events, (at + latency, place, 1))
            else:
                end[place] = at + main[place]
                heapq.heappush(events, (end[place], place, 0))
        arrival = np.inf
        for number in range(num_flows):
            flow = flows[number]
            arrival = min(arrival, now + left[flow] / rates[flow] * unit)
        if len(events) == 0 and num_flows == 0:
            return
        moment = arrival
        if len(events) > 0 and events[0][0] <= arrival:
            moment = events[0][0]
        changed = False
        for number in range(num_flows):
            flow = flows[number]
            lasts = now + left[flow] / rates[flow] * unit
            if lasts <= moment and moment == arrival:
                left[flow] = 0.0
            else:
                left[flow] -= min(left[flow], rates[flow] * (moment - now) / unit)
        now = moment
        if len(events) > 0 and events[0][0] <= arrival:
            _, place, begins = heapq.heappop(events)
            if begins == 1:
                left[place] = carried[place]
                number = num_flows
                while number > 0 and pace[flows[number - 1]] > pace[place]:
                    flows[number] = flows[number - 1]
                    number -= 1
                flows[number] = place
                num_flows += 1
                changed = True
            else:
                for edge in range(consumer_start[place], consumer_start[place + 1]):
                    waiting[consumers[edge]] -= 1
                    if waiting[consumers[edge]] == 0:
                        ready.append(consumers[edge])
        else:
            kept = 0
            for number in range(num_flows):
                flow = flows[number]
                if left[flow] > 0:
                    flows[kept] = flow
                    kept += 1
                    continue
                end[flow] = now
                for edge in range(consumer_start[flow], consumer_start[flow + 1]):
                    waiting[consumers[edge]] -= 1
                    if waiting[consumers[edge]] == 0:
                        ready.append(consumers[edge])
            num_flows = kept
            changed = True
        if changed:  # rates anew
            sharing = 0
            for number in range(num_flows):
                sharing += shares[flows[number]]
            room = capacity
            for number in range(num_flows):
                flow = flows[number]
                rates[flow] = pace[flow]
                if shares[flow]:
                    rates[flow] = min(pace[flow], room / sharing)
                    room -= rates[flow]
                    sharing -= 1
