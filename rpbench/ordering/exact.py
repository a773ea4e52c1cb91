"""The best order of F, I and W within a memory limit, by constraint programming: small cases only.

It says how far a heuristic is from the optimum (`schedule=zb_auto`). One stage on each of p devices; microbatches are
alike, so each stage may take them in order. The objective is the heuristic's: the longest time from a device's first
start to its last end, where first forwards start as early as they can.

Source: the integer program of Qi et al., "Zero Bubble Pipeline Parallelism", ICLR'24, section 3.1, with intervals in
place of its order variables. Needs the extra `exact` (OR-tools).
"""

from dataclasses import dataclass
from typing import Any

from rpbench.ir.action import Action, Kind
from rpbench.ir.costs import StageCosts
from rpbench.ir.schedule import Schedule, Shape, looped_placement

# Times and sizes become whole numbers: so many to a unit.
STEPS = 1000


@dataclass(frozen=True)
class Optimum:
    """The best order found.

    Args:
        schedule: that order.
        span: its longest device-local span, in the unit of the costs.
        bound: no order has a shorter one; equal to `span` if the search was finished.
    """

    schedule: Schedule
    span: float
    bound: float

    @property
    def proven(self) -> bool:
        return self.bound >= self.span


def best_order(
    num_microbatches: int, costs: StageCosts, limit: float, *, time_limit_s: float = 60, num_workers: int = 1
) -> Optimum:
    """The order with the shortest longest span, as far as it is found in time.

    Args:
        costs: of every stage; rounded to thousandths of their unit.
        limit: activations a device may hold, in the unit of `costs.activations`.

    Raises:
        ValueError: if no order keeps to the limit, or none is found in time.
        ImportError: without OR-tools.
    """
    from ortools.sat.python import cp_model

    if limit < max(costs.activations):
        raise ValueError(f"limit={limit}: one microbatch leaves {max(costs.activations)}; allow that much or more")
    model = cp_model.CpModel()
    starts = _variables(model, num_microbatches, costs)
    _order_microbatches(model, starts, num_microbatches, costs)
    _bound_memory(model, starts, num_microbatches, costs, limit)
    span = _longest_span(model, starts, num_microbatches, costs)
    model.minimize(span)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = time_limit_s
    solver.parameters.num_workers = num_workers
    if solver.solve(model) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        raise ValueError(f"no order was found in {time_limit_s} s; allow more time, or take a smaller case")
    rows: list[list[tuple[int, Action]]] = [[] for _ in range(costs.num_stages)]
    for (kind, stage, microbatch), start in starts.items():
        rows[stage].append((solver.value(start), Action(kind, stage, microbatch)))
    shape = Shape(costs.num_stages, costs.num_stages, num_microbatches)
    ordered = tuple(tuple(action for _, action in sorted(row, key=_by_time)) for row in rows)
    schedule = Schedule(shape, ordered, name="exact", placement=looped_placement(shape))
    return Optimum(schedule, solver.value(span) / STEPS, solver.best_objective_bound / STEPS)


Starts = dict[tuple[Kind, int, int], Any]  # kind, stage, microbatch -> the variable of its start


def _by_time(placed: tuple[int, Action]) -> tuple[int, int]:
    """Start; what takes no time comes after what it waits for."""
    return placed[0], (Kind.F, Kind.I, Kind.W).index(placed[1].kind)


def _time(costs: StageCosts, kind: Kind, stage: int) -> int:
    table = {Kind.F: costs.forward, Kind.I: costs.input_grad, Kind.W: costs.weight_grad}[kind]
    return round(table[stage] * STEPS)


def _variables(model: Any, num_microbatches: int, costs: StageCosts) -> Starts:
    """Starts of all actions; a device runs one at a time."""
    kinds, stages = (Kind.F, Kind.I, Kind.W), range(costs.num_stages)
    round_trip = sum(_time(costs, kind, stage) for kind in kinds for stage in stages)
    round_trip += 2 * costs.num_stages * round(costs.hop * STEPS)
    horizon = num_microbatches * round_trip  # one microbatch after another
    starts: Starts = {}
    for stage in stages:
        intervals = []
        for kind in kinds:
            for microbatch in range(num_microbatches):
                name = f"{stage}{kind.name}{microbatch}"
                start = starts[kind, stage, microbatch] = model.new_int_var(0, horizon, name)
                intervals.append(model.new_fixed_size_interval_var(start, _time(costs, kind, stage), name))
        model.add_no_overlap(intervals)
    return starts


def _order_microbatches(model: Any, starts: Starts, num_microbatches: int, costs: StageCosts) -> None:
    """Inputs before what needs them, microbatches in order, first forwards as early as can be."""
    hop, last, begin = round(costs.hop * STEPS), costs.num_stages - 1, 0
    for stage in range(costs.num_stages):
        model.add(starts[Kind.F, stage, 0] == begin)
        begin += _time(costs, Kind.F, stage) + hop
    for (kind, stage, microbatch), start in starts.items():
        needs = [(kind, stage, microbatch - 1, 0)] if microbatch else []
        if kind is Kind.F and stage:
            needs.append((Kind.F, stage - 1, microbatch, hop))
        if kind is Kind.I:
            needs.append((Kind.F, stage, microbatch, 0))
            if stage < last:
                needs.append((Kind.I, stage + 1, microbatch, hop))
        if kind is Kind.W:
            needs.append((Kind.I, stage, microbatch, 0))
        for needed, other, number, delay in needs:
            model.add(start >= starts[needed, other, number] + _time(costs, needed, other) + delay)


def _bound_memory(model: Any, starts: Starts, num_microbatches: int, costs: StageCosts, limit: float) -> None:
    """A forward takes its activations when it starts; I and W let go of their parts when they end."""
    for stage in range(costs.num_stages):
        whole, kept = (round(of[stage] * STEPS) for of in (costs.activations, costs.kept_for_weights))
        times, changes = [], []
        for kind, change in ((Kind.F, whole), (Kind.I, kept - whole), (Kind.W, -kept)):
            delay = 0 if kind is Kind.F else _time(costs, kind, stage)
            times += [starts[kind, stage, microbatch] + delay for microbatch in range(num_microbatches)]
            changes += [change] * num_microbatches
        model.add_reservoir_constraint(times, changes, 0, round(limit * STEPS))


def _longest_span(model: Any, starts: Starts, num_microbatches: int, costs: StageCosts) -> Any:
    span = model.new_int_var(0, 1 << 40, "span")
    for stage in range(costs.num_stages):
        end = starts[Kind.W, stage, num_microbatches - 1] + _time(costs, Kind.W, stage)
        model.add(span >= end - starts[Kind.F, stage, 0])
    return span
