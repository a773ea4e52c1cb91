"""The constraint program behind `rpbench.ordering.exact`: variables and constraints of one case.

    start of F, I, W        of every stage and microbatch; a device runs one at a time
    moved(s, i)             whether the activations of microbatch i leave stage s for the host
    start of STORE, LOAD    of those that do; a device has one lane each way, which carries one at a time

Memory of a device, at any moment: a forward takes its activations when it starts, a LOAD when it starts; a STORE gives
them back when it ends. I and W let go of their parts when they end; on a stage that moves any, W lets go of all,
because a LOAD can wait for a W and not for an I (`rpbench.ordering.exact`).

Source: Qi et al., "Zero Bubble Pipeline Parallelism", ICLR'24, section 3.1, for F, I and W; "OptPipe" (arXiv
2510.05186), its abstract, for what moves. The constraints on transfers are derived from the machine simulated here.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rpbench.ir.action import Kind
from rpbench.ir.costs import StageCosts

STEPS = 1000  # times and sizes become whole numbers: so many to a unit
KINDS = (Kind.F, Kind.I, Kind.W)

Computed = tuple[Kind, int, int]  # kind, stage, microbatch
Held = tuple[int, int]  # stage, microbatch


@dataclass(frozen=True)
class Case:
    """A problem of ordering.

    Args:
        costs: of every stage; rounded to thousandths of their unit.
        limit: activations a device may hold, in the unit of `costs.activations`.
        offload: whether activations may move; their times are those of `costs`.
    """

    num_microbatches: int
    costs: StageCosts
    limit: float
    offload: bool

    @property
    def stages(self) -> range:
        return range(self.costs.num_stages)

    @property
    def microbatches(self) -> range:
        return range(self.num_microbatches)

    @property
    def moves(self) -> bool:
        """Whether anything may move: it is allowed, and somebody knows how long it takes."""
        return self.offload and bool(self.costs.store)

    @property
    def hop(self) -> int:
        return whole(self.costs.hop)

    def time(self, kind: Kind, stage: int) -> int:
        """Of F, I or W."""
        table = {Kind.F: self.costs.forward, Kind.I: self.costs.input_grad, Kind.W: self.costs.weight_grad}[kind]
        return whole(table[stage])

    def transfer_time(self, kind: Kind, stage: int) -> int:
        """Of STORE or LOAD."""
        return whole((self.costs.store if kind is Kind.STORE else self.costs.load)[stage])

    @property
    def horizon(self) -> int:
        """One microbatch after another, with all that it may do."""
        times = [self.time(kind, stage) for kind in KINDS for stage in self.stages]
        if self.moves:
            times += [self.transfer_time(kind, stage) for kind in (Kind.STORE, Kind.LOAD) for stage in self.stages]
        return self.num_microbatches * (sum(times) + 2 * self.costs.num_stages * self.hop)


def whole(amount: float) -> int:
    """A time or size as a whole number of steps."""
    return round(amount * STEPS)


class OrderModel:
    """A constraint program, built by CP-SAT's own `CpModel`.

    Attributes:
        starts: of F, I and W.
        moved: whether activations move; empty where none may.
        transfers: starts of STORE and LOAD; they mean something where `moved` is true.
        span: the longest time from a device's first start to its last end.
    """

    def __init__(self, model: Any, case: Case) -> None:
        self.model, self.case = model, case
        self.starts: dict[Computed, Any] = {}
        self.moved: dict[Held, Any] = {}
        self.transfers: dict[Computed, Any] = {}
        self.always = model.new_constant(1)
        self._active: dict[int, Any] = {}  # by stage, whether any of its activations move
        for stage in case.stages:
            self._run_one_at_a_time(stage)
        self._order_microbatches()
        for stage in case.stages if case.moves else ():
            self._carry_one_at_a_time(stage)
        for stage in case.stages:
            self._bound_memory(stage)
        self.span = self._longest_span()

    def hint(self, starts: Mapping[Computed, int]) -> None:
        """Begin the search with an order in which nothing moves."""
        for key, start in starts.items():
            self.model.add_hint(self.starts[key], start)
        for moved in self.moved.values():
            self.model.add_hint(moved, 0)

    # --- variables -------------------------------------------------------------------------------------------

    def _run_one_at_a_time(self, stage: int) -> None:
        intervals = []
        for kind in KINDS:
            for microbatch in self.case.microbatches:
                name = f"{stage}{kind.name}{microbatch}"
                start = self.model.new_int_var(0, self.case.horizon, name)
                self.starts[kind, stage, microbatch] = start
                intervals.append(self.model.new_fixed_size_interval_var(start, self.case.time(kind, stage), name))
        self.model.add_no_overlap(intervals)

    def _carry_one_at_a_time(self, stage: int) -> None:
        """Each way; between F and I, and in the order of microbatches: nothing is gained by another."""
        for microbatch in self.case.microbatches:
            self.moved[stage, microbatch] = self.model.new_bool_var(f"{stage}moved{microbatch}")
        for kind in (Kind.STORE, Kind.LOAD):
            time, intervals = self.case.transfer_time(kind, stage), []
            for microbatch in self.case.microbatches:
                name = f"{stage}{kind.name}{microbatch}"
                start = self.model.new_int_var(0, self.case.horizon, name)
                moved = self.moved[stage, microbatch]
                self.transfers[kind, stage, microbatch] = start
                intervals.append(self.model.new_optional_fixed_size_interval_var(start, time, moved, name))
                if microbatch:
                    self.model.add(start >= self.transfers[kind, stage, microbatch - 1])
            self.model.add_no_overlap(intervals)
        for microbatch in self.case.microbatches:
            for before, after in self._on_the_way(stage, microbatch):
                self.model.add(after >= before).only_enforce_if(self.moved[stage, microbatch])
        self._active[stage] = self.model.new_bool_var(f"{stage}moves")
        self.model.add_max_equality(self._active[stage], [self.moved[stage, i] for i in self.case.microbatches])

    def _on_the_way(self, stage: int, microbatch: int) -> list[tuple[Any, Any]]:
        """The order of ends and beginnings where activations move."""
        store, load = (self.transfers[kind, stage, microbatch] for kind in (Kind.STORE, Kind.LOAD))
        return [
            (self._end(Kind.F, stage, microbatch), store),
            (store + self.case.transfer_time(Kind.STORE, stage), load),
            (load + self.case.transfer_time(Kind.LOAD, stage), self.starts[Kind.I, stage, microbatch]),
        ]

    def _end(self, kind: Kind, stage: int, microbatch: int) -> Any:
        return self.starts[kind, stage, microbatch] + self.case.time(kind, stage)

    # --- constraints -----------------------------------------------------------------------------------------

    def _order_microbatches(self) -> None:
        """Inputs before what needs them, microbatches in order, first forwards as early as can be."""
        begin = 0
        for stage in self.case.stages:
            self.model.add(self.starts[Kind.F, stage, 0] == begin)
            begin += self.case.time(Kind.F, stage) + self.case.hop
        for key, start in self.starts.items():
            for needed, other, number, delay in needed_before(self.case, *key):
                self.model.add(start >= self._end(needed, other, number) + delay)

    def _bound_memory(self, stage: int) -> None:
        """The activations on a device never exceed the limit."""
        case, costs = self.case, self.case.costs
        all_of_it, kept = whole(costs.activations[stage]), whole(costs.kept_for_weights[stage])
        held: list[tuple[Any, int]] = []  # intervals, and what is held in them
        for microbatch in case.microbatches:
            begin, used = self.starts[Kind.F, stage, microbatch], self._end(Kind.W, stage, microbatch)
            moved = self.moved.get((stage, microbatch))
            stays = self.always if moved is None else ~moved
            held.append((self._while(begin, used, stays), kept))
            if kept < all_of_it:
                held += [(interval, all_of_it - kept) for interval in self._until_input_grad(stage, microbatch)]
            if moved is not None:
                store, load = (self.transfers[kind, stage, microbatch] for kind in (Kind.STORE, Kind.LOAD))
                gone = store + case.transfer_time(Kind.STORE, stage)
                held += [(self._while(begin, gone, moved), all_of_it), (self._while(load, used, moved), all_of_it)]
        intervals, amounts = zip(*held, strict=True)
        self.model.add_cumulative(intervals, amounts, whole(case.limit))

    def _until_input_grad(self, stage: int, microbatch: int) -> list[Any]:
        """When a device holds what I lets go of: to its end, or to that of W on a stage that moves activations."""
        begin = self.starts[Kind.F, stage, microbatch]
        until_i, until_w = (self._end(kind, stage, microbatch) for kind in (Kind.I, Kind.W))
        active = self._active.get(stage)
        if active is None:
            return [self._while(begin, until_i, self.always)]
        stays = self.model.new_bool_var(f"{stage}stays{microbatch}")
        self.model.add(stays == active - self.moved[stage, microbatch])
        return [self._while(begin, until_i, ~active), self._while(begin, until_w, stays)]

    def _while(self, begin: Any, end: Any, present: Any) -> Any:
        """The time between two moments, where something is so."""
        size = self.model.new_int_var(0, self.case.horizon, "")
        return self.model.new_optional_interval_var(begin, size, end, present, "")

    def _longest_span(self) -> Any:
        span, last = self.model.new_int_var(0, self.case.horizon, "span"), self.case.num_microbatches - 1
        for stage in self.case.stages:
            self.model.add(span >= self._end(Kind.W, stage, last) - self.starts[Kind.F, stage, 0])
        return span


def needed_before(case: Case, kind: Kind, stage: int, microbatch: int) -> list[tuple[Kind, int, int, int]]:
    """The actions that an action waits for, and the way of their results: kind, stage, microbatch, delay."""
    needs = [(kind, stage, microbatch - 1, 0)] if microbatch else []
    if kind is Kind.F and stage:
        needs.append((Kind.F, stage - 1, microbatch, case.hop))
    if kind is Kind.I:
        needs.append((Kind.F, stage, microbatch, 0))
        if stage < case.costs.num_stages - 1:
            needs.append((Kind.I, stage + 1, microbatch, case.hop))
    if kind is Kind.W:
        needs.append((Kind.I, stage, microbatch, 0))
    return needs
