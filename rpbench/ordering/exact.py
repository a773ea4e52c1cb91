"""The best order of F, I and W within a memory limit, by constraint programming: small cases only.

It says how far a heuristic is from the optimum (`schedule=zb_auto`), and chooses together with the order which
activations wait on the host (`schedule=optpipe`). One stage on each of p devices; microbatches are alike, so each stage
may take them in order. The objective is the heuristic's: the longest time from a device's first start to its last end,
where first forwards start as early as they can. Of orders that are equally short, one that moves little is looked for.

Source: the integer program of Qi et al., "Zero Bubble Pipeline Parallelism", ICLR'24, section 3.1, with intervals in
place of its order variables; `rpbench.ordering.exact_model` has the constraints. Needs the extra `exact` (OR-tools).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rpbench.ir.action import Kind
from rpbench.ir.costs import StageCosts
from rpbench.ir.schedule import Schedule, Shape, looped_placement
from rpbench.ordering.exact_lanes import Plan
from rpbench.ordering.exact_model import STEPS, Case, Computed, OrderModel, needed_before

COUNTED = 0.25  # of the solver's counted seconds to one of a clock; one of them took some 2.5 of a core


@dataclass(frozen=True)
class Optimum:
    """The best order found.

    Args:
        schedule: that order, for one step.
        span: its longest device-local span, in the unit of the costs.
        bound: no order has a shorter one; equal to `span` if the search was finished.
        num_moved: activations that wait on the host, of all stages.
    """

    schedule: Schedule
    span: float
    bound: float
    num_moved: int = 0

    @property
    def proven(self) -> bool:
        return self.bound >= self.span


def best_order(
    num_microbatches: int,
    costs: StageCosts,
    limit: float,
    *,
    offload: bool = False,
    first: Sequence[Sequence[Kind]] | None = None,
    time_limit_s: float = 60,
    num_workers: int = 1,
) -> Optimum:
    """The order with the shortest longest span, as far as it is found in time.

    Args:
        costs: of every stage; rounded to thousandths of their unit.
        limit: activations a device may hold, in the unit of `costs.activations`.
        offload: whether activations may go to the host and come back, at the times of `costs`.
        first: an order to begin with, that keeps to the limit: the kinds of every stage, microbatches in order.
        time_limit_s: of the search for the span; that for fewer moves has as much again. On most machines the solver's
            own clock, which counts operations, ends a search first: with one worker they find the same order.

    Raises:
        ValueError: if no order keeps to the limit, or none is found in time.
        ImportError: without OR-tools.
    """
    from ortools.sat.python import cp_model

    if limit < max(costs.activations):
        raise ValueError(f"limit={limit}: one microbatch leaves {max(costs.activations)}; allow that much or more")
    case = Case(num_microbatches, costs, limit, offload)
    order = OrderModel(cp_model.CpModel(), case)
    if first is not None:
        order.hint(_starts(case, first))
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = num_workers
    order.model.minimize(order.span)
    if not _solved(solver, order, time_limit_s):
        raise ValueError(f"no order was found in {time_limit_s} s; allow more time, or take a smaller case")
    plan, bound = _plan(solver, order), solver.best_objective_bound
    span = solver.value(order.span)
    if plan.num_moved():
        plan = _with_fewer_moves(solver, order, time_limit_s) or plan
    return Optimum(_schedule(case, plan), span / STEPS, bound / STEPS, plan.num_moved())


def _solved(solver: Any, order: OrderModel, time_limit_s: float) -> bool:
    from ortools.sat.python import cp_model

    solver.parameters.max_time_in_seconds = time_limit_s
    solver.parameters.max_deterministic_time = time_limit_s * COUNTED
    return solver.solve(order.model) in (cp_model.OPTIMAL, cp_model.FEASIBLE)


def _with_fewer_moves(solver: Any, order: OrderModel, time_limit_s: float) -> Plan | None:
    """The same span with as few moves as are found in as much time again."""
    variables = [*order.starts.values(), *order.moved.values(), *order.transfers.values()]
    values = [solver.value(variable) for variable in variables]
    order.model.add(order.span <= solver.value(order.span))
    order.model.minimize(sum(order.moved.values()))
    order.model.clear_hints()
    for variable, value in zip(variables, values, strict=True):
        order.model.add_hint(variable, value)
    return _plan(solver, order) if _solved(solver, order, time_limit_s) else None


def _plan(solver: Any, order: OrderModel) -> Plan:
    """The times that the solver has found."""
    case, spans = order.case, {}
    for (kind, stage, microbatch), variable in order.starts.items():
        start = solver.value(variable)
        spans[kind, stage, microbatch] = start, start + case.time(kind, stage)
    for (kind, stage, microbatch), variable in order.transfers.items():
        if solver.value(order.moved[stage, microbatch]):
            start = solver.value(variable)
            spans[kind, stage, microbatch] = start, start + case.transfer_time(kind, stage)
    return Plan(spans)


def _schedule(case: Case, plan: Plan) -> Schedule:
    shape = Shape(case.costs.num_stages, case.costs.num_stages, case.num_microbatches)
    return Schedule(shape, tuple(map(plan.lanes, case.stages)), name="exact", placement=looped_placement(shape))


def _starts(case: Case, rows: Sequence[Sequence[Kind]]) -> Mapping[Computed, int]:
    """When everything begins in an order, each stage going on as soon as it can."""
    starts: dict[Computed, int] = {}
    following, now = [0] * len(rows), [0] * len(rows)
    while any(place < len(row) for place, row in zip(following, rows, strict=True)):
        before = sum(following)
        for stage, row in enumerate(rows):
            while following[stage] < len(row):
                kind = row[following[stage]]
                microbatch = row[: following[stage]].count(kind)
                needs = needed_before(case, kind, stage, microbatch)
                if any((needed, other, number) not in starts for needed, other, number, _ in needs):
                    break
                ends = (
                    starts[needed, other, number] + case.time(needed, other) + delay
                    for needed, other, number, delay in needs
                )
                starts[kind, stage, microbatch] = start = max(now[stage], *ends, 0)
                now[stage] = start + case.time(kind, stage)
                following[stage] += 1
        assert sum(following) > before, "rows that wait for each other"
    return starts
