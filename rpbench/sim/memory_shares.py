"""Timelines of one graph at many costs, where transfers share nothing but the host's memory.

A search asks for thousands of timelines of a few graphs. What does not depend on the costs is prepared once a graph,
and the compiled loop takes a hundredth of the plain one. Both give the same times up to rounding. A root complex that
devices share is left to the plain loop.
"""

import numpy as np
import numpy.typing as npt

from rpbench.cost.table import CostTable
from rpbench.cost.transfers import TransferTimes
from rpbench.ir.timeline import Timeline
from rpbench.sim.graph import Graph
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
        from rpbench.sim.memory_loop import COMPILES, Edges, Times, Works, share_memory  # compiled on import

        cluster = times.cluster
        complexes = cluster.devices_per_root_complex is not None and cluster.root_complex_bytes_per_s is not None
        if complexes or not COMPILES:
            return simulate_links(graph, costs, times)
        slot, works = works_by_slot(graph, costs)
        found = np.zeros((4, graph.num_actions))
        delay = np.where(graph.crosses, float(costs.hop), 0.0)
        share_memory(
            Edges(*(*self._edges, delay, late_edges(graph, costs))),
            Works(
                np.array([float(work.pre) for work in works])[slot],
                np.array([float(work.main) for work in works])[slot],
                *(column[graph.slot] for column in _flows(graph, times)),
            ),
            cluster.transfer_latency_s * costs.units_per_second,
            float(cluster.shared_host_bytes_per_s or np.inf),
            float(costs.units_per_second),
            self._waiting.copy(),
            Times(*found),
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
