"""Columns: the actions of a schedule as arrays, read once, with the parts of OVERLAPs."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rpbench.ir.action import COMPUTE, STEPPING, Action, Kind, PlainRow
from rpbench.ir.schedule import Row, Schedule, Shape
from rpbench.ir.waits.moves import TRANSFERS

Ints = npt.NDArray[np.int32]
Bools = npt.NDArray[np.bool_]
SMALL = 20_000  # up to this many actions are read at once


class Fields(NamedTuple):
    """Fields of actions as columns."""

    kind: Ints
    stage: Ints
    microbatch: Ints  # or version of a STEP and its like, or -1
    part: Ints
    of_activations: Bools  # whether it names the object A
    is_bare: bool  # no action names a version, a peer or another object than A, and only OVERLAPs have parts


@dataclass(frozen=True)
class Columns:
    """The actions of all lanes, one after another, as columns."""

    device: Ints
    lane_start: Ints  # first action of each lane, and the end
    kind: Ints
    stage: Ints
    index: Ints  # microbatch, or version of a STEP and its like, or -1
    part: Ints
    of_activations: Bools  # whether it names the object A
    sub: Mapping[int, tuple[Action, ...]]  # number of every OVERLAP -> its parts
    rows_are_bare: bool  # `Fields.is_bare` of all lanes, parts of OVERLAPs left out

    @cached_property
    def plain(self) -> tuple[Ints, Ints, Ints, Ints, Ints]:
        """Kind, stage, index and part of every plain action, and the number of the action it belongs to."""
        numbers = np.arange(len(self.kind), dtype=np.int32)
        columns = self.kind, self.stage, self.index, self.part, numbers
        if not self.sub:
            return columns
        alone = self.kind != Kind.OVERLAP
        owners = np.repeat(np.fromiter(self.sub, np.int32), list(map(len, self.sub.values())))
        whole = (column[alone] for column in columns)
        kind, stage, index, part, owner = map(np.concatenate, zip(whole, (*self._inside[:4], owners), strict=True))
        return kind, stage, index, part, owner

    @cached_property
    def is_bare(self) -> bool:
        """Whether no action, plain or in an OVERLAP, names a version, a peer or an object that is not A."""
        return self.rows_are_bare and self._inside.is_bare

    @property
    def alike_inside(self) -> tuple[npt.NDArray[np.int64], list[tuple[Action, ...]]]:
        """A number for each OVERLAP, equal if parts have equal kinds and stages; the parts of one OVERLAP a number."""
        held, inside = list(self.sub.values()), self._inside
        lengths = np.fromiter(map(len, held), np.int64)
        owner = np.repeat(np.arange(len(held)), lengths)
        place = np.arange(len(owner)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        codes = np.zeros((len(held), int(lengths.max())), np.int64)
        codes[owner, place] = inside.kind * (int(inside.stage.max(initial=0)) + 1) + inside.stage + 1
        numbers = np.zeros(len(held), np.int64)
        for column in codes.T:
            first, numbers = np.unique(
                numbers * (int(column.max()) + 1) + column, return_index=True, return_inverse=True
            )[1:]
        order = np.argsort(first)  # numbers as they come first
        return np.argsort(order)[numbers], [held[number] for number in first[order].tolist()]

    @cached_property
    def _inside(self) -> Fields:
        """The fields of the parts of OVERLAPs."""
        return _fields_of(tuple(chain.from_iterable(self.sub.values())))


def places_of(shape: Shape, columns: Columns) -> npt.NDArray[np.int64]:
    """Stage, microbatch and part of each plain action as one number; all must be in the range of the shape."""
    _, stage, index, part, _ = columns.plain
    return (stage.astype(np.int64) * shape.total_microbatches + index) * shape.num_parts + part


def read_columns(schedule: Schedule) -> Columns:
    """The schedule's actions as arrays."""
    rows = [row for _, _, row in schedule.items()]
    lengths = list(map(len, rows))
    starts = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
    # Large rows one by one: each is read while it is in the cache. Small ones together: arrays are made once for all.
    one_by_one = starts[-1] > SMALL or any(isinstance(row, PlainRow) for row in rows)
    read = [_fields_of(row) for row in (rows if one_by_one else [tuple(chain.from_iterable(rows))])]
    kind, stage, index, part, of_activations = map(np.concatenate, list(zip(*read, strict=True))[:5])
    overlaps = np.flatnonzero(kind == Kind.OVERLAP)
    lanes = np.searchsorted(starts, overlaps, side="right") - 1
    places = zip(overlaps.tolist(), lanes.tolist(), (overlaps - starts[lanes]).tolist(), strict=True)
    return Columns(
        np.repeat(np.asarray([device for device, _, _ in schedule.items()], np.int32), lengths),
        starts,
        kind,
        stage,
        index,
        part,
        of_activations,
        {number: rows[lane][place].sub for number, lane, place in places},
        all(fields.is_bare for fields in read),
    )


