"""Residency on arrays: the most stage activations each device holds while a schedule moves some of them elsewhere.

The replay of `rpbench.ir.residency` on a graph: every computation takes one slot, transfers take none.
"""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from rpbench.ir.action import COMPUTE, Kind
from rpbench.sim.columns import Ints, among
from rpbench.sim.graph import COMPILE_FROM, Graph
from rpbench.sim.kernels import compiled, relax

_TAKE = (Kind.F, Kind.FB)
_RELEASE = (Kind.B, Kind.W, Kind.FB)
Times = npt.NDArray[np.float64]
Changes = tuple[Ints, Times, npt.NDArray[np.int64]]  # device, moment, how many more


def peak_resident(graph: Graph) -> list[int]:
    """The most stage activations each device holds at once, its partners' included."""
    start, end = _slots(graph)
    found = [*_computed(graph, start, end), *_moved(graph, start)]
    device, moment, change = (np.concatenate(columns) for columns in zip(*found, strict=True))
    order = np.lexsort((change, moment, device))  # what is let go in a slot makes room for others
    ends = np.searchsorted(device[order], np.arange(graph.schedule.shape.num_ranks + 1))
    levels = np.split(change[order], ends[1:-1])
    return [int(np.cumsum(own).max(initial=0)) for own in levels]


def _slots(graph: Graph) -> tuple[Times, Times]:
    """When each action begins and ends."""
    takes = among(graph.columns.kind, COMPUTE)[graph.order].astype(np.int32)
    num, num_edges = graph.num_actions, len(graph.pred)
    inputs = graph.previous, graph.pred_start, graph.pred, np.zeros(num_edges), np.zeros(num_edges, bool), takes
    times = [np.zeros(num) for _ in range(4)]
    loop = compiled(relax) if num >= COMPILE_FROM else relax
    loop(*inputs, np.zeros(2), np.array([0.0, 1.0]), *times)
    start, _, end, _ = times
    return start[graph.rank], end[graph.rank]


def _computed(graph: Graph, start: Times, end: Times) -> Iterator[Changes]:
    """A forward takes room as it begins, a backward makes room as it ends."""
    kind, _, _, _, owner = graph.columns.plain
    taken, released = (owner[among(kind, kinds)] for kinds in (_TAKE, _RELEASE))
    device = graph.columns.device
    yield device[taken], start[taken], np.ones(len(taken), np.int64)
    yield device[released], end[released], np.full(len(released), -1)


def _moved(graph: Graph, start: Times) -> Iterator[Changes]:
    """A LOAD:A takes room, the FREE:A behind a STORE:A makes room; a partner holds them from STORE:A to LOAD:A."""
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
