"""Metrics: the numbers of a timeline, with units in their names; among them pace and bubble of the steady phase.

The steady phase is that of a step among many that run back to back. Its window lies in the middle of a run, without at
least the first and the last sixth. If stages rotate over the devices, steps in which a device has much work alternate
with steps in which it has little. The window is then cut to whole rotations, after which every stage is on the same
devices again:

    step       0   1   2   3   4   5   6   7   8   9  10  11        12 steps, a rotation every 4
    window                   |---------------|                      from the end of step 4 to that of step 8

The window of a run stays uncut if no whole rotation fits into it.

If steps overlap, the last step has all devices to itself, and ends sooner after the one before it than any other. The
window of such steps leaves the last end out, and begins earlier if it would hold fewer than three steps.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rpbench.cost.table import CostTable
from rpbench.ir.action import BACKWARD, COMPUTE, Kind
from rpbench.ir.policy import Policy
from rpbench.ir.schedule import Shape
from rpbench.ir.timeline import Timeline
from rpbench.sim.columns import Columns, among
from rpbench.sim.graph import Graph
from rpbench.sim.longest_path import hop_times, works_by_slot
from rpbench.sim.memory import compute_lanes, peak_in_flight

Floats = npt.NDArray[np.float64]
Steps = npt.NDArray[np.int64]

_FORWARD = (Kind.F, Kind.FB, Kind.OVERLAP)
_BACKWARD = (Kind.B, Kind.FB, Kind.I, Kind.OVERLAP)


def measure(graph: Graph, timeline: Timeline, costs: CostTable, *, switch_after_last_forward: bool) -> dict[str, Any]:
    """Every metric of one simulated run, in seconds.

    `bubble_makespan` = 1 - work / (devices x makespan); `bubble_span` divides by the longest device-local span
    (the zero-bubble papers' rate); `bubble_over_ideal` = idle / work (Megatron-LM). Work counts recomputation.
    `comm_total_s` charges every dependency between devices a hop, as the artifact does; `comm_data_s` only those
    that carry a tensor.
    """
    second = timeline.units_per_second
    lanes = _device_times(graph, timeline, costs)
    # An empty stage may wait for a last gradient that has no use: only actions that take time end a run.
    makespan = max(lane.last_end for lane in lanes)
    work = sum(lane.busy for lane in lanes)
    span = max((lane.last_end - lane.first_start for lane in lanes), default=0.0)
    capacity = len(lanes) * makespan
    fill, switch, drain = _split_idle(lanes, makespan, switch_after_last_forward)
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
        "fill_s": fill / second,
        "switch_s": switch / second,
        "drain_s": drain / second,
        "intra_s": max(0.0, capacity - work - fill - switch - drain) / second,
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
    """Times of one device's compute lane; only actions that take time count."""

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


def _split_idle(lanes: list[_DeviceTimes], makespan: float, after_last_forward: bool) -> tuple[float, float, float]:
    """Fill, switch and drain of the idle device-time, as in the RoundPipe artifact; the rest is intra.

    The four sum to the whole if the last work of every device is a backward. Drain counts all time after the last
    backward, so later weight gradients and steps make the sum larger.
    """
    fill = sum(lane.first_start for lane in lanes if len(lane.start))
    drain = sum(makespan - lane.last_gradient for lane in lanes if lane.last_gradient is not None)
    switch = sum(
        _switch(lane, None if after_last_forward else len(lanes) - device) for device, lane in enumerate(lanes)
    )
    return fill, switch, drain


def _switch(lane: _DeviceTimes, warmup: int | None) -> float:
    """Idle time between the last forward of the warmup and the first backward.

    `warmup` is the artifact's number of forwards in it; None takes all forwards that end before the backward.
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


# --- the steady phase ---


def step_ends(graph: Graph, timeline: Timeline) -> Floats:
    """End of the last backward of every step."""
    columns, shape = graph.columns, graph.schedule.shape
    backward = among(columns.kind, (*BACKWARD, Kind.W, Kind.OVERLAP))
    ends = np.zeros(shape.num_steps)
    step = columns.index[backward] // shape.num_microbatches
    np.maximum.at(ends, step, np.asarray(timeline.end, float)[backward])
    return ends


def step_time(graph: Graph, timeline: Timeline) -> float:
    """Time per step: the mean distance between step ends in the window.

    For one or two steps, and if both ends of the window are at one time, it is the run divided by the steps. Updates
    after the last backward are a part of the run.
    """
    ends = step_ends(graph, timeline)
    if interval := _interval(ends, *_window(graph, *_paced(graph))) if len(ends) >= 3 else 0.0:
        return interval
    updates = [
        float(timeline.end[number])
        for _, first, stop in compute_lanes(graph)
        for number in first + np.flatnonzero(graph.columns.kind[first:stop] == Kind.STEP)
    ]
    return max([float(ends.max(initial=0)), *updates]) / len(ends)


def steady_bubble(graph: Graph, timeline: Timeline) -> float | None:
    """Idle fraction of the devices in the middle of a run; None for fewer than three steps, or if they end together.

    Every device is watched from the end of its last work for the step before the window to the end of its last work for
    the last step in the window. The gaps between the actions of its lane are idle, so no bubble is below 0.
    """
    num_steps = graph.schedule.shape.num_steps
    if num_steps < 3:
        return None
    first, last = _window(graph, *_middle(num_steps))
    last = last if last < num_steps - 1 else max(first + 1, num_steps - 2)  # a pipeline drains after the last step
    watched = list(_watched(graph, timeline, first, last))
    time, idle = (sum(column) for column in zip(*watched, strict=True))
    if not time:
        return None
    without_work = (len(compute_lanes(graph)) - len(watched)) / len(watched)
    return (idle + without_work * time) / (time + without_work * time)


def bubble_between_ends(graph: Graph, timeline: Timeline) -> float | None:
    """The bubble of the uncut window between two step ends on any devices, as a table of calls back to back defines it.

    Of 60 calls it takes the ends of calls 20 and 50 (`analysis/published/async_bubble.csv`). If stages rotate, it is up
    to 0.14 points off the bubble of whole rotations, and below 0 for some runs of few steps. None for fewer than three
    steps, and if the two steps end together.
    """
    if graph.schedule.shape.num_steps < 3:
        return None
    ends = step_ends(graph, timeline)
    interval = _interval(ends, *_middle(len(ends)))
    if not interval:
        return None
    lanes = compute_lanes(graph)
    start, end = (np.asarray(times, float) for times in (timeline.start, timeline.end))
    work = sum(float((end[first:stop] - start[first:stop]).sum()) for _, first, stop in lanes)
    return 1 - work / len(lanes) / len(ends) / interval


def rotation_of(columns: Columns, shape: Shape) -> int:
    """Steps after which every device has the same work again; all steps of a run if no two are alike.

    1 where stages stay. RoundPipe of S jobs a step on p devices: p / gcd(S, p).
    """
    counts = _work_by_step(columns, shape)
    repeats = (steps for steps in range(1, len(counts)) if (counts[steps:] == counts[:-steps]).all())
    return next(repeats, len(counts))


def _middle(num_steps: int) -> tuple[int, int]:
    return num_steps // 3, 5 * num_steps // 6


def _paced(graph: Graph) -> tuple[int, int]:
    """The two steps between whose ends the pace is measured."""
    num_steps = graph.schedule.shape.num_steps
    first, last = _middle(num_steps)
    if graph.schedule.policy is Policy.FLUSH:
        return first, last
    last = min(last, num_steps - 2)
    return min(first, max(num_steps // 6, last - 3)), last


def _window(graph: Graph, first: int, last: int) -> tuple[int, int]:
    """The steps whose ends bound the window."""
    if last - first <= 2:  # no rotation fits, or it leaves the window as it is
        return first, last
    rotation = rotation_of(graph.columns, graph.schedule.shape)
    whole = (last - first) // rotation * rotation
    return first, first + whole if whole else last


def _interval(ends: Floats, first: int, last: int) -> float:
    return float(ends[last] - ends[first]) / (last - first)


def _watched(graph: Graph, timeline: Timeline, first: int, last: int) -> Iterator[tuple[float, float]]:
    """Time and idle time of every working device, from the end of its work up to step `first` to that up to `last`."""
    start, end = (np.asarray(times, float) for times in (timeline.start, timeline.end))
    steps = _steps(graph.columns, graph.schedule.shape)
    for _, begin, stop in compute_lanes(graph):
        own = steps[begin:stop]
        before, until = (begin + np.flatnonzero((own >= 0) & (own <= step)) for step in (first, last))
        if not len(until):
            continue
        since, stop = int(before[-1]) + 1 if len(before) else begin, int(until[-1]) + 1
        freed = np.concatenate(([end[since - 1] if len(before) else 0.0], end[since:stop]))
        yield float(freed[-1] - freed[0]), float((start[since:stop] - freed[:-1]).sum())


def _steps(columns: Columns, shape: Shape) -> Steps:
    """The step that each action computes for (of an OVERLAP, the earliest of its parts'); -1 for other actions."""
    computes = among(columns.kind, COMPUTE)
    found = np.where(computes, columns.index // shape.num_microbatches, -1).astype(np.int64)
    for number, parts in columns.sub.items():
        found[number] = min((part.microbatch or 0) // shape.num_microbatches for part in parts)
    return found


def _work_by_step(columns: Columns, shape: Shape) -> npt.NDArray[np.int64]:
    """How often each step has each triple of device, stage and direction: (steps, triples)."""
    plain = among(columns.kind, COMPUTE - {Kind.OVERLAP})
    device, stage, kind, index = (
        column[plain].astype(np.int64) for column in (columns.device, columns.stage, columns.kind, columns.index)
    )
    inside = [
        (part.microbatch // shape.num_microbatches, columns.device[number], part.stage, part.kind is not Kind.F)
        for number, parts in columns.sub.items()
        for part in parts
        if part.microbatch is not None
    ]
    of_overlaps = np.array(inside, np.int64).reshape(-1, 4).T
    own = (index // shape.num_microbatches, device, stage, kind != Kind.F)
    steps, devices, stages, goes_back = (np.concatenate(both) for both in zip(own, of_overlaps, strict=True))
    most = max(shape.num_stages, shape.num_backward_stages)
    pairs, places = np.unique((devices * most + stages) * 2 + goes_back, return_inverse=True)
    return np.bincount(steps * len(pairs) + places, minlength=shape.num_steps * len(pairs)).reshape(-1, len(pairs))
