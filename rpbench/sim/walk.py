"""Walk: the times of one small schedule with the standard library alone, for a browser, which has no numpy.

The loop is the simulator's (`rpbench.sim.kernels.relax`), on lists, with the edges of the checks.
"""

from typing import NamedTuple

from rpbench.cost.table import CostTable, Number
from rpbench.ir.action import Kind
from rpbench.ir.analysis import Analysis, peak_resident
from rpbench.ir.checks.deadlock import in_rounds
from rpbench.ir.index import Index
from rpbench.ir.schedule import Weights
from rpbench.ir.timeline import Timeline
from rpbench.ir.waits.edges import edges_of, key
from rpbench.sim.kernels import relax

_BACKWARD = (Kind.B, Kind.I)
_HOLDS = frozenset({Kind.F, Kind.B, Kind.FB, Kind.I})  # a streamed activation is on a device while one of these runs


class _Edge(NamedTuple):
    producer: int
    delay: Number
    late: bool  # holds back only the main phase of its action


def walk(analysis: Analysis, costs: CostTable) -> Timeline:
    """When each action runs; the times are those of `rpbench.sim.longest_path.simulate`.

    The costs have no times of transfers or of optimizer steps, as constant ones. ScheduleError if no lane can move, or
    they lack an action.
    """
    index = analysis.index
    order = in_rounds(analysis.rounds)
    position = {number: place for place, number in enumerate(order)}
    first = {lane.start for lane in index.lanes}
    received = _right_behind_their_gradient(index, first)
    incoming = _edges(analysis, costs, received)
    edges = [edge for number in order for edge in incoming[number]]
    starts = [0]
    for number in order:
        starts.append(starts[-1] + len(incoming[number]))
    before = [number - 1 - (number in received) for number in order]
    costs, parts = costs.of_order(index.shape), index.shape.num_parts
    works = [costs.of_action(index.actions[number], index.device(number), parts) for number in order]
    times: list[list[Number]] = [[0] * len(order) for _ in range(4)]
    relax(
        [-1 if other + 1 in first else position[other] for other in before],
        starts,
        [position[edge.producer] for edge in edges],
        [edge.delay for edge in edges],
        [edge.late for edge in edges],
        range(len(order)),
        [work.pre for work in works],
        [work.main for work in works],
        *times,
    )
    start, main, end, exposed = ([column[position[number]] for number in range(len(order))] for column in times)
    hops = sum(edge.delay for edge in edges)
    return Timeline(analysis.schedule, start, main, end, exposed, hops, costs.units_per_second)


def _right_behind_their_gradient(index: Index, first: set[int]) -> set[int]:
    """The backwards with the RECV of their gradient right before them in their lane, whose recomputation may begin."""
    return {
        number
        for number, action in enumerate(index.actions)
        if action.kind in _BACKWARD
        and number not in first
        and key(index.actions[number - 1]) == key(action._replace(kind=Kind.RECV_B))
    }


def _edges(analysis: Analysis, costs: CostTable, received: set[int]) -> list[list[_Edge]]:
    """For each action its edges, without those that the order of its own lane implies."""
    index = analysis.index
    found: list[list[_Edge]] = [[] for _ in index.actions]
    for edges in edges_of(index):
        of_gradient = edges.moved == "gradient" or index.shape.separate_cuts
        for producer, number in zip(edges.producers, edges.consumers, strict=True):
            behind = number in received and producer == number - 1
            if number >= 0 <= producer and (behind or index.lane_of[producer] != index.lane_of[number]):
                kind = index.actions[number].kind
                late = (costs.recompute_ahead and kind in _BACKWARD and of_gradient) or (
                    costs.fused_ahead and kind is Kind.FB
                )
                crosses = index.device(producer) != index.device(number)
                delay = costs.hop_between(index.actions[producer], index.actions[number]) if crosses else 0
                found[number].append(_Edge(producer, delay, late))
    for producer, number in analysis.transfer_edges:
        if index.lane_of[producer] != index.lane_of[number]:
            found[number].append(_Edge(producer, 0, False))
    return found


def makespan(timeline: Timeline) -> Number:
    """The end of the last action of a compute lane that takes time."""
    return max(span.end for span in timeline.spans() if span.lane == "compute" and span.end > span.start)


def bubble(timeline: Timeline) -> Number:
    """Idle fraction of the devices until the makespan: `bubble_makespan` of a record."""
    ranks = timeline.schedule.shape.num_ranks
    work = sum(timeline.busy(device) for device in range(ranks))
    return 1 - work / (ranks * makespan(timeline))


def held(analysis: Analysis) -> list[int]:
    """The most stage activations that each device holds at once: `peak_in_flight` of a record."""
    schedule = analysis.schedule
    if schedule.weights is Weights.STREAMED:
        rows = map(schedule.compute, range(schedule.shape.num_ranks))
        return [int(any(action.kind in _HOLDS for action in row)) for row in rows]
    return peak_resident(analysis)
