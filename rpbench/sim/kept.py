"""Kept activations on columns: STORE:A, LOAD:A and FREE:A where every device moves its own to the host and back.

Large schedules that offload hold little else. What moves in another way, or is not in order, is matched action by
action (`rpbench.ir.waits.saved_inputs`), which shows the one that is wrong.
"""

from collections.abc import Sequence
from fractions import Fraction
from functools import reduce
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rpbench.ir.action import COMPUTE, MOVES, Kind
from rpbench.ir.moved_objects import Cargo
from rpbench.ir.schedule import LANES, Schedule, Shape, Weights
from rpbench.ir.waits.moves import LANES as LANES_OF
from rpbench.sim.columns import Columns, Ints, among, places_of

Places = npt.NDArray[np.int64]
# Each of an activation that moves, once.
_MOVES = ((Kind.STORE, "d2h"), (Kind.FREE, "d2h"), (Kind.LOAD, "h2d"), (Kind.FREE, "h2d"))
_READERS = (Kind.R, Kind.B, Kind.I, Kind.W)  # in this order


class Carried(NamedTuple):
    """What actions carry over a link: their numbers, and which cargo of those that differ each of them has."""

    numbers: Ints
    which: Ints
    distinct: Sequence[tuple[Kind, Cargo]]


def kept_edges(schedule: Schedule, columns: Columns) -> tuple[Ints, Ints] | None:
    """What the transfers of a schedule add to its edges, where they are of activations alone and in the plainest form.

    Each activation that moves is stored by the device that makes and uses it (lane d2h), loaded once more (lane h2d),
    and freed once behind either. The edges are those of `rpbench.ir.waits.saved_inputs.activation_edges`.

    Returns:
        producer and consumer; None for a schedule with other transfers or none, or with some that are not in order.
    """
    if not _may_be_kept(schedule, columns) or not _in_range(schedule.shape, columns):
        return None
    found = _ByPlace(schedule, columns)
    moved = [found.of(*what) for what in _MOVES]
    stored = moved[0][0]
    if 4 * len(stored) != np.count_nonzero(columns.of_activations) or not (np.diff(stored) > 0).all():
        return None
    if not all(np.array_equal(stored, places) for places, _ in moved):
        return None
    stores, stores_freed, loads, loads_freed = (numbers for _, numbers in moved)
    makers, readers = found.users(Kind.F, stored), [found.users(kind, stored) for kind in _READERS]
    first, last = reduce(_or_else, readers), reduce(_or_else, reversed(readers))
    if not len(stored) or makers.min() < 0 or first.min() < 0 or not (loads_freed > loads).all():
        return None
    home = columns.device[stores]
    if not all((columns.device[own] == home).all() for own in (makers, stores_freed, loads, loads_freed, first)):
        return None
    producer = np.concatenate([makers, stores, stores, loads, last])
    return producer, np.concatenate([stores, stores_freed, loads, first, loads_freed])


class _ByPlace:
    """Plain actions by their places, ascending; of moves those on one lane."""

    def __init__(self, schedule: Schedule, columns: Columns) -> None:
        lanes = np.array([LANES.index(name) for _, name, _ in schedule.items()], np.int8)
        self._kind, _, _, _, self._owner = columns.plain
        self._lane = np.repeat(lanes, np.diff(columns.lane_start))[self._owner]
        self._places = places_of(schedule.shape, columns)

    def of(self, kind: Kind, lane: str) -> tuple[Places, Ints]:
        """Places and numbers of all of a kind."""
        own = np.flatnonzero((self._kind == kind) & (self._lane == LANES.index(lane)))
        own = own[np.argsort(self._places[own], kind="stable")]
        return self._places[own], self._owner[own]

    def users(self, kind: Kind, places: Places) -> Ints:
        """The number of the computation of a kind at each place, or -1."""
        own, numbers = self.of(kind, "compute")
        if not len(own):
            return np.full(len(places), -1, np.int32)
        at = np.minimum(np.searchsorted(own, places), len(own) - 1)
        return np.where(own[at] == places, numbers[at], -1)


def kept_cargo(shape: Shape, columns: Columns) -> Carried:
    """What the actions carry of a schedule that has `kept_edges`."""
    kind, stage = columns.kind, columns.stage
    numbers = np.flatnonzero(among(kind, (Kind.LOAD, Kind.STORE))).astype(np.int32)
    codes = kind[numbers].astype(np.int64) << 32 | stage[numbers]
    _, first, which = np.unique(codes, return_index=True, return_inverse=True)
    order = np.argsort(first)  # as they come first
    alike = [(Kind(kind[number]), int(stage[number])) for number in numbers[first[order]].tolist()]
    share = Fraction(1, shape.num_parts)
    distinct = [(member, Cargo("A", of, True, share, LANES_OF[member][0])) for member, of in alike]
    return Carried(numbers, np.argsort(order)[which].astype(np.int32), distinct)


def _may_be_kept(schedule: Schedule, columns: Columns) -> bool:
    """Whether nothing is moved but activations, and whoever uses them has them where they were made."""
    kinds = schedule.plain_kinds
    return (
        not kinds.isdisjoint(MOVES)
        and kinds <= COMPUTE | MOVES
        and schedule.weights is Weights.BOUND
        and schedule.late_rest is None
        and not (schedule.shape.separate_cuts or schedule.shape.tensor_parallel)
        and columns.is_bare
        and np.array_equal(columns.of_activations, among(columns.kind, MOVES))
    )


def _in_range(shape: Shape, columns: Columns) -> bool:
    """Whether stages, microbatches and parts are those of the shape."""
    _, stage, index, part, _ = columns.plain
    stops = ((stage, shape.num_backward_stages), (index, shape.total_microbatches), (part, shape.num_parts))
    return all(column.min() >= 0 and column.max() < stop for column, stop in stops)


def _or_else(numbers: Ints, others: Ints) -> Ints:
    return np.where(numbers < 0, others, numbers)
