"""Graph: a schedule as arrays in topological order, ready to be timed any number of times."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from itertools import chain
from operator import itemgetter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rpbench.cost.table import Members
from rpbench.ir.action import COMPUTE, MOVES, Kind
from rpbench.ir.analysis import Analysis, analysed
from rpbench.ir.moved_objects import Payload, carries, other_payload
from rpbench.ir.schedule import LANES, Schedule, ScheduleError, Shape, Weights
from rpbench.ir.waits.edges import edges_of
from rpbench.ir.waits.moves import has_transfers
from rpbench.sim.columns import ArrayRows, Bools, Columns, Ints, among, places_of, read_columns
from rpbench.sim.kernels import compiled, is_warm, order_lanes

# From this many actions on, compiled kernels are worth loading.
COMPILE_FROM = 20_000
Places = npt.NDArray[np.int64]
# The moves of an activation on the host, each once, with their lanes.
_MOVES = ((Kind.STORE, "d2h"), (Kind.FREE, "d2h"), (Kind.LOAD, "h2d"), (Kind.FREE, "h2d"))
_READERS = (Kind.R, Kind.B, Kind.I, Kind.W)  # in this order


@dataclass(frozen=True)
class Graph:
    """Columns of a schedule and its edges, the latter in topological positions.

    `order[i]` is the flat index of the i-th action. Edges that the order of a lane already implies are left out. A
    backward right behind the RECV of its gradient comes after the action before that: its recomputation need not wait.
    `slots` lists the keys that costs are looked up by: the kind and stage of an action, or of all parts of an OVERLAP.
    `slot` has the number of each action's key. Actions that move an object over a link have one slot a payload.
    """

    schedule: Schedule
    analysis: Analysis
    columns: Columns
    order: Ints
    previous: Ints
    pred_start: Ints
    pred: Ints
    crosses: Bools  # the edge leads to another device
    moves: Bools  # the edge carries a tensor
    gradient: Bools  # the edge is needed by the main phase of a backward only
    to_fused: Bools  # the edge brings a fused stage its input
    slot: Ints
    slots: tuple[Members, ...]
    payload: tuple[Payload | None, ...]  # by slot, the object its actions move over a link; empty: all None

    @property
    def num_actions(self) -> int:
        return len(self.order)

    @cached_property
    def rank(self) -> Ints:
        """Topological position of each flat index: the inverse of `order`."""
        return _inverse(self.order)

    @cached_property
    def before(self) -> Ints:
        """`previous` by flat index: the action that each one comes after in its lane; -1: none."""
        before = self.previous[self.rank]
        return np.where(before >= 0, self.order[before], -1)

    @cached_property
    def slots_on_devices(self) -> tuple[Ints, tuple[tuple[int, int], ...]]:
        """By topological position, the number of the pair of slot and device; and the (slot, device) of each number."""
        device = self.columns.device[self.order].astype(np.int64)
        codes, numbers = np.unique(self.slot.astype(np.int64) << 32 | device, return_inverse=True)
        return numbers.astype(np.int32), tuple((code >> 32, code & 0xFFFFFFFF) for code in codes.tolist())

    @cached_property
    def num_hops(self) -> int:
        """Dependencies between different devices, those a lane order implies included."""
        return int(self.crosses.sum())


def _inverse(order: Ints) -> Ints:
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order), dtype=np.int32)
    return rank


class Carried(NamedTuple):
    """Actions that use a link: their numbers, and the place in `distinct` of the object that each moves."""

    numbers: Ints
    which: Ints
    distinct: Sequence[tuple[Kind, Payload]]


def build_graph(schedule: Schedule | Analysis, rows: ArrayRows | None = None) -> Graph:
    """The graph of a schedule, and of its `rows` if they have been read; ScheduleError if no lane can move, as
    `rpbench.ir.checks.check` shows it with the table.
    """
    analysis = analysed(schedule)
    schedule = analysis.schedule
    rows = ArrayRows(schedule, read_columns(schedule)) if rows is None else rows
    columns = rows.columns
    kept = kept_edges(schedule, columns)
    received = _right_behind_their_gradient(columns)
    producer, consumer, moved = _edges(analysis, rows, kept, received)
    order = _order(schedule, columns, producer, consumer)

    num, rank = len(order), _inverse(order)
    sequence = np.argsort(rank[consumer], kind="stable")
    producer, consumer, moved = producer[sequence], consumer[sequence], moved[sequence]

    before = np.arange(-1, num - 1, dtype=np.int32)
    before[columns.lane_start[:-1][columns.lane_start[:-1] < num]] = -1
    before[received] = before[received - 1]
    before = before[order]
    previous = np.where(before >= 0, rank[before], -1).astype(np.int32)

    # Separate cuts hold back only the main phase: recomputation needs no more than its own saved input.
    kind = columns.kind[consumer]
    backward = (kind == Kind.B) | (kind == Kind.I)
    computed = moved != _MOVED["transfer"]
    gradient = backward & ((moved == _MOVED["gradient"]) | (schedule.shape.separate_cuts & computed))
    slots, slot = _slots(columns)
    slots, payload = _with_payload(slot, slots, _carried(analysis, columns, is_kept=kept is not None))
    return Graph(
        schedule,
        analysis,
        columns,
        order,
        previous,
        _starts(consumer, num, order),
        rank[producer],
        (columns.device[producer] != columns.device[consumer]) & computed,
        (moved != _MOVED["order"]) & computed,
        gradient,
        (kind == Kind.FB) & computed,
        slot[order].astype(np.int32),
        slots,
        payload,
    )


def _slots(columns: Columns) -> tuple[tuple[Members, ...], Ints]:
    """The keys that costs are looked up by, and the number of each action's key."""
    what, fused = columns.stage.astype(np.int64), list[Members]()
    if columns.sub:
        what[list(columns.sub)], held = columns.alike_inside
        fused = [tuple(map(_kind_and_stage, parts)) for parts in held]
    width = int(what.max(initial=0)) + 1
    codes = columns.kind * width + what
    distinct = np.bincount(codes) > 0
    slot = (np.cumsum(distinct) - 1)[codes]
    found = [(Kind(code // width), code % width) for code in np.flatnonzero(distinct).tolist()]
    return tuple(fused[what] if kind is Kind.OVERLAP else ((kind, what),) for kind, what in found), slot


_kind_and_stage = itemgetter(0, 1)


def _carried(analysis: Analysis, columns: Columns, *, is_kept: bool) -> Carried | None:
    """The objects that actions move, each once for a kind; None if all actions are on lane compute."""
    if not carries(analysis.schedule):
        return None
    if is_kept or not has_transfers(analysis.schedule):
        return carried_alike(analysis.schedule, columns)
    numbers, payloads = np.fromiter(analysis.payload, np.int32), list(analysis.payload.values())
    ascending = np.argsort(numbers, kind="stable")
    numbers, kinds = numbers[ascending], columns.kind[numbers[ascending]]
    codes = np.fromiter(map(id, payloads), np.int64)[ascending] * len(Kind) + kinds  # objects are slow to compare
    _, first, which = np.unique(codes, return_index=True, return_inverse=True)
    distinct: dict[tuple[Kind, Payload], int] = {}
    places = np.empty(len(first), np.int32)
    for place in np.argsort(first).tolist():  # as they come first; equal objects of two identities are one
        what = Kind(kinds[first[place]]), payloads[ascending[first[place]]]
        places[place] = distinct.setdefault(what, len(distinct))
    return Carried(numbers, places[which], list(distinct))


def carried_alike(schedule: Schedule, columns: Columns) -> Carried:
    """`_carried` of a schedule in which objects follow from kind, stage and lane: boundary tensors and activations."""
    names = [name for _, name, _ in schedule.items()]
    lane = np.repeat([LANES.index(name) for name in names], np.diff(columns.lane_start))
    numbers = np.flatnonzero(lane != LANES.index("compute")).astype(np.int32)
    width = int(columns.stage.max(initial=0)) + 1
    codes = (lane[numbers] * len(Kind) + columns.kind[numbers]) * width + columns.stage[numbers]
    _, first, which = np.unique(codes * 2 + columns.of_activations[numbers], return_index=True, return_inverse=True)
    order = np.argsort(first)  # as they come first
    distinct, places = list[tuple[Kind, Payload]](), np.full(len(first), -1, np.int32)
    for place in order.tolist():
        number = numbers[first[place]]
        kind, moved = Kind(columns.kind[number]), "A" if columns.of_activations[number] else None
        payload = other_payload(schedule, kind, int(columns.stage[number]), moved, LANES[lane[number]])
        if payload is not None:
            places[place] = len(distinct)
            distinct.append((kind, payload))
    moves = places[which] >= 0
    return Carried(numbers[moves], places[which][moves], distinct)


def _with_payload(
    slot: Ints, slots: tuple[Members, ...], carried: Carried | None
) -> tuple[tuple[Members, ...], tuple[Payload | None, ...]]:
    """The slots, with one more for every kind, stage and payload; `slot` is changed in place."""
    if carried is None:
        return slots, ()
    slot[carried.numbers] = len(slots) + carried.which
    more = tuple(((kind, payload.stage),) for kind, payload in carried.distinct)
    return slots + more, (None,) * len(slots) + tuple(payload for _, payload in carried.distinct)


_MOVED = {"order": 0, "activation": 1, "gradient": 2, "transfer": 3}


def _right_behind_their_gradient(columns: Columns) -> Ints:
    """The backwards with the RECV of their gradient right before them in their lane."""
    backward = among(columns.kind[1:], (Kind.B, Kind.I)) & (columns.kind[:-1] == Kind.RECV_B)
    for column in (columns.stage, columns.index, columns.part):
        backward &= column[1:] == column[:-1]
    begins_lane = np.zeros(len(columns.kind) + 1, bool)
    begins_lane[columns.lane_start] = True
    return np.flatnonzero(backward & ~begins_lane[1:-1]).astype(np.int32) + 1


def _edges(
    analysis: Analysis, rows: ArrayRows, kept: tuple[Ints, Ints] | None, received: Ints
) -> tuple[Ints, Ints, Ints]:
    """Producer, consumer (flat indices) and what moves, without the edges that the order of a lane implies.

    The edges of transfers come last, and take no hop. `received`: as of `_right_behind_their_gradient`.
    """
    columns = rows.columns
    pairs = analysis.transfer_edges if kept is None else []
    transfers = kept or np.fromiter(chain.from_iterable(pairs), np.int32, 2 * len(pairs)).reshape(-1, 2).T
    found = list(edges_of(rows))
    producer = np.concatenate([*(edges.producers for edges in found), transfers[0]])
    consumer = np.concatenate([*(edges.consumers for edges in found), transfers[1]])
    what = np.array([*(_MOVED[edges.moved] for edges in found), _MOVED["transfer"]], np.int8)
    moved = np.repeat(what, [*(len(edges.consumers) for edges in found), len(transfers[0])])
    lane = np.repeat(np.arange(len(columns.lane_start) - 1, dtype=np.int32), np.diff(columns.lane_start))
    needed = (lane[producer] != lane[consumer]) | (producer >= consumer)
    behind = np.zeros(len(lane), bool)
    behind[received] = True
    needed |= behind[consumer] & (producer == consumer - 1)
    needed &= (producer >= 0) & (consumer >= 0)
    return producer[needed], consumer[needed], moved[needed]


def _starts(consumer: Ints, num: int, order: Ints | None = None) -> Ints:
    """Where the edges of each action begin among edges sorted by consumer; actions by number, or in an order."""
    counts = np.bincount(consumer, minlength=num)
    if order is not None:
        counts = counts[order]
    return np.concatenate(([0], np.cumsum(counts))).astype(np.int32)


def _order(schedule: Schedule, columns: Columns, producer: Ints, consumer: Ints) -> Ints:
    num = len(columns.kind)
    sequence = np.argsort(consumer, kind="stable")
    pred = producer[sequence]
    pred_start = _starts(consumer, num)
    order = np.zeros(num, np.int32)
    done = np.zeros(num, bool)
    heads = columns.lane_start[:-1].copy()
    waiter = np.full(num, -1, np.int32)
    next_waiter = np.full(len(heads), -1, np.int32)
    arrays = (columns.lane_start, pred_start, pred, order, done, heads, waiter, next_waiter)
    if num >= COMPILE_FROM or is_warm():
        count = compiled(order_lanes)(*arrays)
    else:
        lists = [array.tolist() for array in arrays]
        count = order_lanes(*lists)
        order, heads = np.asarray(lists[3], np.int32), np.asarray(lists[5], np.int32)
    if count < num:
        _refuse(schedule, columns, heads)
    return order


def _refuse(schedule: Schedule, columns: Columns, heads: Ints) -> None:
    rows = list(schedule.items())
    stuck = [
        f"device {device} waits at {row[head - start]}"
        for (device, _, row), head, start in zip(rows, heads.tolist(), columns.lane_start.tolist(), strict=False)
        if head - start < len(row)
    ]
    raise ScheduleError("no device can move: " + "; ".join(stuck[:4]) + "; reorder the rows, `show` prints them")


# --- activations that wait on the host, on columns ---


def kept_edges(schedule: Schedule, columns: Columns) -> tuple[Ints, Ints] | None:
    """The edges of transfers, where only activations move, in the plainest form.

    The device that makes and uses an activation stores it once (lane d2h), loads it once (lane h2d), and frees it once
    after each of these. Large schedules that offload have few other transfers.
    `rpbench.ir.waits.saved_inputs.activation_edges` matches all other schedules action by action, with the same edges,
    and shows faults. None for a schedule with no transfers, with others, or with a fault in some.
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
    """Finds the plain actions of a kind and lane by their places."""

    def __init__(self, schedule: Schedule, columns: Columns) -> None:
        lanes = np.array([LANES.index(name) for _, name, _ in schedule.items()], np.int8)
        self._kind, _, _, _, self._owner = columns.plain
        self._lane = np.repeat(lanes, np.diff(columns.lane_start))[self._owner]
        self._places = places_of(schedule.shape, columns)

    def of(self, kind: Kind, lane: str) -> tuple[Places, Ints]:
        """Places and numbers of all actions of a kind on a lane, places ascending."""
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


def _may_be_kept(schedule: Schedule, columns: Columns) -> bool:
    """Whether only activations move, and are used on the device that made them."""
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
