"""Kept activations on columns: STORE:A, LOAD:A and FREE:A where every device moves its own to the host and back.

Large schedules that offload hold little else. What moves in another way, or is not in order, is matched action by
action (`rpbench.ir.saved_inputs`), which shows the one that is wrong.
"""

from collections.abc import Sequence
from fractions import Fraction
from functools import reduce
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rpbench.ir.action import COMPUTE, MOVES, Kind
from rpbench.ir.moved_objects import Cargo
from rpbench.ir.moves import LANES
from rpbench.ir.schedule import Schedule, Shape, Weights
from rpbench.sim.columns import Bools, Columns, Ints, among

Places = npt.NDArray[np.int64]
_READERS = (Kind.R, Kind.B, Kind.I, Kind.W)  # in this order


class Carried(NamedTuple):
    """What actions carry over a link: their numbers, and which cargo of those that differ each of them has."""

    numbers: Ints
    which: Ints
    distinct: Sequence[tuple[Kind, Cargo]]


def kept_edges(schedule: Schedule, columns: Columns) -> tuple[Ints, Ints] | None:
    """What the transfers of a schedule add to its edges, where they are of activations alone and in the plainest form.

    Each activation that moves is stored by the device that makes and uses it (lane d2h), loaded once more (lane h2d),
    and freed once behind either. The edges are those of `rpbench.ir.saved_inputs.activation_edges`.

    Returns:
        producer and consumer; None for a schedule with other transfers or none, or with some that are not in order.
    """
    if not _may_be_kept(schedule, columns):
        return None
    shape = schedule.shape
    places = _places(shape, columns)
    if places is None:
        return None
    kind, _, _, _, owner = columns.plain
    names = np.array([name for _, name, _ in schedule.items()])
    lane = np.repeat(names, np.diff(columns.lane_start))[owner]

    def found(members: Bools) -> tuple[Places, Ints]:
        """The places of some actions, ascending, and their numbers."""
        own = np.flatnonzero(members)
        order = np.argsort(places[own], kind="stable")
        return places[own][order], owner[own][order]

    stored, stores = found((kind == Kind.STORE) & (lane == "d2h"))
    others = [
        found((kind == member) & (lane == name))
        for member, name in ((Kind.FREE, "d2h"), (Kind.LOAD, "h2d"), (Kind.FREE, "h2d"))
    ]
    if 4 * len(stores) != np.count_nonzero(columns.of_activations) or not (np.diff(stored) > 0).all():
        return None
    if not all(np.array_equal(stored, own) for own, _ in others):
        return None
    (_, stores_freed), (_, loads), (_, loads_freed) = others

    def users(member: Kind) -> Ints:
        """For each activation its action of a kind, or -1."""
        own, numbers = found(kind == member)
        if not len(own):
            return np.full(len(stored), -1, np.int32)
        at = np.minimum(np.searchsorted(own, stored), len(own) - 1)
        return np.where(own[at] == stored, numbers[at], -1)

    makers, readers = users(Kind.F), [users(member) for member in _READERS]
    first, last = reduce(_or_else, readers), reduce(_or_else, reversed(readers))
    if not len(stored) or makers.min() < 0 or first.min() < 0 or not (loads_freed > loads).all():
        return None
    home = columns.device[stores]
    if not all((columns.device[own] == home).all() for own in (makers, stores_freed, loads, loads_freed, first)):
        return None
    producer = np.concatenate([makers, stores, stores, loads, last])
    return producer, np.concatenate([stores, stores_freed, loads, first, loads_freed])


def kept_cargo(shape: Shape, columns: Columns) -> Carried:
    """What the actions carry of a schedule that has `kept_edges`."""
    kind, stage = columns.kind, columns.stage
    numbers = np.flatnonzero(among(kind, (Kind.LOAD, Kind.STORE))).astype(np.int32)
    codes = kind[numbers].astype(np.int64) << 32 | stage[numbers]
    _, first, which = np.unique(codes, return_index=True, return_inverse=True)
    order = np.argsort(first)  # as they come first
    alike = [(Kind(kind[number]), int(stage[number])) for number in numbers[first[order]].tolist()]
    share = Fraction(1, shape.num_parts)
    distinct = [(member, Cargo("A", of, True, share, LANES[member][0])) for member, of in alike]
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


def _places(shape: Shape, columns: Columns) -> Places | None:
    """Stage, microbatch and part of each plain action as one number; None if one is out of range."""
    _, stage, index, part, _ = columns.plain
    for column, stop in (
        (stage, shape.num_backward_stages),
        (index, shape.total_microbatches),
        (part, shape.num_parts),
    ):
        if not len(column) or column.min() < 0 or column.max() >= stop:
            return None
    return (stage.astype(np.int64) * shape.total_microbatches + index) * shape.num_parts + part


def _or_else(numbers: Ints, others: Ints) -> Ints:
    return np.where(numbers < 0, others, numbers)
