"""Edges: the actions that every action waits for. A schedule stores none: they follow from its shape and policy.

    F(s)  after F(s-1)                        W(s)  after I(s)
    B(s)  after F(s) and B(s+1)               STEP(s)@v  after STEP(s)@v-1 and every gradient of its window
    FB    after the last forward stage        F(s)  after the STEP that publishes the version it reads
    WAIT(s)  after F(s)
    Ends that sum a tied matrix's gradients: STEP(0) after every gradient of the last stage, too, if the step is drained
    VALIDATE, ROLLBACK and the steps that a ROLLBACK ends: `rpbench.ir.checks.check`

    With a head cut over the devices: HF after the last forward stage, HB after every HF of its microbatch, and the
    last backward stage after every HB. These exchange sums and broadcasts of all devices, not boundary tensors, so no
    SEND stands for them. Shard d is stepped with stage d: STEP(d) waits for the gradients of HB(d), too.

    If forwards keep the input of every k-th stage only (`Shape.keeps_every`), R(s) and B(s) wait for R(s-1), unless k
    divides s.

If a schedule has communication actions, RECV replaces the neighbour's action and waits for its SEND. When forward and
backward are cut apart, a backward stage waits for the last forward stage and for the backward stage above; only the
topmost of them gets a tensor from the last forward stage.

`edges_of` derives the edges of all microbatches of a stage together. A row holds the numbers of the actions of one
kind, stage and part by microbatch, or of a STEP, VALIDATE or ROLLBACK by version; -1 means that there is none. The rows
of an index are lists, so that a browser without numpy can use them; those of `rpbench.sim.columns` are arrays.
Transfers add edges of their own: `rpbench.ir.waits.moves`.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import lru_cache
from itertools import product
from typing import Any, NamedTuple, Protocol

from rpbench.ir.action import HEAD, RECV, SEND, STEPPING, SUMS, Action, Kind, parts_of
from rpbench.ir.policy import ASYNCHRONOUS, DRAINED, KNOWN, STEPS_BEHIND, Policy
from rpbench.ir.schedule import Schedule, Shape

GRADIENT = (Kind.B, Kind.W, Kind.FB, Kind.HB)  # kinds that add to a weight gradient
# Kinds that stand once for each stage, microbatch and part.
COUNTED = frozenset({Kind.F, Kind.B, Kind.I, Kind.W, Kind.R, Kind.FB, Kind.WAIT, *HEAD}) | SEND | RECV | SUMS

Row = Any  # a list of numbers, or an array of them
Key = tuple[Kind, int, int, int]  # kind, stage, microbatch (a version for STEPPING kinds; -1 without either), part


class Need(NamedTuple):
    """One action that another waits for: the first of `options` that the schedule holds for its microbatch."""

    options: tuple[tuple[Kind, int], ...]  # (kind, stage), best first
    input: str  # "activation", "gradient", or "order" when no tensor moves
    part_offset: int = 0


def key(action: Action) -> Key:
    """The identity of an action in its schedule; two actions with one key are duplicates."""
    index = action.version if action.kind in STEPPING else action.microbatch
    return action.kind, action.stage, -1 if index is None else index, action.part


@lru_cache(maxsize=1 << 14)  # enough for a few shapes; a sweep asks for many
def needs(shape: Shape, kind: Kind, stage: int, part: int = 0) -> tuple[Need, ...]:
    """The actions of its own microbatch that an action of this kind, stage and part waits for."""
    rule = (_TENSOR_RULES if shape.tensor_parallel else _RULES).get(kind)
    return tuple(rule(shape, stage, part)) if rule else ()


@lru_cache(maxsize=1 << 8)
def _needs_of_all(shape: Shape, kind: Kind) -> list[tuple[int, int, tuple[Need, ...]]]:
    """Stages and parts with what an action of a kind waits for there, those left out where it waits for nothing."""
    stages = max(shape.num_stages, shape.num_backward_stages, shape.num_head_shards) + 1
    places = product(range(stages), range(shape.num_parts))
    return [(stage, part, wanted) for stage, part in places if (wanted := needs(shape, kind, stage, part))]


def _forward(shape: Shape, stage: int, part: int) -> Iterator[Need]:
    if stage > 0:
        yield Need(((Kind.RECV_F, stage), (Kind.F, stage - 1)), "activation")
    if part > 0:  # causal attention reads the keys and values of the segments before it
        yield Need(((Kind.F, stage),), "order", -1)


def _own_forward(shape: Shape, stage: int, part: int) -> Iterator[Need]:
    last = shape.num_stages - 1
    if not shape.separate_cuts:
        yield Need(((Kind.F, stage),), "order", shape.num_parts - 1 - part)
    elif stage == shape.num_backward_stages - 1:
        yield Need(((Kind.RECV_F, last + 1), (Kind.F, last)), "activation")
    else:
        yield Need(((Kind.F, last),), "order")


def _backward(shape: Shape, stage: int, part: int) -> Iterator[Need]:
    own = next(_own_forward(shape, stage, part))
    if shape.num_parts == 1:
        yield own._replace(options=((Kind.R, stage), *own.options))
    else:  # every segment is recomputed by itself, after the last one's forward
        yield own
        yield Need(((Kind.R, stage),), "order")
    yield from _made_again(shape, stage)
    if stage < shape.num_backward_stages - 1:
        above = stage + 1
        yield Need(((Kind.RECV_B, stage), (Kind.B, above), (Kind.I, above), (Kind.FB, above)), "gradient")
    elif shape.num_head_shards:
        yield from (Need(((Kind.HB, shard),), "order") for shard in range(shape.num_head_shards))
    if part < shape.num_parts - 1:
        yield Need(((Kind.B, stage), (Kind.I, stage)), "order", 1)


def _recompute(shape: Shape, stage: int, part: int) -> Iterator[Need]:
    yield from _own_forward(shape, stage, part)
    yield from _made_again(shape, stage)


def _made_again(shape: Shape, stage: int) -> Iterator[Need]:
    """The recomputation of the stage below, if that makes the input because no forward has kept it."""
    if stage % shape.keeps_every:
        yield Need(((Kind.R, stage - 1),), "order")


def _head_forward(shape: Shape, stage: int, part: int) -> Iterator[Need]:
    yield Need(((Kind.F, shape.num_stages - 1),), "order")


def _head_backward(shape: Shape, stage: int, part: int) -> Iterator[Need]:
    yield from (Need(((Kind.HF, shard),), "order") for shard in range(shape.num_head_shards))


Rule = Callable[[Shape, int, int], Iterator[Need]]


def _one_need(*kinds: Kind, offset: int = 0, moved: str = "order") -> Rule:
    """The rule of an action that waits for the first of these kinds, of its own stage or one at an offset from it."""
    return lambda shape, stage, part: iter([Need(tuple((kind, stage + offset) for kind in kinds), moved)])


_RULES: dict[Kind, Rule] = {
    Kind.F: _forward,
    Kind.FB: _own_forward,
    Kind.R: _recompute,
    Kind.B: _backward,
    Kind.I: _backward,
    Kind.W: _one_need(Kind.I),
    Kind.HF: _head_forward,
    Kind.HB: _head_backward,
    Kind.SEND_F: _one_need(Kind.F),
    Kind.RECV_F: _one_need(Kind.SEND_F, offset=-1, moved="activation"),
    Kind.SEND_B: _one_need(Kind.B, Kind.I, Kind.FB),
    Kind.RECV_B: _one_need(Kind.SEND_B, offset=1, moved="gradient"),
    Kind.WAIT: _one_need(Kind.F),
}


# --- tensor parallelism: every device has a shard of every matrix ---------------------------------------------


def _of_all(shape: Shape, part: int, *options: tuple[Kind, int]) -> Iterator[Need]:
    """The shards of all devices. Their sum is then on every device, so no tensor is sent."""
    yield from (Need(options, "order", other - part) for other in range(shape.num_parts))


def _shared_forward(shape: Shape, stage: int, part: int) -> Iterator[Need]:
    if stage > 0:
        yield from _of_all(shape, part, (Kind.SUM_F, stage - 1), (Kind.F, stage - 1))


def _shared_backward(shape: Shape, stage: int, part: int) -> Iterator[Need]:
    yield from _of_all(shape, part, (Kind.SUM_F, stage), (Kind.F, stage))
    if stage < shape.num_backward_stages - 1:
        yield from _of_all(shape, part, (Kind.SUM_B, stage + 1), (Kind.B, stage + 1), (Kind.I, stage + 1))


def _all_need(*kinds: Kind) -> Rule:
    """The rule of an action that waits for the first of these kinds, of its stage, on every device."""
    return lambda shape, stage, part: _of_all(shape, part, *((kind, stage) for kind in kinds))


_TENSOR_RULES: dict[Kind, Rule] = {
    Kind.F: _shared_forward,
    Kind.B: _shared_backward,
    Kind.I: _shared_backward,
    Kind.W: _all_need(Kind.I),  # which end together
    Kind.SUM_F: _all_need(Kind.F),
    Kind.SUM_B: _all_need(Kind.B, Kind.I),
}


# --- optimizer steps ----------------------------------------------------------------------------------------


def window(shape: Shape, version: int) -> range:
    """The microbatches whose gradients make the step that publishes `version`; 1 is the first version made."""
    return range((version - 1) * shape.num_microbatches, version * shape.num_microbatches)


def version_read(policy: Policy, shape: Shape, microbatch: int, stage: int = 0) -> int | None:
    """The version a forward must read; None if the policy reads the newest one.

    Only under policy cyclic, whose workers begin one after another, it depends on the stage.
    """
    step, place = divmod(microbatch, shape.num_microbatches)
    behind = STEPS_BEHIND.get(policy)
    if policy is Policy.CYCLIC:
        behind = int(stage + place % shape.num_ranks < shape.num_stages - 1)
    return None if behind is None else max(0, step - behind)


def versions_by_step(schedule: Schedule) -> list[int]:
    """The version that the microbatches of each step read, under policies that read one in a step (`STEPS_BEHIND`)."""
    return [version_read(schedule.policy, schedule.shape, batch.start) or 0 for batch in schedule.shape.batches]


def names_versions(schedule: Schedule) -> bool:
    """Whether forwards name the version they read, and wait for the step that publishes it.

    They do if a stage has replicas and steps while microbatches are under way. The step stands in the lane of one
    replica, so the order of the other lanes does not tell the newest version.
    """
    return schedule.policy in ASYNCHRONOUS and any(len(holders) > 1 for holders in schedule.placement)


def stages_updated(schedule: Schedule, forward_stage: int) -> tuple[int, ...]:
    """The backward stages whose STEP changes the weights a forward stage reads."""
    if schedule.partition is not None:
        return schedule.partition.backward_stages_over(forward_stage)
    if not schedule.shape.separate_cuts:
        return (forward_stage,)
    return tuple(range(schedule.shape.num_backward_stages))


# --- edges of all microbatches ---


class Rows(Protocol):
    """The actions of a schedule in rows."""

    schedule: Schedule

    @property
    def kinds(self) -> Collection[Kind]:
        """The kinds that have rows."""

    def row(self, kind: Kind, stage: int, part: int = 0) -> Row | None:
        """The numbers of a kind, stage and part; None if there are surely none. A VALIDATE stands for all stages."""

    def first(self, rows: Sequence[Row]) -> Row:
        """At every place, the first number of several rows that is not -1."""

    def indices(self, places: Sequence[int]) -> Any:
        """Places in the form that `take` expects."""

    def take(self, row: Row, places: Any) -> Row:
        """The numbers of a row at some places."""

    def action(self, number: int) -> Action:
        """The action of a number."""

    def gap(self, kind: Kind, stage: int) -> int | None:
        """The first place of a stage, by microbatch and part, without an action of a kind; None if all have one."""

    def gap_of_backwards(self, stage: int) -> int | None:
        """The first place of a stage that has neither B alone nor I and W; None if there is none."""


class Edges(NamedTuple):
    """Edges of one kind, stage and part: producer and consumer place by place; no edge where either is -1."""

    kind: Kind
    stage: int
    part: int
    producers: Row
    consumers: Row
    moved: str  # "activation", "gradient", or "order" when no tensor moves


def edges_of(rows: Rows, *, receives: bool = True) -> Iterator[Edges]:
    """All edges except those of transfers; without `receives`, consumers wait for the producer behind each RECV."""
    for kind in rows.kinds:
        for stage, part, wanted in _needs_of_all(rows.schedule.shape, kind) if kind in COUNTED else ():
            own = rows.row(kind, stage, part)
            for need in wanted if own is not None else ():
                options = [
                    row
                    for other, at in need.options
                    if (receives or other not in RECV)
                    and (row := rows.row(other, at, part + need.part_offset)) is not None
                ]
                if options:
                    produced = options[0] if len(options) == 1 else rows.first(options)
                    yield Edges(kind, stage, part, produced, own, need.input)
    if Kind.STEP in rows.kinds:
        yield from _edges_of_steps(rows)


def _edges_of_steps(rows: Rows) -> Iterator[Edges]:
    """Edges into and out of optimizer steps.

    A step waits for the one before and for every weight gradient of its window; a forward waits for the step that
    publishes the version its policy reads. How a ROLLBACK ends a step: `rpbench.ir.checks.check`.
    """
    shape = rows.schedule.shape
    last, num = shape.num_steps, shape.total_microbatches
    version_of = rows.indices([1 + microbatch // shape.num_microbatches for microbatch in range(num)])
    validations = rows.row(Kind.VALIDATE, 0)
    published: dict[int, Row] = {}  # by stage, the actions after which a version is final
    for stage in range(shape.num_backward_stages):
        steps, ends = rows.row(Kind.STEP, stage), rows.row(Kind.ROLLBACK, stage)
        if steps is None:
            continue
        published[stage] = steps if ends is None else rows.first([ends, steps])
        if validations is not None:
            yield Edges(Kind.STEP, stage, 0, validations, published[stage], "order")
        if ends is not None:
            yield Edges(Kind.ROLLBACK, stage, 0, steps, ends, "order")
        yield Edges(Kind.STEP, stage, 0, published[stage][1:last], steps[2 : last + 1], "order")
        summed = {stage}
        if stage == 0 and rows.schedule.tied and rows.schedule.policy in DRAINED:  # else the last stage goes on
            summed.add(shape.num_backward_stages - 1)
        for kind, of, part in product(GRADIENT, sorted(summed), range(shape.num_parts)):
            gradients = rows.row(kind, of, part)
            if gradients is not None:
                yield Edges(Kind.STEP, stage, 0, gradients[:num], rows.take(steps, version_of), "order")
                if validations is not None:
                    yield Edges(Kind.VALIDATE, 0, 0, gradients[:num], rows.take(validations, version_of), "order")
    for kind, stage in [
        *((Kind.F, stage) for stage in range(shape.num_stages)),
        (Kind.FB, shape.num_backward_stages - 1),
    ]:
        updated = stages_updated(rows.schedule, stage) if kind is Kind.F else (stage,)
        for part in range(shape.num_parts):
            readers = rows.row(kind, stage, part)
            if readers is None:
                continue
            read = _versions_read(rows, kind, stage, readers)
            for by in updated if read is not None else ():
                if by in published:
                    yield Edges(kind, stage, part, rows.take(published[by], read), readers[:num], "order")


def _versions_read(rows: Rows, kind: Kind, stage: int, readers: Row) -> Any | None:
    """By microbatch, the version that a forward must read; None if the policy reads the newest one."""
    schedule, shape = rows.schedule, rows.schedule.shape
    if kind is Kind.F and names_versions(schedule):
        named = (rows.action(number) if number >= 0 else None for number in readers[: shape.total_microbatches])
        return rows.indices([0 if action is None else _named(action, stage) for action in named])
    if schedule.policy not in KNOWN:
        return None
    if schedule.policy in STEPS_BEHIND:  # the same for all microbatches of a step
        return rows.indices([read for read in versions_by_step(schedule) for _ in range(shape.num_microbatches)])
    return rows.indices(
        [version_read(schedule.policy, shape, number, stage) or 0 for number in range(shape.total_microbatches)]
    )


def _named(action: Action, stage: int) -> int:
    """The version that a forward names; it may be a part of the given OVERLAP."""
    parts = (part for part in parts_of(action) if part.kind is Kind.F and part.stage == stage)
    return max((part.version or 0 for part in parts), default=0)
