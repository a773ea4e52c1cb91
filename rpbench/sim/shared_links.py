"""Times of transfers and tasks that share links, a host's memory or an interpreter, by an event simulation.

If devices share a root complex or the host's memory, the time of a transfer depends on the other transfers, and no
longest path gives it. The host's optimizer uses that memory as well. Every transfer gets its max-min fair rate: rates
rise together until a link is full; the transfers on it keep their rate, and the others rise on. Rates change whenever a
transfer begins or ends. Without shared links, the times are those of `rpbench.sim.longest_path`.

Tasks need no schedule. A task begins when all tasks that it waits for have ended and its port, if it needs one, is
free. It ends when its own seconds have passed and its amount is served. Servers of amounts:

    copies    bytes over a link; a copy's rate is at most that of a link, its part of a root complex's rate, and its
              part of the host's memory rate
    host      bytes the host's threads read and write for one task: the memory rate that copies leave, and at least the
              part of one copy
    loop      seconds of one interpreter, which all tasks that need it share
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from math import inf
from typing import Any

import numpy as np
import numpy.typing as npt

from rpbench.cost.table import CostTable
from rpbench.cost.transfers import TransferTimes
from rpbench.ir.moved_objects import Payload
from rpbench.ir.timeline import Timeline
from rpbench.sim import longest_path
from rpbench.sim.fair_shares import Edges, Servers, Works, timed
from rpbench.sim.graph import COMPILE_FROM, Graph

Integers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


def simulate_links(graph: Graph, costs: CostTable, times: TransferTimes, less: Sequence[float] = ()) -> Timeline:
    """When each action runs, in the costs' unit; transfers share links as the cluster does.

    `less` is as in `rpbench.sim.longest_path.simulate_graph`.
    """
    return _simulate(graph, _Waits(graph), costs, times, less, compiles=graph.num_actions >= COMPILE_FROM)


def simulate_charged(graph: Graph, costs: CostTable, less: Sequence[float] = ()) -> Timeline:
    """When each action runs at costs that may charge transfers, on shared links where the cluster has them."""
    if isinstance(costs.transfer_time, TransferTimes) and shares_links(graph, costs):
        return simulate_links(graph, costs, costs.transfer_time, less)
    return longest_path.simulate_graph(graph, costs, less)


def shares_links(graph: Graph, costs: CostTable) -> bool:
    """Whether the time of a transfer depends on other transfers."""
    times = costs.transfer_time
    return isinstance(times, TransferTimes) and bool(graph.payload) and times.cluster.shares_links


class MovingGraph:
    """A graph ready to be timed at any costs by the compiled loop, for a search that asks for many timelines."""

    def __init__(self, graph: Graph) -> None:
        self._graph, self._waits = graph, _Waits(graph)

    def simulate(self, costs: CostTable) -> Timeline:
        """When each action runs, in the costs' unit: as `simulate_charged`."""
        if isinstance(costs.transfer_time, TransferTimes) and shares_links(self._graph, costs):
            return _simulate(self._graph, self._waits, costs, costs.transfer_time, compiles=True)
        return longest_path.simulate_graph(self._graph, costs, compiles=True)


class _Waits:
    """The waits of a graph, by topological position, and how many each action has; they do not depend on costs."""

    def __init__(self, graph: Graph) -> None:
        places, behind = np.arange(graph.num_actions), graph.previous >= 0
        producer = np.concatenate([graph.pred, graph.previous[behind]])
        consumer = np.concatenate([np.repeat(places, np.diff(graph.pred_start)), places[behind]])
        first = np.concatenate([[0], np.cumsum(np.bincount(producer, minlength=graph.num_actions))])
        consumers = consumer[np.argsort(producer, kind="stable")]
        columns = graph.previous, graph.pred_start, graph.pred, first, consumers, (), ()
        self.edges = Edges(*(np.asarray(column, np.int64) for column in columns))
        self.counts = np.diff(graph.pred_start).astype(np.int64) + behind


def _simulate(
    graph: Graph, waits: _Waits, costs: CostTable, times: TransferTimes, less: Sequence[float] = (), *, compiles: bool
) -> Timeline:
    num = graph.num_actions
    slot, works = longest_path.shortened(*longest_path.works_by_slot(graph, costs), less)
    main, pre = np.array([work[:2] for work in works], float)[slot].T
    amount, server, servers, capacity = _amounts(graph, times, [own.transfer_time for own in costs.each])
    found = timed(
        waits.edges._replace(delay=longest_path.hop_times(graph, costs), late=longest_path.late_edges(graph, costs)),
        Works(pre, np.where(amount > 0, 0.0, main), amount, server, np.full(num, -1), np.zeros(num, np.int64)),
        servers,
        (capacity, capacity),
        waits.counts,
        latency=times.cluster.transfer_latency_s * costs.units_per_second,
        unit=float(costs.units_per_second),
        compiles=compiles,
    )
    start, begun, end, exposed = (column[graph.rank] for column in found)
    return Timeline(
        graph.schedule, start, begun, end, exposed, longest_path.all_hops(graph, costs), costs.units_per_second
    )


