"""Times of a schedule whose lanes have a fixed order: one pass over the action graph."""

from collections.abc import Sequence
from fractions import Fraction
from itertools import repeat
from typing import Any

import numpy as np
import numpy.typing as npt

from rpbench.cost.table import CostTable, Members, Number, Work
from rpbench.ir.action import STEPPING, Action, Kind
from rpbench.ir.moved_objects import Payload
from rpbench.ir.policy import LateRest
from rpbench.ir.schedule import Schedule
from rpbench.ir.timeline import Timeline
from rpbench.sim.columns import Bools, Ints, among
from rpbench.sim.graph import COMPILE_FROM, Graph, build_graph
from rpbench.sim.kernels import compiled, relax

Floats = npt.NDArray[np.float64]


def simulate(schedule: Schedule, costs: CostTable) -> Timeline:
    """When each action runs, if it starts as soon as its lane and its inputs allow."""
    return simulate_graph(build_graph(schedule), costs)


def simulate_graph(graph: Graph, costs: CostTable, less: Sequence[Number] = (), *, compiles: bool = False) -> Timeline:
    """Time a graph that is already built, in floats or Fractions; ScheduleError if the costs lack an action.

    Args:
        less: by topological position, how much shorter an action is than the costs say; empty: not at all.
        compiles: whether to use the compiled loop for a small graph too; times are then floats.
    """
    slot, works = shortened(*works_by_slot(graph, costs), less)
    pre_of, main_of = [work.pre for work in works], [work.main for work in works]
    exact = any(not isinstance(time, (int, float)) for time in (*pre_of, *main_of, costs.hop))
    late = late_edges(graph, costs)

    columns: list[Any]
    if (compiles or graph.num_actions >= COMPILE_FROM) and not exact:
        times = [np.empty(graph.num_actions) for _ in range(4)]
        compiled(relax)(
            graph.previous,
            graph.pred_start,
            graph.pred,
            hop_times(graph, costs),
            late,
            slot,
            np.asarray(pre_of, float),
            np.asarray(main_of, float),
            *times,
        )
        columns = [time[graph.rank] for time in times]
    else:
        lists: list[list[Number]] = [[0] * graph.num_actions for _ in range(4)]
        relax(
            graph.previous.tolist(),
            graph.pred_start.tolist(),
            graph.pred.tolist(),
            _hops(graph, costs),
            late.tolist(),
            slot.tolist(),
            pre_of,
            main_of,
            *lists,
        )
        rank = graph.rank.tolist()
        columns = [[times[i] for i in rank] for times in lists]
    start, main, end, exposed = columns
    return Timeline(graph.schedule, start, main, end, exposed, all_hops(graph, costs), costs.units_per_second)


def hop_times(graph: Graph, costs: CostTable) -> Floats:
    """By edge, the time of its hop; 0 for an edge within a device."""
    return np.array(_hops(graph, costs), float) if costs.each else np.where(graph.crosses, float(costs.hop), 0.0)


def _hops(graph: Graph, costs: CostTable) -> list[Number]:
    """The times of `hop_times`, exact if the costs are."""
    if not costs.each:
        return [costs.hop if crosses else 0 for crosses in graph.crosses.tolist()]
    of = microbatches_of(graph)
    own = np.repeat(of, np.diff(graph.pred_start))
    own = np.where(own < 0, of[graph.pred], own)  # as in `CostTable.hop_between`
    return [
        costs.at(None if number < 0 else number).hop if crosses else 0
        for number, crosses in zip(own.tolist(), graph.crosses.tolist(), strict=True)
    ]


def all_hops(graph: Graph, costs: CostTable) -> Number:
    """The time of all hops together."""
    return sum(_hops(graph, costs)) if costs.each else graph.num_hops * costs.hop


def microbatches_of(graph: Graph) -> Ints:
    """The microbatch of every action, by topological position; -1 for actions with none or with several."""
    columns = graph.columns
    return np.where(among(columns.kind, (*STEPPING, Kind.OVERLAP)), -1, columns.index)[graph.order]


def works_by_slot(graph: Graph, costs: CostTable) -> tuple[Ints, list[Work]]:
    """Every action's slot, by topological position, and each slot's work; ScheduleError if the costs lack an action."""
    costs = costs.of_order(graph.schedule.shape)
    slot, pairs = graph.slots_on_devices if costs.speeds else (graph.slot, [(i, 0) for i in range(len(graph.slots))])
    if not costs.each:
        return slot, _works_of(graph, costs, pairs)
    tables = list({id(table): table for table in (costs, *costs.each)}.values())  # one for all equal lengths
    places = {id(table): len(pairs) * place for place, table in enumerate(tables)}
    works = [work for table in tables for work in _works_of(graph, table, pairs)]
    shift = np.array([places[id(table)] for table in (*costs.each, costs)])
    of = microbatches_of(graph)
    slot = (slot + shift[np.where(of < 0, -1, of % len(costs.each))]).astype(np.int32)
    rank = graph.rank
    for number, parts in graph.columns.sub.items():  # each part of an OVERLAP has costs of its own
        slot[rank[number]] = len(works)
        together = Action(Kind.OVERLAP, parts[0].stage, sub=parts)
        works.append(costs.of_action(together, int(graph.columns.device[number]), graph.schedule.shape.num_parts))
    return slot, works


def _works_of(graph: Graph, costs: CostTable, pairs: Sequence[tuple[int, int]]) -> list[Work]:
    """The work of slots on devices."""
    schedule, slots = graph.schedule, list(zip(graph.slots, graph.payload or repeat(None), strict=False))
    moved = [None if payload is None else costs.of_payload(payload) for _, payload in slots]
    works = [own or costs.together(members) for own, (members, _) in zip(moved, slots, strict=True)]
    if (rule := schedule.late_rest) is not None:
        works = [own or _part_of(work, rule, *slot) for own, work, slot in zip(moved, works, slots, strict=True)]
    if schedule.shape.num_parts == 1 and not costs.speeds:
        return works
    return [moved[number] or costs.on(device, works[number], schedule.shape.num_parts) for number, device in pairs]


def _part_of(work: Work, rule: LateRest, members: Members, payload: Payload | None) -> Work:
    """The work, of a step only a part: a device steps its own columns, the host the fraction in its payload."""
    if members[0][0] not in (Kind.STEP, Kind.STEP_REST) or not work.main:
        return work
    part = 1 - rule.rest if payload is None else payload.share
    return Work(work.main * (part if isinstance(work.main, Fraction) else float(part)))


def shortened(slot: Ints, works: list[Work], less: Sequence[Number]) -> tuple[Ints, list[Work]]:
    """Slots and works with main phases shorter by `less`, by topological position; unchanged if it is empty."""
    if not less:
        return slot, works
    own = [works[number] for number in slot.tolist()]
    works = [work._replace(main=max(0, work.main - short)) for work, short in zip(own, less, strict=True)]
    return np.arange(len(works), dtype=np.int32), works


def works_by_action(graph: Graph, costs: CostTable) -> list[Work]:
    """The work of every action, in the order of `schedule.items()`; arguments as in `works_by_slot`."""
    slot, works = works_by_slot(graph, costs)
    return [works[number] for number in slot[graph.rank].tolist()]


def late_edges(graph: Graph, costs: CostTable) -> Bools:
    """Edges that hold back only the main phase of their action."""
    late = graph.gradient & costs.recompute_ahead
    return late | graph.to_fused if costs.fused_ahead else late
