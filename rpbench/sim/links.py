"""Times of a schedule whose transfers share links: an event simulation with fair shares.

Where devices hang on one root complex, or all of them on the host's memory, how long a transfer takes depends on what
else travels; no longest path can say that. The optimizer of the host shares that memory with the transfers. Every
transfer gets what max-min fairness gives it: rates rise together until a link is full, the transfers on it stay there,
and the others go on rising. Rates change whenever a transfer begins or ends. Without shared links, the times are those
of `rpbench.sim.longest_path`.
"""

import heapq
from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import pairwise
from math import inf
from typing import NamedTuple

from rpbench.cost.machine import Machine
from rpbench.cost.table import CostTable
from rpbench.cost.transfers import TransferTimes
from rpbench.ir.moved_objects import Cargo
from rpbench.ir.timeline import Timeline
from rpbench.sim.graph import Graph
from rpbench.sim.longest_path import late_edges, shortened, simulate_graph, works_by_slot


def simulate_links(graph: Graph, costs: CostTable, times: TransferTimes, less: Sequence[float] = ()) -> Timeline:
    """When each action runs, in the costs' unit; transfers share what the cluster says they share.

    Args:
        less: as in `rpbench.sim.longest_path.simulate_graph`.
    """
    run = _Run(graph, costs, times, less)
    run.to_the_end()
    rank = graph.rank.tolist()
    columns = (run.start, run.main, run.end, run.exposed)
    start, main, end, exposed = ([column[place] for place in rank] for column in columns)
    hops = graph.num_hops * costs.hop
    return Timeline(graph.schedule, start, main, end, exposed, hops, costs.units_per_second)


def simulate_charged(graph: Graph, costs: CostTable, less: Sequence[float] = ()) -> Timeline:
    """When each action runs at costs that may charge transfers, on shared links where the cluster has them.

    Args:
        less: as in `rpbench.sim.longest_path.simulate_graph`.
    """
    if isinstance(costs.transfer_time, TransferTimes) and shares_links(graph, costs):
        return simulate_links(graph, costs, costs.transfer_time, less)
    return simulate_graph(graph, costs, less)


def shares_links(graph: Graph, costs: CostTable) -> bool:
    """Whether what a transfer takes depends on what else travels."""
    times = costs.transfer_time
    return isinstance(times, TransferTimes) and bool(graph.cargo) and times.cluster.shares_links


def fair_rates(uses: Mapping[int, Iterable[Hashable]], capacity: Mapping[Hashable, float]) -> dict[int, float]:
    """Max-min fair rates of transfers over links of given capacity; infinite for one that uses no link."""
    left, rates = dict(capacity), dict[int, float]()
    open_ = {transfer: [link for link in links if link in left] for transfer, links in uses.items()}
    while open_:
        load: dict[Hashable, int] = {}
        for links in open_.values():
            for link in links:
                load[link] = load.get(link, 0) + 1
        if not load:
            return rates | dict.fromkeys(open_, inf)
        tightest = min(load, key=lambda link: left[link] / load[link])
        rate = left[tightest] / load[tightest]
        for transfer in [transfer for transfer, links in open_.items() if tightest in links]:
            rates[transfer] = rate
            for link in open_.pop(transfer):
                left[link] = max(0.0, left[link] - rate)
    return rates


def fill_up(limits: Mapping[int, float], capacity: float) -> dict[int, float]:
    """Max-min fair rates of transfers with limits of their own on one link that all of them share."""
    rates, left = dict[int, float](), len(limits)
    for transfer, limit in sorted(limits.items(), key=lambda item: item[1]):
        rates[transfer] = min(limit, capacity / left)
        capacity -= rates[transfer]
        left -= 1
    return rates


class _Flow(NamedTuple):
    """What travels: its bytes, the pace of its own link, and whether it goes through the host's memory."""

    carried: float
    own_pace: float
    shares_memory: bool


