"""Times of a schedule whose transfers share links: an event simulation with fair shares.

Where devices hang on one root complex, or all of them on the host's memory, how long a transfer takes depends on what
else travels; no longest path can say that. The optimizer of the host shares that memory with the transfers. Every
transfer gets what max-min fairness gives it: rates rise together until a link is full, the transfers on it stay there,
and the others go on rising. Rates change whenever a transfer begins or ends. Without shared links, the times are those
of `rpbench.sim.longest_path`.
"""

from collections.abc import Callable, Sequence
from math import inf
from typing import Any

import numpy as np
import numpy.typing as npt

from rpbench.cost.table import CostTable
from rpbench.cost.transfers import TransferTimes
from rpbench.ir.moved_objects import Cargo
from rpbench.ir.timeline import Timeline
from rpbench.sim.fair_shares import PARTS, Edges, Flows, Shared, Times, Works, share_links
from rpbench.sim.graph import COMPILE_FROM, Graph
from rpbench.sim.kernels import compiled
from rpbench.sim.longest_path import (
    all_hops,
    hop_times,
    late_edges,
    microbatches_of,
    shortened,
    simulate_graph,
    works_by_slot,
)

Integers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


def simulate_links(graph: Graph, costs: CostTable, times: TransferTimes, less: Sequence[float] = ()) -> Timeline:
    """When each action runs, in the costs' unit; transfers share what the cluster says they share.

    Args:
        less: as in `rpbench.sim.longest_path.simulate_graph`.
    """
    return _simulate(graph, _Waits(graph), costs, times, less, compiles=graph.num_actions >= COMPILE_FROM)


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


class MovingGraph:
    """A graph ready to be timed at any costs by the compiled loop, for a search that asks for many timelines."""

    def __init__(self, graph: Graph) -> None:
        self._graph, self._waits = graph, _Waits(graph)

    def simulate(self, costs: CostTable) -> Timeline:
        """When each action runs, in the costs' unit: as `simulate_charged`."""
        if isinstance(costs.transfer_time, TransferTimes) and shares_links(self._graph, costs):
            return _simulate(self._graph, self._waits, costs, costs.transfer_time, compiles=True)
        return simulate_graph(self._graph, costs)


class _Waits:
    """Who waits for whom in a graph, by topological position, and for how many; what does not depend on costs."""

    def __init__(self, graph: Graph) -> None:
        places, behind = np.arange(graph.num_actions), graph.previous >= 0
        producer = np.concatenate([graph.pred, graph.previous[behind]])
        consumer = np.concatenate([np.repeat(places, np.diff(graph.pred_start)), places[behind]])
        first = np.concatenate([[0], np.cumsum(np.bincount(producer, minlength=graph.num_actions))])
        edges = (graph.previous, graph.pred_start, graph.pred, first, consumer[np.argsort(producer, kind="stable")])
        self.edges = tuple(column.astype(np.int64) for column in edges)
        self.counts = np.diff(graph.pred_start).astype(np.int64) + behind


def _simulate(
    graph: Graph, waits: _Waits, costs: CostTable, times: TransferTimes, less: Sequence[float] = (), *, compiles: bool
) -> Timeline:
    num, delay = graph.num_actions, hop_times(graph, costs)
    slot, works = works_by_slot(graph, costs)
    if less:
        works = shortened([works[number] for number in slot.tolist()], less)
        slot = np.arange(num, dtype=np.int32)
    pre, main = np.array([(float(work.pre), float(work.main)) for work in works])[slot].T
    flows, capacity = _flows(graph, times, [own.transfer_time for own in costs.each])
    groups: tuple[Any, ...] = (
        (*waits.edges, delay, late_edges(graph, costs)),
        (pre, main, *flows),
        (capacity, np.zeros(len(capacity)), np.zeros(len(capacity), np.int64), np.zeros(len(capacity))),
        (waits.counts.copy(), np.zeros(num, np.int64)),
        (np.zeros(num, np.int64), np.zeros(num), np.zeros(num)),
        np.zeros((4, num)),
    )
    kernel: Callable[..., Any] = compiled(share_links, *PARTS) if compiles else share_links
    if kernel is share_links:  # plain Python is at home on lists
        groups = tuple([column.tolist() for column in group] for group in groups)
    edges, works_of, shared, rooms, under_way, found = groups
    latency, unit = times.cluster.transfer_latency_s * costs.units_per_second, float(costs.units_per_second)
    kernel(Edges(*edges), Works(*works_of), latency, Shared(*shared), unit, *rooms, Flows(*under_way), Times(*found))
    start, begun, end, exposed = (np.asarray(column)[graph.rank] for column in found)
    return Timeline(graph.schedule, start, begun, end, exposed, all_hops(graph, costs), costs.units_per_second)


def _flows(graph: Graph, times: TransferTimes, each: Sequence[Any]) -> tuple[list[npt.NDArray[Any]], Floats]:
    """By position, bytes that flow, the pace of the link alone and the shared links; and the capacity of these.

    The last of them are the SSDs, whose capacity is a second a second; flows know the seconds that a byte takes of it.

    Args:
        each: the times of every microbatch of a step, where they differ.
    """
    cluster, table = times.cluster, np.array(-1)
    tables = [[_STAYS if cargo is None else _flow(cargo, own) for cargo in graph.cargo] for own in (*each, times)]
    if each:
        microbatch = microbatches_of(graph)
        table = np.where(microbatch < 0, -1, microbatch % len(each))
    carried, pace, memory, ssd = np.array(tables).transpose(2, 0, 1)[:, table, graph.slot]
    memory = memory.astype(np.int64)
    capacity = [cluster.shared_host_bytes_per_s or inf]
    if cluster.devices_per_root_complex is None or cluster.root_complex_bytes_per_s is None:
        return [carried, pace, memory, np.full(len(memory), -1), ssd], np.array([*capacity, 1.0])
    lane = np.array([-1 if cargo is None else ("h2d", "d2h", "net", "host").index(cargo.lane) for cargo in graph.cargo])
    complexes = graph.columns.device[graph.order] // cluster.devices_per_root_complex
    ways = np.where(np.isin(lane, (0, 1)), lane, -1)[graph.slot]  # each complex has a link in, and one out
    capacity += [cluster.root_complex_bytes_per_s] * (2 * int(complexes.max(initial=0)) + 2)
    return [carried, pace, memory, np.where(ways < 0, -1, 1 + 2 * complexes + ways), ssd], np.array([*capacity, 1.0])


_STAYS = (0.0, inf, -1, 0.0)


def _flow(cargo: Cargo, times: TransferTimes) -> tuple[float, float, int, float]:
    """Bytes, pace of the link alone, the number of the host's memory where it is used, and seconds of SSDs a byte."""
    carried, pace, ssd_s = times.bytes_of(cargo), times.bytes_per_s(cargo), times.ssd_s(cargo)
    if not carried or not (pace or ssd_s or times.cluster.transfer_latency_s):
        return _STAYS  # as nothing takes time
    if cargo.lane == "host":
        return carried, inf, 0, ssd_s / carried
    return carried, pace or inf, -1 if cargo.lane == "net" else 0, ssd_s / carried
