"""Program: a schedule ready to be run, with everything that each of its actions waits for.

The edges are those the simulator times (`rpbench.sim.graph`), and more. A step needs gradients of other stages when it
clips by the norm of all, or when stages share weights. In real time, a recomputation that runs ahead of its gradient
also needs the input that some forward keeps for it.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from rpbench.cost.table import CostTable
from rpbench.ir.action import STEPPING, Action, Kind, parts_of
from rpbench.ir.analysis import Analysis
from rpbench.ir.checks.deadlock import execution_rounds
from rpbench.ir.checks.excerpt import broken
from rpbench.ir.index import GRADIENT, Index, Lane
from rpbench.ir.schedule import Row, Schedule, ScheduleError
from rpbench.sim.graph import Graph, build_graph
from rpbench.sim.longest_path import late_edges

_MEETING = (Kind.F, Kind.B, Kind.I)  # kinds in which devices with shards of a matrix add up their outputs

StepGroups = Sequence[Sequence[int]]  # backward stages whose steps need one another's gradients


class Edge(NamedTuple):
    """An action that another one waits for."""

    producer: int  # number of the action that must have ended
    crosses: bool  # it ran on another device, so what it made takes a hop
    late: bool  # only the main phase waits; a recomputation may begin before


@dataclass(frozen=True)
class Program:
    """A schedule and its edges; actions are numbered in the order of `schedule.items()`."""

    graph: Graph
    waits: list[list[Edge]]  # for each action, what it waits for besides the action before it in its lane
    # called when a run of it ends early, so that actions which wait for one another half-way come back
    stop: Callable[[], None] = lambda: None

    @property
    def schedule(self) -> Schedule:
        return self.graph.schedule

    @property
    def index(self) -> Index:
        return self.graph.analysis.index

    @property
    def actions(self) -> list[Action]:
        return self.index.actions

    @cached_property
    def meets(self) -> dict[int, tuple[int, ...]]:
        """Action -> the actions of all devices that compute shards of it, which wait for one another half-way."""
        shares: dict[tuple[Kind, int, int | None], list[int]] = {}
        for number, action in enumerate(self.actions if self.schedule.shape.tensor_parallel else ()):
            if action.kind in _MEETING:
                shares.setdefault((action.kind, action.stage, action.microbatch), []).append(number)
        return {number: tuple(found) for found in shares.values() for number in found}

    @property
    def lanes(self) -> list[Lane]:
        return self.index.lanes

    def stuck(self, heads: Mapping[int, int]) -> ScheduleError:
        """The error for lanes that wait for each other; `heads`: action at which one waits -> action it waits for."""
        notes = {number: f"waits at {self.actions[number]} for {self.actions[heads[number]]}" for number in heads}
        return broken(self.schedule, "no lane can move", list(heads), notes=notes)


def make_program(
    schedule: Schedule | Analysis,
    costs: CostTable,  # tells whether recomputation may begin before the gradient is there
    *,
    step_groups: StepGroups = (),  # backward stages whose STEPs wait for the gradients of the whole group
    # backward stage -> forward stage that keeps the input of its recomputation. The simulator takes that input, and the
    # weights, for granted where the two directions are cut apart; in real time they must be there
    recomputed_from: Mapping[int, int] | None = None,
) -> Program:
    """The program of a schedule; ScheduleError if no lane could move on."""
    graph = build_graph(schedule)
    waits = _edges(graph, late_edges(graph, costs).tolist())
    program = Program(graph, waits)
    more = [*_group_edges(graph.analysis, step_groups), *_kept_edges(program.index, recomputed_from or {})]
    for number, producer in more:
        waits[number].append(Edge(producer, False, False))
    if more or program.meets:
        _check_order(program)
    return program


def _edges(graph: Graph, late: list[bool]) -> list[list[Edge]]:
    order, start = graph.order.tolist(), graph.pred_start.tolist()
    edges = [
        Edge(order[position], crosses, is_late)
        for position, crosses, is_late in zip(graph.pred.tolist(), graph.crosses.tolist(), late, strict=True)
    ]
    waits: list[list[Edge]] = [[] for _ in order]
    for position, number in enumerate(order):
        waits[number] = edges[start[position] : start[position + 1]]
    return waits


# --- edges the simulator does not have ------------------------------------------------------------------------


def _group_edges(analysis: Analysis, groups: StepGroups) -> Iterator[tuple[int, int]]:
    """(STEP, producer) pairs: the gradients of a group's other stages, and the transfers that bring them to their STEP.

    A shared norm or weight is made anew for every version, so all STEPs of a group to a version come before any to the
    next.
    """
    index, brought = analysis.index, defaultdict[int, list[int]](list)
    for producer, consumer in analysis.transfer_edges if groups else ():
        brought[consumer].append(producer)
    for group in groups:
        for (stage, version), step in index.steps.items():
            for other in group if stage in group else ():
                if other != stage:
                    before = [index.steps[other, version - 1]] if version > 1 else []
                    needed = [*index.gradients(other, version), *brought[index.steps[other, version]], *before]
                    yield from _new(index, step, needed)


def _kept_edges(index: Index, recomputed_from: Mapping[int, int]) -> Iterator[tuple[int, int]]:
    """(backward that recomputes, forward that keeps its input) pairs."""
    for number, action in enumerate(index.actions):
        for part in parts_of(action):
            if part.kind in (Kind.B, Kind.I) and part.stage in recomputed_from:
                forward = part._replace(kind=Kind.F, stage=recomputed_from[part.stage])
                yield from _new(index, number, [index.find(forward)])


def _new(index: Index, number: int, producers: Iterable[int]) -> Iterator[tuple[int, int]]:
    """The producers that are not earlier in the action's own lane."""
    earlier = range(index.lanes[index.lane_of[number]].start, number)
    return ((number, producer) for producer in producers if producer not in earlier)


def _check_order(program: Program) -> None:
    """Raise unless every action can run. Actions that meet run when their lanes have all reached them."""
    starts = {lane.start for lane in program.lanes}
    needed = [
        [edge.producer for edge in edges] + ([] if number in starts else [number - 1])
        for number, edges in enumerate(program.waits)
    ]
    producers = [
        tuple(producer for share in program.meets.get(number, (number,)) for producer in needed[share])
        for number in range(len(needed))
    ]
    execution_rounds(program.index, producers)


def gather_steps(schedule: Schedule) -> Schedule:
    """The schedule with every step of a compute lane moved behind the lane's last gradient for it.

    A step that needs other stages' gradients must not stand before the work that makes them: with several stages
    on a device, the step of the stage that ends first would hold up the others.
    """
    rows = [
        {lane: _gathered(row, schedule.shape.num_microbatches) if lane == "compute" else row for lane, row in lanes}
        for lanes in schedule.rows
    ]
    return replace(schedule, rows=tuple(rows))


def _gathered(row: Row, window: int) -> Row:
    last = {
        part.microbatch // window + 1: place
        for place, action in enumerate(row)
        for part in parts_of(action)
        if part.kind in GRADIENT and part.microbatch is not None
    }
    steps: dict[int, list[Action]] = {}
    for action in row:
        if action.kind in STEPPING:
            steps.setdefault(last[action.version or 0], []).append(action)
    return tuple(
        moved
        for place, action in enumerate(row)
        if action.kind not in STEPPING
        for moved in (action, *steps.get(place, ()))
    )