def _fields_of(row: Row) -> Fields:
    """The fields of the actions of a row."""
    if isinstance(row, PlainRow):
        kind, stage, microbatch = map(np.asarray, row.columns)
        of_activations = np.full(len(row), row.moved == "A")
        return Fields(kind, stage, microbatch, np.zeros(len(row), np.int32), of_activations, row.moved in (None, "A"))
    if not row:
        empty = np.empty(0, np.int32)
        return Fields(empty, empty, empty, empty, np.empty(0, bool), True)
    kinds, stages, microbatches, parts, versions, objects, peers, subs = zip(*row, strict=True)
    kind = np.frombuffer(bytes(kinds), np.uint8).astype(np.int32)
    stage, part = np.fromiter(stages, np.int32, len(row)), np.zeros(len(row), np.int32)
    if parts.count(0) < len(row):
        part = np.fromiter(parts, np.int32, len(row))
    num_unnamed = objects.count(None)
    of_activations = np.zeros(len(row), bool)
    if num_unnamed < len(row):
        of_activations = np.fromiter((name == "A" for name in objects), bool, len(row))
    is_bare = versions.count(None) == peers.count(None) == num_unnamed + np.count_nonzero(of_activations) == len(row)
    is_bare = is_bare and subs.count(()) == len(row) - kinds.count(Kind.OVERLAP)
    return Fields(kind, stage, _indices(kind, microbatches, versions), part, of_activations, is_bare)


def among(kind: Ints, kinds: Iterable[Kind]) -> Bools:
    """Which actions are of one of these kinds."""
    table = np.zeros(len(Kind), bool)
    table[list(kinds)] = True
    return table[kind]


# Kinds that need not name a microbatch.
_WITHOUT_MICROBATCH = [kind for kind in Kind if kind not in (COMPUTE - {Kind.OVERLAP})]


def _indices(kind: Ints, microbatches: Sequence[int | None], versions: Sequence[int | None]) -> Ints:
    """Microbatch of each action, or version of a STEP and its like; -1 if it has neither."""
    if not np.bincount(kind, minlength=len(Kind))[_WITHOUT_MICROBATCH].any():
        return np.fromiter(microbatches, np.int32, len(kind))  # type: ignore[arg-type]  # all name one
    found = [-1 if microbatch is None else microbatch for microbatch in microbatches]
    for number in np.flatnonzero(among(kind, STEPPING)).tolist():
        version = versions[number]
        found[number] = -1 if version is None else version
    return np.fromiter(found, np.int32, len(kind))


class ArrayRows:
    """The `Rows` of `rpbench.ir.waits.edges` as arrays; stages, microbatches and parts must be in range."""

    def __init__(self, schedule: Schedule, columns: Columns) -> None:
        self.schedule, self.columns = schedule, columns
        # per kind, the numbers by stage, part and microbatch (of a STEP, version); -1 if there is none. The last place
        # of the last axis is for actions without a microbatch; versions of a STEP are below it
        self.where: dict[Kind, Ints] = {}
        shape = schedule.shape
        stages = max(shape.num_stages, shape.num_backward_stages, shape.num_head_shards) + 1
        kind, stage, index, part, owner = columns.plain
        for member in np.flatnonzero(np.bincount(kind, minlength=len(Kind))).tolist():
            if member not in TRANSFERS:  # these are matched by their order
                own = np.flatnonzero(kind == member)
                numbers = np.full((stages, shape.num_parts, shape.total_microbatches + 2), -1, np.int32)
                numbers[stage[own], part[own], index[own]] = owner[own]
                self.where[Kind(member)] = numbers
        there = {kind: numbers >= 0 for kind, numbers in self.where.items()}
        self._exists: dict[Kind, Any] = {kind: here.any(axis=2).tolist() for kind, here in there.items()}
        self._whole: dict[Kind, Any] = {kind: here[:, :, :-2].all(axis=(1, 2)).tolist() for kind, here in there.items()}
        num = sum(map(np.count_nonzero, there.values()))
        # whether no two actions of a kind that has rows have the same place
        self.stand_once = num == len(kind) - np.count_nonzero(among(kind, TRANSFERS))

    @property
    def kinds(self) -> Collection[Kind]:
        return self.where.keys()

    def row(self, kind: Kind, stage: int, part: int = 0) -> Ints | None:
        if kind not in self.where:
            return None
        if kind is Kind.VALIDATE:
            return self.where[kind][:, 0].max(axis=0)
        return self.where[kind][stage, part] if self._exists[kind][stage][part] else None

    def first(self, rows: Sequence[Ints]) -> Ints:
        return reduce(lambda best, more: np.where(best < 0, more, best), rows)

    def indices(self, places: Sequence[int]) -> Ints:
        return np.asarray(places, np.int32)

    def take(self, row: Ints, places: Ints) -> Ints:
        return row[places]

    def action(self, number: int) -> Action:
        return self._actions[number]

    def gap(self, kind: Kind, stage: int) -> int | None:
        if kind in self.where and self._whole[kind][stage]:
            return None
        return _first_true(~self._is_there(kind, stage))

    def gap_of_backwards(self, stage: int) -> int | None:
        if {Kind.I, Kind.W}.isdisjoint(self.where):
            return self.gap(Kind.B, stage)
        full, inputs, weights = (self._is_there(kind, stage) for kind in (Kind.B, Kind.I, Kind.W))
        return _first_true((full == inputs) | (inputs != weights))

    def _is_there(self, kind: Kind, stage: int) -> Bools:
        shape = self.schedule.shape
        if kind not in self.where:
            return np.zeros(shape.total_microbatches * shape.num_parts, bool)
        return (self.where[kind][stage, :, : shape.total_microbatches] >= 0).T.ravel()

    @cached_property
    def _actions(self) -> list[Action]:
        return list(chain.from_iterable(row for _, _, row in self.schedule.items()))


def _first_true(found: Bools) -> int | None:
    return int(found.argmax()) if found.any() else None
