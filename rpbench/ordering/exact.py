"""The best order of F, I and W within a memory limit, by constraint programming: small cases only.

It says how far a heuristic is from the optimum (`schedule=zb_auto`), and chooses together with the order which
activations wait on the host (`schedule=optpipe`). One stage on each of p devices; microbatches are alike, so each stage
may take them in order. The objective is the heuristic's: the longest time from a device's first start to its last end,
where first forwards start as early as they can. Of orders that are equally short, one that moves little is looked for.
Variables of the program:

    start of F, I, W        of every stage and microbatch; a device runs one at a time
    moved(s, i)             whether the activations of microbatch i leave stage s for the host
    start of STORE, LOAD    of those that do; a device has one lane each way, which carries one at a time

Memory of a device: F and LOAD allocate activations when they start, STORE frees them when it ends. I and W free their
parts when they end; on a stage that moves any, W frees all, because a LOAD can wait for a W and not for an I.

The lanes of a plan hold computations and transfers by start time. A lane runs its actions as early as it can. So that a
device never holds more than in the plan, however long anything takes in a run, each action that allocates (F, LOAD:A)
waits for all that free before it in the plan (W, STORE:A):

    W before F          both stand in the compute row
    STORE:A1 before F   0FREE:A1 in the compute row, right before the F
    STORE:A1 before LOAD:A0      0FREE:A1 in lane h2d, right before the LOAD
    W1 before LOAD:A4   0FREE:A1 in lane h2d, right before the LOAD

Then a device never holds more than the plan does at the start of the last allocation that has begun: all that had been
freed by then in the plan has been freed. Of several frees in one lane only the last is named; its order implies the
others.

Source: the integer program of Qi et al., "Zero Bubble Pipeline Parallelism", ICLR'24, section 3.1, for F, I and W, with
intervals in place of its order variables; "OptPipe" (arXiv 2510.05186), its abstract, for what moves. The constraints
on transfers are derived from the machine simulated here. Needs the extra `exact` (OR-tools).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rpbench.ir.action import Action, Kind
from rpbench.ir.costs import StageCosts
from rpbench.ir.schedule import Row, Schedule, Shape, looped_placement

STEPS = 1000  # times and sizes become whole numbers: so many to a unit
KINDS = (Kind.F, Kind.I, Kind.W)
TRANSFERS = (Kind.STORE, Kind.LOAD)

Computed = tuple[Kind, int, int]  # kind, stage, microbatch
Held = tuple[int, int]  # stage, microbatch


@dataclass(frozen=True)
class Case:
    """A problem of ordering."""

    num_microbatches: int
    costs: StageCosts  # of every stage; rounded to thousandths of their unit
    limit: float  # activations a device may hold, in the unit of `costs.activations`
    offload: bool  # whether activations may move; their times are those of `costs`

    @property
    def stages(self) -> range:
        return range(self.costs.num_stages)

    @property
    def microbatches(self) -> range:
        return range(self.num_microbatches)

    @property
    def moves(self) -> bool:
        """Whether anything may move: it is allowed, and the transfer times are known."""
        return self.offload and bool(self.costs.store)

    @property
    def hop(self) -> int:
        return whole(self.costs.hop)

    def time(self, kind: Kind, stage: int) -> int:
        """Time of F, I, W, STORE or LOAD of a stage."""
        own = self.costs
        tables = {Kind.F: own.forward, Kind.I: own.input_grad, Kind.W: own.weight_grad}
        return whole((tables | {Kind.STORE: own.store, Kind.LOAD: own.load})[kind][stage])

    @property
    def horizon(self) -> int:
        """Time of a run with no overlap at all, an upper bound on every start."""
        kinds = KINDS + TRANSFERS * self.moves
        time = sum(self.time(kind, stage) for kind in kinds for stage in self.stages)
        return self.num_microbatches * (time + 2 * self.costs.num_stages * self.hop)


def whole(amount: float) -> int:
    """A time or size as a whole number of steps."""
    return round(amount * STEPS)


class OrderModel:
    """A constraint program, built by CP-SAT's own `CpModel`."""

    def __init__(self, model: Any, case: Case) -> None:
        self.model, self.case = model, case
        self.starts: dict[Computed, Any] = {}  # of F, I and W
        self.moved: dict[Held, Any] = {}  # whether activations move; empty where none may
        self.transfers: dict[Computed, Any] = {}  # starts of STORE and LOAD; they mean something where `moved` is true
        self.always = model.new_constant(1)
        self._active: dict[int, Any] = {}  # by stage, whether any of its activations move
        for stage in case.stages:
            self._run_one_at_a_time(stage)
        self._order_microbatches()
        for stage in case.stages if case.moves else ():
            self._carry_one_at_a_time(stage)
        for stage in case.stages:
            self._bound_memory(stage)
        self.span = self._longest_span()  # the longest time from a device's first start to its last end

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
        """One transfer at a time each way, between F and I, in the order of microbatches, which loses nothing."""
        for microbatch in self.case.microbatches:
            self.moved[stage, microbatch] = self.model.new_bool_var(f"{stage}moved{microbatch}")
        for kind in TRANSFERS:
            time, intervals = self.case.time(kind, stage), []
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
        store, load = (self.transfers[kind, stage, microbatch] for kind in TRANSFERS)
        return [
            (self._end(Kind.F, stage, microbatch), store),
            (store + self.case.time(Kind.STORE, stage), load),
            (load + self.case.time(Kind.LOAD, stage), self.starts[Kind.I, stage, microbatch]),
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
                store, load = (self.transfers[kind, stage, microbatch] for kind in TRANSFERS)
                gone = store + case.time(Kind.STORE, stage)
                held += [(self._while(begin, gone, moved), all_of_it), (self._while(load, used, moved), all_of_it)]
        intervals, amounts = zip(*held, strict=True)
        self.model.add_cumulative(intervals, amounts, whole(case.limit))

    def _until_input_grad(self, stage: int, microbatch: int) -> list[Any]:
        """When a device holds what I frees: until I ends, or until W ends on a stage that moves activations."""
        begin = self.starts[Kind.F, stage, microbatch]
        until_i, until_w = (self._end(kind, stage, microbatch) for kind in (Kind.I, Kind.W))
        active = self._active.get(stage)
        if active is None:
            return [self._while(begin, until_i, self.always)]
        stays = self.model.new_bool_var(f"{stage}stays{microbatch}")
        self.model.add(stays == active - self.moved[stage, microbatch])
        return [self._while(begin, until_i, ~active), self._while(begin, until_w, stays)]

    def _while(self, begin: Any, end: Any, present: Any) -> Any:
        """An interval between two moments, present where a condition holds."""
        size = self.model.new_int_var(0, self.case.horizon, "")
        return self.model.new_optional_interval_var(begin, size, end, present, "")

    def _longest_span(self) -> Any:
        span, last = self.model.new_int_var(0, self.case.horizon, "span"), self.case.num_microbatches - 1
        for stage in self.case.stages:
            self.model.add(span >= self._end(Kind.W, stage, last) - self.starts[Kind.F, stage, 0])
        return span


def needed_before(case: Case, kind: Kind, stage: int, microbatch: int) -> list[tuple[Kind, int, int, int]]:
    """(kind, stage, microbatch, delay of its result) of the actions that an action waits for."""
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


@dataclass(frozen=True)
class Plan:
    """When everything runs, in whole steps."""

    # (kind, stage, microbatch) -> start and end, of F, I, W and, for what moves, STORE and LOAD
    spans: Mapping[Computed, tuple[int, int]]

    def lanes(self, stage: int) -> dict[str, Row]:
        row, up, down = (tuple(make(stage)) for make in (self._compute, self._uploads, self._downloads))
        return {"compute": row, **({"h2d": up, "d2h": down} if down else {})}

    def start(self, kind: Kind, stage: int, microbatch: int) -> int:
        return self.spans[kind, stage, microbatch][0]

    def num_moved(self) -> int:
        """Activations that go to the host, of all stages."""
        return sum(kind is Kind.STORE for kind, _, _ in self.spans)

    def _in_order(self, stage: int, *kinds: Kind) -> list[tuple[Kind, int]]:
        """Kind and microbatch by start; of those that start together, what takes no time comes first."""
        own = [key for key in self.spans if key[1] == stage and key[0] in kinds]
        own.sort(key=lambda key: (*self.spans[key], kinds.index(key[0]), key[2]))
        return [(kind, microbatch) for kind, _, microbatch in own]

    def _last_ended(self, kind: Kind, stage: int, by: int) -> int:
        """The last microbatch of a kind that has ended by a time; -1 without one."""
        ended = [key[2] for key, (_, end) in self.spans.items() if key[:2] == (kind, stage) and end <= by]
        return max(ended, default=-1)

    def _compute(self, stage: int) -> Iterator[Action]:
        named = -1
        for kind, microbatch in self._in_order(stage, *KINDS):
            start = self.start(kind, stage, microbatch)
            gone = self._last_ended(Kind.STORE, stage, start) if kind is Kind.F else -1
            if gone > named and self.start(Kind.I, stage, gone) > start:  # or its backward has waited for it
                yield _action(Kind.FREE, stage, gone)
                named = gone
            yield _action(kind, stage, microbatch)

    def _downloads(self, stage: int) -> Iterator[Action]:
        for _, microbatch in self._in_order(stage, Kind.STORE):
            yield _action(Kind.STORE, stage, microbatch)
            yield _action(Kind.FREE, stage, microbatch)

    def _uploads(self, stage: int) -> Iterator[Action]:
        order = [microbatch for _, microbatch in self._in_order(stage, Kind.LOAD)]
        named, freed, unfreed = -1, -1, list(order)
        for microbatch in order:
            start = self.start(Kind.LOAD, stage, microbatch)
            used = min(self._last_ended(Kind.W, stage, start), microbatch - 1)
            while unfreed and unfreed[0] <= used:
                freed = unfreed.pop(0)
                yield _action(Kind.FREE, stage, freed)
            if used > freed:  # it has stayed on the device
                yield _action(Kind.FREE, stage, used)
                freed = used
            gone = self._last_ended(Kind.STORE, stage, start)
            if gone > max(named, microbatch):  # the LOAD waits for its own STORE anyway, which comes after earlier ones
                yield _action(Kind.FREE, stage, gone)
                named = gone
            yield _action(Kind.LOAD, stage, microbatch)
        yield from (_action(Kind.FREE, stage, microbatch) for microbatch in unfreed)


def _action(kind: Kind, stage: int, microbatch: int) -> Action:
    return Action(kind, stage, microbatch, object=None if kind in KINDS else "A")


def shifted(row: Row, microbatches: int) -> Row:
    """The row with so much added to its microbatches."""
    return tuple(action._replace(microbatch=(action.microbatch or 0) + microbatches) for action in row)


COUNTED = 0.25  # the solver's counted seconds for each of the clock; one of them took some 2.5 seconds of a core


@dataclass(frozen=True)
class Optimum:
    """The best order found."""

    schedule: Schedule  # that order, for one step
    span: float  # its longest device-local span, in the unit of the costs
    bound: float  # no order has a shorter one; equal to `span` if the search was finished
    num_moved: int = 0  # activations that wait on the host, of all stages

    @property
    def proven(self) -> bool:
        return self.bound >= self.span


def best_order(
    num_microbatches: int,
    costs: StageCosts,
    limit: float,
    *,
    offload: bool = False,
    # an order to begin with that keeps to the limit: the kinds of every stage, microbatches in order
    first: Sequence[Sequence[Kind]] | None = None,
    # of the search for the span, and again of that for fewer moves. On most machines the solver's own clock, which
    # counts operations, ends a search first; with one worker every machine finds the same order
    time_limit_s: float = 60,
) -> Optimum:
    """The order with the smallest longest span that is found in time; costs, limit and offload as in `Case`.

    ValueError if no order keeps to the limit, or none is found in time; ImportError without OR-tools.
    """
    from ortools.sat.python import cp_model

    if limit < max(costs.activations):
        raise ValueError(f"limit={limit}: one microbatch leaves {max(costs.activations)}; allow that much or more")
    case = Case(num_microbatches, costs, limit, offload)
    order = OrderModel(cp_model.CpModel(), case)
    if first is not None:
        order.hint(_starts(case, first))
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
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
    spans = {}
    for (kind, stage, microbatch), variable in (order.starts | order.transfers).items():
        if kind in KINDS or solver.value(order.moved[stage, microbatch]):
            start = solver.value(variable)
            spans[kind, stage, microbatch] = start, start + order.case.time(kind, stage)
    return Plan(spans)


def _schedule(case: Case, plan: Plan) -> Schedule:
    shape = Shape(case.costs.num_stages, case.costs.num_stages, case.num_microbatches)
    return Schedule(shape, tuple(map(plan.lanes, case.stages)), name="exact", placement=looped_placement(shape))


def _starts(case: Case, rows: Sequence[Sequence[Kind]]) -> Mapping[Computed, int]:
    """Start of every action of an order in which each stage runs as early as it can."""
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
