"""What is alive on each device: microbatches in flight, replayed from the order of a schedule."""

import numpy as np
import numpy.typing as npt

from rpbench.ir.action import Kind
from rpbench.ir.residency import moves_activations
from rpbench.ir.schedule import Weights
from rpbench.sim.columns import Columns, among
from rpbench.sim.graph import Graph
from rpbench.sim.resident import peak_resident

_TAKE = (Kind.F, Kind.FB)
_RELEASE = (Kind.B, Kind.W, Kind.FB)


def peak_in_flight(graph: Graph) -> list[int]:
    """Most stage activations each device holds at once: one more at F, one less at the end of B or W.

    Streamed schedules keep activations on the host, so a device holds those of the action it runs. Where bound
    schedules move activations away and back, what is away does not count (`rpbench.ir.residency`).
    """
    if graph.schedule.weights is Weights.BOUND and moves_activations(graph.schedule):
        return peak_resident(graph)
    return [int(level.max(initial=0)) for level in in_flight(graph)]


def in_flight(graph: Graph) -> list[npt.NDArray[np.int64]]:
    """Per device, the stage activations held while each action of its compute lane runs."""
    lanes = [slice(first, last) for _, first, last in compute_lanes(graph)]
    if graph.schedule.weights is Weights.STREAMED:
        kept = among(graph.columns.kind, (Kind.F, Kind.B, Kind.FB, Kind.I)).astype(np.int64)
        return [kept[lane] for lane in lanes]
    taken, released = _changes(graph.columns)
    return [np.cumsum(taken[lane] - released[lane]) + released[lane] for lane in lanes]


def _changes(columns: Columns) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """How many activations each action takes as it begins, and releases as it ends."""
    kind, _, _, _, owner = columns.plain
    taken, released = (
        np.bincount(owner[among(kind, kinds)], minlength=len(columns.kind)) for kinds in (_TAKE, _RELEASE)
    )
    return taken, released


def compute_lanes(graph: Graph) -> list[tuple[int, int, int]]:
    """(device, first, last) flat range of every device's compute lane; the range may be empty."""
    starts = graph.columns.lane_start.tolist()
    lanes = zip(graph.schedule.items(), starts, starts[1:], strict=False)
    return [(device, first, last) for (device, lane, _), first, last in lanes if lane == "compute"]
