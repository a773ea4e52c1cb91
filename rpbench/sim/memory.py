"""Microbatches in flight on each device, replayed from the order of a schedule."""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from rpbench.ir.action import COMPUTE, Kind
from rpbench.ir.checks.residency import RELEASE, TAKE, moves_activations
from rpbench.ir.schedule import Weights
from rpbench.sim.columns import Ints, among
from rpbench.sim.graph import COMPILE_FROM, Graph
from rpbench.sim.kernels import compiled, is_warm, relax

Times = npt.NDArray[np.float64]
Changes = tuple[Ints, Times, npt.NDArray[np.int64]]  # device, moment, how many more


def peak_in_flight(graph: Graph) -> list[int]:
    """The most stage activations each device holds at once: one more at F, one less at the end of B or W.

    Streamed schedules keep activations on the host, so a device holds those of the running action. Activations that a
    bound schedule has moved away do not count (`rpbench.ir.checks.residency`).
    """
    if graph.schedule.weights is Weights.BOUND and moves_activations(graph.schedule):
        return _peak_resident(graph)
    return [int(level.max(initial=0)) for level in in_flight(graph)]


def in_flight(graph: Graph) -> list[npt.NDArray[np.int64]]:
    """Per device, the stage activations held while each action of its compute lane runs."""
    lanes = [slice(first, last) for _, first, last in compute_lanes(graph)]
    if graph.schedule.weights is Weights.STREAMED:
        kept = among(graph.columns.kind, (Kind.F, Kind.B, Kind.FB, Kind.I)).astype(np.int64)
        return [kept[lane] for lane in lanes]
    num = graph.num_actions
    taken, released = (np.bincount(owner, minlength=num) for owner in _taking_and_releasing(graph))
    return [np.cumsum(taken[lane] - released[lane]) + released[lane] for lane in lanes]


def _taking_and_releasing(graph: Graph) -> tuple[Ints, Ints]:
    """The actions that take room for an activation as they begin, and those that make room as they end."""
    kind, _, _, _, owner = graph.columns.plain
    return owner[among(kind, TAKE)], owner[among(kind, RELEASE)]


def compute_lanes(graph: Graph) -> list[tuple[int, int, int]]:
    """(device, first, last) flat range of every device's compute lane; the range may be empty."""
    starts = graph.columns.lane_start.tolist()
    lanes = zip(graph.schedule.items(), starts, starts[1:], strict=False)
    return [(device, first, last) for (device, lane, _), first, last in lanes if lane == "compute"]


# --- activations that move ---


def _peak_resident(graph: Graph) -> list[int]:
    """The peak if activations move: from a replay with one slot a computation and none a transfer, partners' included.

    It is the maximum of `rpbench.ir.checks.residency.resident_levels`.
    """
    start, end = _slots(graph)
    (taken, released), of = _taking_and_releasing(graph), graph.columns.device
    found = [
        (of[taken], start[taken], np.ones(len(taken), np.int64)),
        (of[released], end[released], np.full(len(released), -1)),
        *_moved(graph, start),
    ]
    device, moment, change = (np.concatenate(columns) for columns in zip(*found, strict=True))
    order = np.lexsort((change, moment, device))  # releases in a slot make room for others
    ends = np.searchsorted(device[order], np.arange(graph.schedule.shape.num_ranks + 1))
    levels = np.split(change[order], ends[1:-1])
    return [int(np.cumsum(own).max(initial=0)) for own in levels]


def _slots(graph: Graph) -> tuple[Times, Times]:
    """When each action begins and ends, in slots."""
    takes = among(graph.columns.kind, COMPUTE)[graph.order].astype(np.int32)
    num, num_edges = graph.num_actions, len(graph.pred)
    inputs = graph.previous, graph.pred_start, graph.pred, np.zeros(num_edges), np.zeros(num_edges, bool), takes
    arrays = *inputs, np.zeros(2), np.array([0.0, 1.0]), *np.zeros((4, num))
    if num >= COMPILE_FROM or is_warm():
        compiled(relax)(*arrays)
    else:  # plain Python is faster on lists
        arrays = tuple(array.tolist() for array in arrays)
        relax(*arrays)
    start, _, end, _ = map(np.asarray, arrays[-4:])
    return start[graph.rank], end[graph.rank]


def _moved(graph: Graph, start: Times) -> Iterator[Changes]:
    """LOAD:A takes room, FREE:A after STORE:A makes room; a partner holds activations from STORE:A to LOAD:A."""
    for (device, lane, row), first in zip(graph.schedule.items(), graph.columns.lane_start.tolist(), strict=False):
        if lane not in ("h2d", "d2h"):
            continue
        own = slice(first, first + len(row))
        moment, kind = start[own], graph.columns.kind[own]
        of_activations = graph.columns.of_activations[own]
        change = of_activations * ((kind == Kind.LOAD).astype(np.int64) - ((kind == Kind.FREE) & (lane == "d2h")))
        yield np.full(len(row), device, np.int32), moment, change
        if graph.columns.is_bare:
            continue
        peer = np.array([action[6] if isinstance(action[6], int) else -1 for action in row], np.int32)
        handed = of_activations & (peer >= 0)
        yield peer[handed], moment[handed], np.where(kind[handed] == Kind.STORE, 1, -1)
