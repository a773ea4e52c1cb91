"""Graph: a schedule as arrays in topological order, ready to be timed any number of times."""

from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from operator import itemgetter

import numpy as np

from rpbench.cost.table import Members
from rpbench.ir.action import Kind
from rpbench.ir.analysis import Analysis, analysed
from rpbench.ir.moved_objects import Cargo, carries
from rpbench.ir.schedule import Schedule, ScheduleError
from rpbench.ir.waits.edges import edges_of
from rpbench.sim.columns import ArrayRows, Bools, Columns, Ints, read_columns
from rpbench.sim.kept import Carried, kept_cargo, kept_edges
from rpbench.sim.kernels import compiled, is_warm, order_lanes

# From this many actions on, compiled kernels are worth loading.
COMPILE_FROM = 20_000


@dataclass(frozen=True)
class Graph:
    """Columns of a schedule and its edges, the latter in topological positions.

    `order[i]` is the flat index of the i-th action. Edges within a lane that its order already implies are left
    out. `slot` numbers what costs are looked up by: the kind and stage of an action, or of all that an OVERLAP
    holds; `slots` lists them. Actions that carry something over a link have slots of their own, one for each cargo.
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
    cargo: tuple[Cargo | None, ...] = ()  # by slot, what its actions carry over a link; empty: nothing does

    @property
    def num_actions(self) -> int:
        return len(self.order)

    @cached_property
    def rank(self) -> Ints:
        """Topological position of each flat index: the inverse of `order`."""
        rank = np.empty_like(self.order)
        rank[self.order] = np.arange(len(self.order), dtype=np.int32)
        return rank

    @cached_property
    def slots_on_devices(self) -> tuple[Ints, tuple[tuple[int, int], ...]]:
        """`slot` told apart by device as well, and the (slot, device) pairs that it numbers then."""
        device = self.columns.device[self.order].astype(np.int64)
        codes, numbers = np.unique(self.slot.astype(np.int64) << 32 | device, return_inverse=True)
        return numbers.astype(np.int32), tuple((code >> 32, code & 0xFFFFFFFF) for code in codes.tolist())

    @cached_property
    def num_hops(self) -> int:
        """Dependencies between different devices, those a lane order implies included."""
        return int(self.crosses.sum())


def build_graph(schedule: Schedule | Analysis, rows: ArrayRows | None = None) -> Graph:
    """The graph of a schedule.

    Args:
        rows: of its actions, where they have been read.

    Raises:
        ScheduleError: if no lane can move on; `rpbench.ir.checks.check` shows the same with the table.
    """
    analysis = analysed(schedule)
    schedule = analysis.schedule
    rows = ArrayRows(schedule, read_columns(schedule)) if rows is None else rows
    columns = rows.columns
    kept = kept_edges(schedule, columns)
    producer, consumer, moved = _edges(analysis, rows, kept)
    order = _order(schedule, columns, producer, consumer)

    num = len(columns.kind)
    rank = np.empty(num, np.int32)
    rank[order] = np.arange(num, dtype=np.int32)
    sequence = np.argsort(rank[consumer], kind="stable")
    producer, consumer, moved = producer[sequence], consumer[sequence], moved[sequence]

    before = np.arange(-1, num - 1, dtype=np.int32)
    before[columns.lane_start[:-1][columns.lane_start[:-1] < num]] = -1
    before = before[order]
    previous = np.where(before >= 0, rank[before], -1).astype(np.int32)

    # Separate cuts hold back only the main phase: recomputation needs no more than its own kept input.
    kind = columns.kind[consumer]
    backward = (kind == Kind.B) | (kind == Kind.I)
    computed = moved != _MOVED["transfer"]
    gradient = backward & ((moved == 2) | (schedule.shape.separate_cuts & computed))
    slots, slot = _slots(columns)
    carried = _carried(analysis, columns) if kept is None else kept_cargo(schedule.shape, columns)
    slots, cargo = _with_cargo(slot, slots, carried)
    return Graph(
        schedule,
        analysis,
        columns,
        order,
        previous,
        _starts(consumer, num, order),
        rank[producer],
        (columns.device[producer] != columns.device[consumer]) & computed,
        (moved > 0) & computed,
        gradient,
        (kind == Kind.FB) & computed,
        slot[order].astype(np.int32),
        slots,
        cargo,
    )


def _slots(columns: Columns) -> tuple[tuple[Members, ...], Ints]:
    """What costs are looked up by, and for each action which of these."""
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


def _carried(analysis: Analysis, columns: Columns) -> Carried | None:
    """What actions carry, each cargo once for a kind; None where nothing uses a link."""
    if not carries(analysis.schedule):
        return None
    carried, kinds = analysis.cargo, columns.kind.tolist()
    numbers = sorted(carried)
    distinct: dict[tuple[Kind, Cargo], int] = {}
    known: dict[tuple[int, int], int] = {}  # the same by identity: equal cargoes are few objects, and slow to compare
    chosen = []
    for number in numbers:
        kind, cargo = kinds[number], carried[number]
        place = known.get((kind, id(cargo)))
        if place is None:
            place = known[kind, id(cargo)] = distinct.setdefault((Kind(kind), cargo), len(distinct))
        chosen.append(place)
    return Carried(np.array(numbers, np.int32), np.array(chosen, np.int32), list(distinct))


def _with_cargo(
    slot: Ints, slots: tuple[Members, ...], carried: Carried | None
) -> tuple[tuple[Members, ...], tuple[Cargo | None, ...]]:
    """The slots, with one more for every kind, stage and cargo; `slot` is changed in place."""
    if carried is None:
        return slots, ()
    slot[carried.numbers] = len(slots) + carried.which
    more = tuple(((kind, cargo.stage),) for kind, cargo in carried.distinct)
    return slots + more, (None,) * len(slots) + tuple(cargo for _, cargo in carried.distinct)


_MOVED = {"order": 0, "activation": 1, "gradient": 2, "transfer": 3}


def _edges(analysis: Analysis, rows: ArrayRows, kept: tuple[Ints, Ints] | None) -> tuple[Ints, Ints, Ints]:
    """Producer, consumer (flat indices) and what moves, less the edges a lane's own order implies.

    Those that LOAD, STORE, FREE and their like add come last, and take no hop.
    """
    columns = rows.columns
    pairs = analysis.transfer_edges if kept is None else []
    transfers = kept or np.fromiter(chain.from_iterable(pairs), np.int32, 2 * len(pairs)).reshape(-1, 2).T
    found = [(edges.producers, edges.consumers, _MOVED[edges.moved]) for edges in edges_of(rows)]
    present = [(producers >= 0) & (consumers >= 0) for producers, consumers, _ in found]
    at_once = list(zip(found, present, strict=True))
    producer = np.concatenate([*(edges[0][there] for edges, there in at_once), transfers[0]])
    consumer = np.concatenate([*(edges[1][there] for edges, there in at_once), transfers[1]])
    counts = np.array([*map(np.count_nonzero, present), len(transfers[0])], int)
    moved = np.repeat(np.array([*(what for _, _, what in found), _MOVED["transfer"]], np.int8), counts)
    lane = np.repeat(np.arange(len(columns.lane_start) - 1, dtype=np.int32), np.diff(columns.lane_start))
    needed = (lane[producer] != lane[consumer]) | (producer >= consumer)
    return producer[needed], consumer[needed], moved[needed]


def _starts(consumer: Ints, num: int, order: Ints | None = None) -> Ints:
    """Where the edges of each action begin among edges sorted by consumer: by number, or in an order."""
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
