"""Timeline -> numbers, with units in their names."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rpbench.cost.table import CostTable
from rpbench.ir.action import Kind
from rpbench.ir.timeline import Timeline
from rpbench.sim.columns import among
from rpbench.sim.graph import Graph
from rpbench.sim.longest_path import hop_times, works_by_slot
from rpbench.sim.memory import compute_lanes, peak_in_flight
from rpbench.sim.steady import bubble_between_ends, steady_bubble, step_time

Floats = npt.NDArray[np.float64]

_FORWARD = (Kind.F, Kind.FB, Kind.OVERLAP)
_BACKWARD = (Kind.B, Kind.FB, Kind.I, Kind.OVERLAP)


@dataclass(frozen=True)
class Idle:
    """Idle device-time of a step, split as the RoundPipe artifact does.

    The parts sum to the whole where the last work of a device is a backward. `drain` counts all that follows it, so
    that weight gradients and steps behind it make the sum larger.
    """

    fill: float
    switch: float
    drain: float
    intra: float


def measure(graph: Graph, timeline: Timeline, costs: CostTable, *, switch_after_last_forward: bool) -> dict[str, Any]:
    """Every metric of one simulated run, in seconds.

    `bubble_makespan` = 1 - work / (devices x makespan); `bubble_span` divides by the longest device-local span
    (the zero-bubble papers' rate); `bubble_over_ideal` = idle / work (Megatron-LM). Work counts recomputation.
    `comm_total_s` charges every dependency between devices a hop, as the artifact does; `comm_data_s` only those
    that carry a tensor.
    """
    second = timeline.units_per_second
    lanes = _device_times(graph, timeline, costs)
    # An empty stage may wait for a last gradient that nobody uses: only actions that take time end a run.
    makespan = max(lane.last_end for lane in lanes)
    work = sum(lane.busy for lane in lanes)
    span = max((lane.last_end - lane.first_start for lane in lanes), default=0.0)
    idle = _split_idle(lanes, makespan, switch_after_last_forward)
    capacity = len(lanes) * makespan
    exposed = float(np.sum(np.asarray(timeline.exposed, float)))
    num_records = np.array([costs.together(members).num_records for members in graph.slots])
    return {
        "makespan_s": makespan / second,
        "step_time_s": step_time(graph, timeline) / second,
        "bubble_makespan": 1 - work / capacity,
        "bubble_span": 1 - work / (len(lanes) * span),
        "bubble_over_ideal": (capacity - work) / work,
        "span_s": span / second,
        "bubble_steady": steady_bubble(graph, timeline),
        "bubble_between_ends": bubble_between_ends(graph, timeline),
        "busy_s": [lane.busy / second for lane in lanes],
        "idle_s": (capacity - work) / second,
        "fill_s": idle.fill / second,
        "switch_s": idle.switch / second,
        "drain_s": idle.drain / second,
        "intra_s": idle.intra / second,
        "comm_total_s": float(timeline.comm_total) / second,
        "comm_data_s": _hops_with_data(graph, costs) / second,
        "comm_exposed_s": exposed / second,
        "peak_in_flight": peak_in_flight(graph),
        "num_actions": graph.num_actions,
        "num_layer_events": int(num_records[graph.slot].sum()),
    }


def _hops_with_data(graph: Graph, costs: CostTable) -> float:
    """Time of all hops that carry a tensor."""
    carrying = graph.crosses & graph.moves
    return float(hop_times(graph, costs)[carrying].sum()) if costs.each else int(carrying.sum()) * float(costs.hop)


# --- the artifact's split of idle time -----------------------------------------------------------------------


@dataclass(frozen=True)
class _DeviceTimes:
    """What one device's compute lane did; only actions that take time count."""

    start: Floats
    end: Floats
    forward_end: Floats  # of every forward, ascending
    first_gradient: float | None  # start of the first layer's backward
    last_gradient: float | None  # end of the last backward
    busy: float

    @property
    def first_start(self) -> float:
        return float(self.start[0]) if len(self.start) else 0.0

    @property
    def last_end(self) -> float:
        return float(self.end[-1]) if len(self.end) else 0.0


def _device_times(graph: Graph, timeline: Timeline, costs: CostTable) -> list[_DeviceTimes]:
    start = np.asarray(timeline.start, float)
    main = np.asarray(timeline.main, float)
    end = np.asarray(timeline.end, float)
    slot, works = works_by_slot(graph, costs)
    offset = np.array([float(work.first_gradient) for work in works])[slot[graph.rank]]
    kind = graph.columns.kind
    is_forward, is_backward = among(kind, _FORWARD), among(kind, _BACKWARD)
    lanes = []
    for _, first, last in compute_lanes(graph):
        chosen = np.arange(first, last)[end[first:last] > start[first:last]]
        forward = chosen[is_forward[chosen]]
        backward = chosen[is_backward[chosen]]
        forward_end = np.where(kind[forward] == Kind.FB, main[forward], end[forward])
        lanes.append(
            _DeviceTimes(
                start[chosen],
                end[chosen],
                np.sort(forward_end),
                float(start[backward[0]] + offset[backward[0]]) if len(backward) else None,
                float(end[backward].max()) if len(backward) else None,
                float((end[chosen] - start[chosen]).sum()),
            )
        )
    return lanes


def _split_idle(lanes: list[_DeviceTimes], makespan: float, after_last_forward: bool) -> Idle:
    idle = len(lanes) * makespan - sum(lane.busy for lane in lanes)
    fill = sum(lane.first_start for lane in lanes if len(lane.start))
    drain = sum(makespan - lane.last_gradient for lane in lanes if lane.last_gradient is not None)
    switch = sum(
        _switch(lane, None if after_last_forward else len(lanes) - device) for device, lane in enumerate(lanes)
    )
    return Idle(fill, switch, drain, max(0.0, idle - fill - switch - drain))


def _switch(lane: _DeviceTimes, warmup: int | None) -> float:
    """Idle time between the last forward of the warmup and the first backward.

    `warmup` is the number of forwards the artifact takes for it; None takes all that end before the backward.
    """
    until = lane.first_gradient
    if until is None:
        return 0.0
    ended = lane.forward_end[lane.forward_end <= until]
    if not len(ended):
        return 0.0
    since = float(ended[-1] if warmup is None else ended[min(warmup, len(ended)) - 1])
    inside = (lane.end > since) & (lane.start < until)
    busy = (np.minimum(lane.end[inside], until) - np.maximum(lane.start[inside], since)).sum()
    return max(0.0, float(until - since - busy))
