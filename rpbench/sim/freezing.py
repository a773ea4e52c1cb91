"""Freezing: the fraction of its weight gradients each backward may leave out so that the batch ends first.

A backward takes from d_min, its input gradient alone, to d_max, all of it; its freeze ratio is
r = (d_max - d) / (d_max - d_min). A linear program over the schedule's graph finds the ratios:

    minimise P_end     start_b >= start_a + d_a (+ hop) on every edge and in every lane,
                       P_end >= every end of a computation,
                       mean of r over the backwards of a stage <= max_ratio

Among ratios that end equally early it takes those that leave out least. If transfers share links, the program counts
each transfer as if it had its link alone; the timeline shares them, and ratios that end later than no freezing are
dropped. At ratio 1, W takes no time and B takes as long as I. A ratio between 0 and 1 leaves out some of the stage's
parameters; this module does not choose which.

Source: "TimelyFreeze" (arXiv 2602.05754), its abstract; the program is derived from it. Needs the extra `exact`
(OR-tools).
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rpbench.cost.table import CostTable, Work
from rpbench.ir.action import Kind
from rpbench.ir.schedule import ScheduleError
from rpbench.ir.timeline import Timeline
from rpbench.sim.graph import Graph
from rpbench.sim.longest_path import late_edges, simulate_graph, works_by_slot
from rpbench.sim.memory import compute_lanes
from rpbench.sim.shared_links import shares_links, simulate_charged

LARGEST = 20_000  # actions: one variable each, and one for each edge
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Frozen:
    """A schedule whose backwards leave out a part of their weight gradients."""

    ratios: tuple[float, ...]  # of every B or W, by stage, microbatch and part, in this order
    ratio_of_stage: tuple[float, ...]  # their mean, by stage
    fraction: float  # of the time of all weight gradients, the part left out
    less: tuple[float, ...]  # by topological position, how much shorter an action is, in the costs' unit
    timeline: Timeline  # of the shortened backwards
    plain: Timeline  # the timeline without freezing
    proven: bool  # whether no ratios end sooner; False if transfers share links


def freeze(graph: Graph, costs: CostTable, max_ratio: float) -> Frozen:
    """The ratios with which a schedule ends first, and its timeline then; a stage's mean is at most `max_ratio`.

    ScheduleError for a schedule whose backwards run together with forwards, one that is too large, or costs that do not
    split backward; ImportError without OR-tools.
    """
    check_freezable(graph, costs)
    slot, found = works_by_slot(graph, costs)
    works = [found[number] for number in slot.tolist()]
    savings = _savings(graph, costs, works)
    ratios = _Program(graph, costs, works, savings).ratios(max_ratio)
    plain = simulate_charged(graph, costs)
    timeline = simulate_charged(graph, costs, _less(graph, savings, ratios))
    if timeline.last_compute > plain.last_compute:
        ratios, timeline = dict.fromkeys(ratios, 0.0), plain
    less = _less(graph, savings, ratios)
    actions = graph.analysis.index.actions
    by_stage: dict[int, list[float]] = defaultdict(list)
    order = graph.order.tolist()
    placed = sorted((actions[order[place]][1:4], place) for place in savings)
    for (stage, _, _), place in placed:
        by_stage[stage].append(ratios[place])
    whole = sum(savings.values())
    return Frozen(
        tuple(ratios[place] for _, place in placed),
        tuple(sum(own) / len(own) for _, own in sorted(by_stage.items())),
        sum(less) / whole if whole else 0.0,
        tuple(less),
        timeline,
        plain,
        not shares_links(graph, costs),
    )


def _less(graph: Graph, savings: dict[int, float], ratios: dict[int, float]) -> list[float]:
    return [savings.get(place, 0.0) * ratios.get(place, 0.0) for place in range(graph.num_actions)]


def check_freezable(graph: Graph, costs: CostTable) -> None:
    """Refuse a schedule whose backwards run together with forwards, one that is too large, and costs without halves."""
    schedule = graph.schedule
    for kind in (Kind.FB, Kind.OVERLAP):
        if kind in schedule.kinds:
            raise ScheduleError(
                f"schedule {schedule.name} has {kind.name}, whose backward runs together with a forward: what it takes "
                "without weight gradients is not known; take a schedule of B, or of I and W, such as 1f1b or zb_h1"
            )
    if graph.num_actions > LARGEST:
        raise ScheduleError(
            f"{graph.num_actions} actions: a linear program of freezing takes at most {LARGEST}; take fewer "
            "microbatches"
        )
    costs.of(Kind.W, 0)  # raises if costs do not split backward


def _savings(graph: Graph, costs: CostTable, works: Sequence[Work]) -> dict[int, float]:
    """By topological position of each B or W, the time it saves without weight gradients."""
    actions, order, num_parts = graph.analysis.index.actions, graph.order.tolist(), graph.schedule.shape.num_parts
    found = {}
    for place, number in enumerate(order):
        action = actions[number]
        if action.kind in (Kind.B, Kind.W):
            device = int(graph.columns.device[number])
            weights = costs.on(device, Work(costs.of(Kind.W, action.stage).main), num_parts).main
            found[place] = float(min(weights, works[place].main))
    return found


class _Program:
    """The linear program; times are fractions of the makespan without freezing."""

    def __init__(self, graph: Graph, costs: CostTable, works: Sequence[Work], savings: dict[int, float]) -> None:
        from ortools.linear_solver import pywraplp

        self.graph, self.works, self.savings = graph, works, savings
        self.unit = float(max(simulate_graph(graph, costs).end)) or 1.0
        self.solver = pywraplp.Solver.CreateSolver("GLOP")
        self.main = [self.solver.NumVar(0, self.solver.infinity(), "") for _ in works]
        self.ratio = {place: self.solver.NumVar(0, 1, "") for place in savings}
        self.end = [self._end(place) for place in range(len(works))]
        self.last = self.solver.NumVar(0, self.solver.infinity(), "last")
        self._wait(costs)
        for first, stop in ((first, stop) for _, first, stop in compute_lanes(graph)):
            if stop > first:  # the last action of a row ends last
                self.solver.Add(self.last >= self.end[int(graph.rank[stop - 1])])

    def ratios(self, max_ratio: float) -> dict[int, float]:
        """The ratio of each B or W, by topological position."""
        actions, order = self.graph.analysis.index.actions, self.graph.order.tolist()
        of_stage: dict[int, list[Any]] = defaultdict(list)
        for place, ratio in self.ratio.items():
            of_stage[actions[order[place]].stage].append(ratio)
        for own in of_stage.values():
            self.solver.Add(self.solver.Sum(own) <= max_ratio * len(own))
        self._minimise(self.last)
        self.solver.Add(self.last <= self.last.solution_value() * (1 + _ROUNDING))
        self._minimise(self.solver.Sum(list(self.ratio.values())))
        return {place: min(1.0, max(0.0, round(own.solution_value(), 9))) for place, own in self.ratio.items()}

    def _minimise(self, what: Any) -> None:
        self.solver.Minimize(what)
        status = self.solver.Solve()
        assert status == self.solver.OPTIMAL, f"a program that always has a solution ended with status {status}"

    def _end(self, place: int) -> Any:
        end = self.main[place] + float(self.works[place].main) / self.unit
        return end - self.savings[place] / self.unit * self.ratio[place] if place in self.savings else end

    def _wait(self, costs: CostTable) -> None:
        """Every action waits for the one before it in its lane, and for its inputs."""
        graph, late = self.graph, late_edges(self.graph, costs).tolist()
        first, pred, crosses = graph.pred_start.tolist(), graph.pred.tolist(), graph.crosses.tolist()
        for place, before in enumerate(graph.previous.tolist()):
            pre = float(self.works[place].pre) / self.unit
            self.solver.Add(self.main[place] >= pre)
            if before >= 0:
                self.solver.Add(self.main[place] >= self.end[before] + pre)
            for edge in range(first[place], first[place + 1]):
                delay = float(costs.hop) / self.unit * crosses[edge]
                self.solver.Add(self.main[place] >= self.end[pred[edge]] + delay + (0 if late[edge] else pre))