def _amounts(graph: Graph, times: TransferTimes, each: Sequence[Any]) -> tuple[Floats, Integers, Servers, Floats]:
    """By topological position, bytes and their server; the servers, one for all equal flows; the capacity of links.

    `each` has the times of every microbatch of a step; empty if all are alike.
    """
    cluster, table, capacity = times.cluster, np.array(-1), [times.cluster.shared_host_bytes_per_s or inf]
    flows = [[_flow(payload, own) for payload in graph.payload] for own in (*each, times)]
    if each:
        microbatch = longest_path.microbatches_of(graph)
        table = np.where(microbatch < 0, -1, microbatch % len(each))
    complexes, num = np.zeros(graph.num_actions, np.int32), 0
    if cluster.devices_per_root_complex is not None and cluster.root_complex_bytes_per_s is not None:
        complexes = graph.columns.device[graph.order] // cluster.devices_per_root_complex
        num = int(complexes.max(initial=0)) + 1
        capacity += [cluster.root_complex_bytes_per_s] * (2 * num)  # each complex has a link in, and one out
    capacity.append(1.0)  # amounts on SSDs are seconds
    first, found = dict[tuple[float, int, int, float], int](), list[tuple[float, int, int, float]]()
    for pace, memory, way, ssd in dict.fromkeys(flow[1:] for own in flows for flow in own):
        first[pace, memory, way, ssd] = len(found)
        ways = [1 + way + 2 * number if num and way >= 0 else -1 for number in range(max(1, num))]
        found += [(pace, memory, way, ssd) for way in ways]
    columns = [np.array(column) for column in zip(*found, strict=True)]
    servers = Servers(columns[0], columns[1], columns[2], np.zeros(len(found), np.bool_), columns[3])
    amounts = np.array([[flow[0] for flow in own] for own in flows])
    of = np.array([[first[flow[1:]] for flow in own] for own in flows])
    return amounts[table, graph.slot], of[table, graph.slot] + complexes, servers, np.array(capacity)


_NO_FLOW = 0.0, inf, -1, -1, 0.0  # takes no time


def _flow(payload: Payload | None, times: TransferTimes) -> tuple[float, float, int, int, float]:
    """Bytes; pace of the link alone; the number of the host's memory (-1: not used); the direction through a complex;
    and seconds of SSDs a byte."""
    if payload is None:
        return _NO_FLOW
    carried, pace, ssd_s = times.demand(payload)
    if not carried or not (pace or ssd_s or times.cluster.transfer_latency_s):
        return _NO_FLOW
    if payload.lane == "host":
        return carried, inf, 0, -1, ssd_s / carried
    way = ("h2d", "d2h", "net").index(payload.lane)
    return (carried, pace or inf, *((-1, -1) if way == 2 else (0, way)), ssd_s / carried)


# --- tasks ---

NOTHING, HOST, LOOP, COPY = 0, 1, 2, 3  # servers of amounts; COPY + g: the links of group g


@dataclass
class Tasks:
    """Tasks and their waits; `run` takes times and amounts by slot, so that they can be varied."""

    slot: list[int] = field(default_factory=list)  # number of a task's times and amount
    port: list[int] = field(default_factory=list)  # the port it occupies; -1 for none
    urgent: list[bool] = field(default_factory=list)  # whether it goes before others that wait for the same port
    waits: list[int] = field(default_factory=list)  # number of tasks it waits for
    followers: list[list[int]] = field(default_factory=list)  # the tasks that wait for it

    def add(self, slot: int, *after: int, port: int = -1, urgent: bool = False) -> int:
        """Add a task that waits for others (negative numbers for none); return its number."""
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
    """Rates of shared servers; ValueError for a `loop_share` out of range."""

    copy_bytes_per_s: float = inf  # pace of one copy alone
    host_bytes_per_s: float = inf  # of the host's memory, all copies and the host's own threads together
    group_bytes_per_s: float = inf  # of all copies of one group: one way through one root complex
    loop_share: float = 1.0  # fraction of a core that the interpreter has while the host's threads fill all cores

    def __post_init__(self) -> None:
        if not 0 < self.loop_share <= 1:
            raise ValueError(f"loop_share={self.loop_share}: a share of a core, above 0 and at most 1")

    def servers(self, num: int) -> Servers:
        """`num` servers: `NOTHING`, `HOST`, `LOOP`, and `COPY` of each group."""
        groups = num - COPY
        return Servers(
            np.array([inf, inf, inf, *[self.copy_bytes_per_s] * groups]),
            np.array([-1, 0, -1, *[0] * groups]),
            np.array([-1, -1, *range(1, 2 + groups)]),
            np.arange(num) == HOST,
            np.zeros(num),
        )

    def links(self, num: int, *, beside_host: bool) -> npt.NDArray[np.float64]:
        """Units a second of the links that `num` servers share: memory, interpreter, and links of groups."""
        loop = self.loop_share if beside_host else 1.0
        return np.array([self.host_bytes_per_s, loop, *[self.group_bytes_per_s] * (num - COPY)])


def run(
    tasks: Tasks, own_s: Sequence[float], amount: Sequence[float], served_by: Sequence[int], capacity: Capacity
) -> tuple[list[float], list[float]]:
    """When each task begins and ends, in seconds; by slot, it has own seconds, and an amount that a server serves."""
    num, num_servers, slot = len(tasks.slot), max(COPY, *served_by) + 1, np.array(tasks.slot)
    none, first = np.zeros(num), np.cumsum([0, *map(len, tasks.followers)])
    followers = np.fromiter(chain.from_iterable(tasks.followers), np.int64)
    empty = followers[:0]
    edges = Edges(np.full(num, -1), np.zeros(num + 1, np.int64), empty, first, followers, none[:0], empty)
    needs, servers = np.array([own_s, amount], float)[:, slot], np.array(served_by)[slot]
    works = Works(none, needs[0], needs[1], servers, np.array(tasks.port), 1 - np.array(tasks.urgent, np.int64))
    links = capacity.links(num_servers, beside_host=False), capacity.links(num_servers, beside_host=True)
    found = timed(edges, works, capacity.servers(num_servers), links, np.array(tasks.waits))
    return found.begun.tolist(), found.end.tolist()
