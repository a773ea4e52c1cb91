"""Network: when the links of a rank are idle during a simulated step, and what can be sent in that time."""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from rpbench.ir.timeline import Timeline
from rpbench.sim.graph import Graph

Span = tuple[float, float]
Spans = tuple[Span, ...]


class Placed(NamedTuple):
    """Traffic in the idle time of a step: how long that is, and when the last of the traffic has been sent."""

    idle_s: float
    done_s: float


def busy_spans(graph: Graph, timeline: Timeline, hop: float) -> tuple[Spans, ...]:
    """For each device, the seconds of a step in which a boundary tensor goes to or comes from another device.

    Args:
        hop: what a tensor takes, in the timeline's unit.
    """
    found: list[list[Span]] = [[] for _ in range(graph.schedule.shape.num_ranks)]
    if not hop:
        return tuple(map(tuple, found))
    end = np.asarray(timeline.end, float)
    consumers = np.repeat(np.arange(graph.num_actions), np.diff(graph.pred_start))
    device = graph.columns.device
    for edge in np.flatnonzero(graph.crosses & graph.moves):
        producer, consumer = graph.order[graph.pred[edge]], graph.order[consumers[edge]]
        span = float(end[producer]) / timeline.units_per_second, float(end[producer] + hop) / timeline.units_per_second
        for number in (producer, consumer):
            found[int(device[number])].append(span)
    return tuple(map(joined, found))


def joined(spans: Iterable[Span]) -> Spans:
    """The same time in spans that do not touch, in order."""
    found: list[Span] = []
    for start, stop in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], stop)
        else:
            found.append((start, stop))
    return tuple(found)


def time_when_placed(busy: Iterable[Span], step_s: float, needed_s: float) -> Placed:
    """Put traffic into the first idle seconds of a step; what is left over follows behind it."""
    idle, done, left, now = 0.0, 0.0, needed_s, 0.0
    for start, stop in (*joined(busy), (step_s, step_s)):
        gap = max(0.0, min(start, step_s) - now)
        idle += gap
        if left > 0 and gap > 0:
            taken = min(gap, left)
            left, done = left - taken, now + taken
        now = max(now, stop)
    return Placed(idle, step_s + left if left > 0 else done)
