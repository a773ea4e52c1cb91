"""Edges: what every action of a schedule waits for, derived once, all microbatches of a stage at a time.

A row holds the numbers of the actions of one kind, stage and part by microbatch, or of a STEP and its like by version;
-1 stands where there is none. `Rows` keeps them as lists, which a browser can read as well, `rpbench.sim.columns` as
arrays. The rules themselves: `rpbench.ir.waits.dependencies`; what transfers add: `rpbench.ir.waits.moves`.
"""

from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from rpbench.ir.action import HEAD, RECV, SEND, SUMS, Action, Kind, parts_of
from rpbench.ir.policy import KNOWN, STEPS_BEHIND
from rpbench.ir.schedule import Schedule
from rpbench.ir.waits.dependencies import names_versions, needs, stages_updated, version_read

GRADIENT = (Kind.B, Kind.W, Kind.FB, Kind.HB)  # kinds that add to a weight gradient
# Kinds that stand once for each stage, microbatch and part.
COUNTED = frozenset({Kind.F, Kind.B, Kind.I, Kind.W, Kind.R, Kind.FB, Kind.WAIT, *HEAD}) | SEND | RECV | SUMS

Row = Any  # a list of numbers, or an array of them


class Rows(Protocol):
    """The actions of a schedule in rows."""

    schedule: Schedule

    @property
    def kinds(self) -> Collection[Kind]:
        """Those that have rows."""

    def row(self, kind: Kind, stage: int, part: int = 0) -> Row | None:
        """The numbers of a kind, stage and part; None if there is surely none. A VALIDATE stands for all stages."""

    def first(self, rows: Sequence[Row]) -> Row:
        """At every place the first number of several rows that is one."""

    def indices(self, places: Sequence[int]) -> Any:
        """Places as `take` wants them."""

    def take(self, row: Row, places: Any) -> Row:
        """The numbers of a row at some places."""

    def action(self, number: int) -> Action:
        """The action of a number."""

    def gap(self, kind: Kind, stage: int) -> int | None:
        """The first place of a stage, by microbatch and part, where a kind is not; None if it is everywhere."""

    def gap_of_backwards(self, stage: int) -> int | None:
        """The first place of a stage where there is neither B alone, nor I and W."""


class Edges(NamedTuple):
    """Edges of one kind, stage and part: producer and consumer place by place; where either is -1, there is none."""

    kind: Kind
    stage: int
    part: int
    producers: Row
    consumers: Row
    moved: str  # "activation", "gradient", or "order" when no tensor moves


def edges_of(rows: Rows, *, receives: bool = True) -> Iterator[Edges]:
    """All edges but those of transfers; with `receives` False, RECVs are looked behind, at what makes their tensor."""
    shape = rows.schedule.shape
    stages = max(shape.num_stages, shape.num_backward_stages, shape.num_head_shards) + 1
    for kind in rows.kinds:
        for stage in range(stages) if kind in COUNTED else ():
            for part in range(shape.num_parts):
                own = rows.row(kind, stage, part)
                for need in needs(shape, kind, stage, part) if own is not None else ():
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
    publishes the version its policy reads. What ends steps that went ahead: `rpbench.ir.checks.check`.
    """
    shape = rows.schedule.shape
    last, num = shape.num_steps, shape.total_microbatches
    window = rows.indices([1 + microbatch // shape.num_microbatches for microbatch in range(num)])
    looks = rows.row(Kind.VALIDATE, 0)
    published: dict[int, Row] = {}  # by stage, the actions after which it has a version for good
    for stage in range(shape.num_backward_stages):
        steps, ends = rows.row(Kind.STEP, stage), rows.row(Kind.ROLLBACK, stage)
        if steps is None:
            continue
        published[stage] = steps if ends is None else rows.first([ends, steps])
        if looks is not None:
            yield Edges(Kind.STEP, stage, 0, looks, published[stage], "order")
        if ends is not None:
            yield Edges(Kind.ROLLBACK, stage, 0, steps, ends, "order")
        yield Edges(Kind.STEP, stage, 0, published[stage][1:last], steps[2 : last + 1], "order")
        for kind, part in ((kind, part) for kind in GRADIENT for part in range(shape.num_parts)):
            gradients = rows.row(kind, stage, part)
            if gradients is not None:
                yield Edges(Kind.STEP, stage, 0, gradients[:num], rows.take(steps, window), "order")
                if looks is not None:
                    yield Edges(Kind.VALIDATE, 0, 0, gradients[:num], rows.take(looks, window), "order")
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
    """By microbatch, the version that a forward must read; None under a policy that reads what is newest."""
    schedule, shape = rows.schedule, rows.schedule.shape
    if kind is Kind.F and names_versions(schedule):
        named = (rows.action(number) if number >= 0 else None for number in readers[: shape.total_microbatches])
        return rows.indices([0 if action is None else _named(action, stage) for action in named])
    if schedule.policy not in KNOWN:
        return None
    if schedule.policy in STEPS_BEHIND:  # the step decides
        of_step = [version_read(schedule.policy, shape, batch.start) or 0 for batch in shape.batches]
        return rows.indices([version for version in of_step for _ in range(shape.num_microbatches)])
    return rows.indices(
        [version_read(schedule.policy, shape, number, stage) or 0 for number in range(shape.total_microbatches)]
    )


def _named(action: Action, stage: int) -> int:
    """The version that a forward names, which may be a part of an OVERLAP."""
    parts = (part for part in parts_of(action) if part.kind is Kind.F and part.stage == stage)
    return max((part.version or 0 for part in parts), default=0)