class _Run:
    """Actions by topological position, as in the graph."""

    def __init__(self, graph: Graph, costs: CostTable, times: TransferTimes, less: Sequence[float]) -> None:
        self.costs, self.times = costs, times
        num = graph.num_actions
        self.start, self.main = [0.0] * num, [0.0] * num
        self.end, self.exposed = [0.0] * num, [0.0] * num
        slot, works = works_by_slot(graph, costs)
        self.works = shortened([works[number] for number in slot.tolist()], less)
        self.cargo = [graph.cargo[number] if graph.cargo else None for number in graph.slot.tolist()]
        self.device = graph.columns.device[graph.order].tolist()
        self.previous = graph.previous.tolist()
        late, crosses = late_edges(graph, costs).tolist(), graph.crosses.tolist()
        pred, first = graph.pred.tolist(), graph.pred_start.tolist()
        self.edges = [
            [(pred[edge], float(costs.hop) if crosses[edge] else 0.0, late[edge]) for edge in range(start, stop)]
            for start, stop in pairwise(first)
        ]
        self.waiting = [len(edges) + (before >= 0) for edges, before in zip(self.edges, self.previous, strict=True)]
        self.consumers: list[list[int]] = [[] for _ in range(num)]
        for place, edges in enumerate(self.edges):
            for producer, _, _ in edges:
                self.consumers[producer].append(place)
            if self.previous[place] >= 0:
                self.consumers[self.previous[place]].append(place)
        self.unit = costs.units_per_second
        self.capacity = _capacities(times.cluster)
        kinds = {cargo: _flow(cargo, times) for cargo in set(self.cargo) if cargo is not None}
        self.flows = [None if cargo is None else kinds[cargo] for cargo in self.cargo]
        self.events: list[tuple[float, int, bool]] = []  # (time, position, whether a transfer's bytes begin to flow)
        self.left: dict[int, float] = {}  # transfers under way -> bytes still to come
        self.rates: dict[int, float] = {}
        self.now = 0.0

    def to_the_end(self) -> None:
        for place, count in enumerate(self.waiting):
            if not count:
                self._begin(place)
        while self.events or self.left:
            times = {flow: self.now + left / self.rates[flow] * self.unit for flow, left in self.left.items()}
            arrival = min(times.values(), default=inf)
            if self.events and self.events[0][0] <= arrival:
                moment, place, flows = heapq.heappop(self.events)
                self._advance(moment)
                if flows:
                    self._flow(place)
                else:
                    self._finish(place)
                continue
            self._advance(arrival)
            arrived = [flow for flow, moment in times.items() if moment <= arrival]
            for flow in arrived:
                del self.left[flow]
                self.end[flow] = self.now
            self._share()
            for flow in arrived:
                self._finish(flow)

    def _begin(self, place: int) -> None:
        """Everything an action waits for has ended: find its times, or let its bytes flow."""
        free = self.end[self.previous[place]] if self.previous[place] >= 0 else 0.0
        early = early_free = late = late_free = free
        for producer, delay, is_late in self.edges[place]:
            ended = self.end[producer]
            if is_late:
                late, late_free = max(late, ended + delay), max(late_free, ended)
            else:
                early, early_free = max(early, ended + delay), max(early_free, ended)
        work, cargo = self.works[place], self.cargo[place]
        main = max(early + work.pre, late)
        self.start[place], self.main[place] = main - work.pre if main > early + work.pre else early, main
        self.exposed[place] = main - max(early_free + work.pre, late_free)
        if cargo is not None and work.main > 0 and self.times(cargo) is not None:
            latency = self.times.cluster.transfer_latency_s * self.unit
            heapq.heappush(self.events, (main + latency, place, True))
        else:
            self.end[place] = main + work.main
            heapq.heappush(self.events, (self.end[place], place, False))

    def _finish(self, place: int) -> None:
        for consumer in self.consumers[place]:
            self.waiting[consumer] -= 1
            if not self.waiting[consumer]:
                self._begin(consumer)

    def _flow(self, place: int) -> None:
        travelling = self.flows[place]
        assert travelling is not None
        self.left[place] = travelling.carried
        self._share()

    def _share(self) -> None:
        """Rates anew. A lane holds one transfer at a time, so that its link is the transfer's own."""
        if self.capacity.keys() <= {"memory"}:
            under_way = [(place, kind) for place in self.left if (kind := self.flows[place]) is not None]
            self.rates = {place: kind.own_pace for place, kind in under_way}
            sharing = {place: kind.own_pace for place, kind in under_way if kind.shares_memory}
            self.rates |= fill_up(sharing, self.capacity.get("memory", inf))
            return
        uses = {}
        capacity = dict(self.capacity)
        for flow in self.left:
            cargo, device = self.cargo[flow], self.device[flow]
            assert cargo is not None
            pace = self.times.bytes_per_s(cargo)
            if pace is not None and cargo.lane != "host":
                capacity[cargo.lane, device] = pace
            uses[flow] = _links(cargo, device, self.times.cluster)
        self.rates = fair_rates(uses, capacity)

    def _advance(self, moment: float) -> None:
        seconds = (moment - self.now) / self.unit
        for flow in self.left:
            self.left[flow] -= min(self.left[flow], self.rates[flow] * seconds)
        self.now = moment


def _flow(cargo: Cargo, times: TransferTimes) -> _Flow:
    pace = None if cargo.lane == "host" else times.bytes_per_s(cargo)
    return _Flow(times.bytes_of(cargo), inf if pace is None else pace, cargo.lane != "net")


def _links(cargo: Cargo, device: int, cluster: Machine) -> list[Hashable]:
    """What a transfer goes over: its device's link, the root complex, and the host's memory; a STEP there only that."""
    if cargo.lane == "host":
        return ["memory"]
    links: list[Hashable] = [(cargo.lane, device)]
    if cargo.lane != "net":
        if cluster.devices_per_root_complex is not None:
            links.append(("complex", cargo.lane, device // cluster.devices_per_root_complex))
        links.append("memory")
    return links


def _capacities(cluster: Machine) -> dict[Hashable, float]:
    """Bytes per second of what is shared."""
    found: dict[Hashable, float] = {}
    if cluster.shared_host_bytes_per_s is not None:
        found["memory"] = cluster.shared_host_bytes_per_s
    if cluster.devices_per_root_complex is not None and cluster.root_complex_bytes_per_s is not None:
        for number in range(-(-(cluster.num_devices or 1024) // cluster.devices_per_root_complex)):
            for lane in ("h2d", "d2h"):
                found["complex", lane, number] = cluster.root_complex_bytes_per_s
    return found
