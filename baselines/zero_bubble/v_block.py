"""V-Min and V-Half: a building block, repeated every six slots, whose lifespans set the memory.

Rank r holds stages r and 2p-1-r, so the pipeline runs down the ranks and up again (a V) and the loss is on rank 0. A
microbatch takes six unit slots on every rank: F, I (input gradient) and W (weight gradient) of both chunks. A block
says in which slot each F and I of the first microbatch starts; the next microbatch follows six slots later. How long a
block holds its activations decides how much memory the schedule takes. Four steps make the order:

    repeat    the block for every microbatch
    reorder   into free slots before a rank's first turn (F of its second chunk) or after its last new microbatch,
              as long as no rank holds more at any time than the fullest does anyway
    weights   W when a rank would wait, or when it needs the room
    squeeze   keep each rank's order, drop the empty slots

This is the order for F = I = W. For other times, the last two steps use these times: W fills gaps by several rules,
before and after waiting ranks have pulled later passes forward. Among orders that hold no more memory, the one with the
shortest device-local span is taken; it may end later only by less than its span is shorter.

V-Min with 3 ranks and 4 microbatches:

    rank 0   0F0 0F1 0F2 5F0 5I0 5W0 5F1 0I0 5I1 0W0 5W1 5F2 0F3 0I1 5I2 0W1 5W2 5F3 5I3 0I2 5W3 0W2 0I3 0W3
    rank 1   1F0 1F1 4F0 4I0 4F1 4W0 1I0 1F2 1W0 4I1 4F2 4W1 1I1 1F3 1W1 4I2 4F3 4W2 1I2 4I3 1W2 4W3 1I3 1W3
    rank 2   2F0 3F0 2F1 3F1 3I0 2I0 3W0 2W0 2F2 3F2 3I1 2I1 3W1 2W1 2F3 3F3 3I2 2I2 3W2 2W2 3I3 2I3 3W3 2W3

With `by_priority`, ours, V-Min takes an order without a block where one ends earlier within the same memory
(`order_by_priority`).

In flight, in chunks: 2*((p+4)//3) for V-Min and 2*((p+2)//2) for V-Half, for many ranks a third and a half of 1F1B's
2p.

Source: Qi et al., "Pipeline Parallelism with Controllable Memory", NeurIPS'24 (arXiv 2405.15362).
The paper writes B for what is I here.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate, chain
from typing import NamedTuple

from baselines.bidirectional.dualpipe_v import check_v, v_placement
from rpbench.ir.action import Kind
from rpbench.ir.costs import StageCosts, unit_costs
from rpbench.ir.schedule import Schedule, Shape
from rpbench.ordering import list_order
from rpbench.ordering.list_order import (
    PASSES_TO_TRY,
    PULLS,
    ROUNDING,
    Fill,
    Lanes,
    Rows,
    Timed,
    as_many_as_fit,
    pull_rows,
    repeat_steps,
    time_rows,
)
from rpbench.ordering.loops import Means, means
from rpbench.registry import schedule

SLOTS = 6  # of a microbatch on a rank: F, I and W of two chunks

Block = tuple[int, int, int, int]  # first slots of F(r), F(2p-1-r), I(2p-1-r), I(r) on rank r


class Pass(NamedTuple):
    """A forward or an input gradient of a chunk, or a weight gradient; chunk 1 is the upper one."""

    kind: Kind
    chunk: int
    microbatch: int


# The passes of a block in the order a microbatch takes them.
PASSES = ((Kind.F, 0), (Kind.F, 1), (Kind.I, 1), (Kind.I, 0))
Slots = dict[Pass, int]  # where the passes of a rank stand


@schedule(
    "v_min",
    source="Qi et al., NeurIPS'24",
    looped=True,
    chunks=2,
    needs_costs=True,
    searched={"by_priority": (False, True)},
)
def v_min(shape: Shape, costs: StageCosts, *, by_priority: bool = False) -> Schedule:
    """Every rank keeps at most 2 * ((p + 4) // 3) chunk activations.

    With `by_priority`, an order without a block is taken where it ends earlier and holds no more.
    """
    p = shape.num_ranks
    shift = 0 if p % 3 else 2  # without it, two passes of a rank would meet in one slot
    blocks = [(rank, 2 * p - 1 - rank, 2 * p + shift + rank, 4 * p + shift - 1 - rank) for rank in range(p)]
    return _block_schedule("v_min", shape, costs, tuple(blocks), by_priority)


@schedule("v_half", source="Qi et al., NeurIPS'24", looped=True, chunks=2, needs_costs=True)
def v_half(shape: Shape, costs: StageCosts) -> Schedule:
    """Every rank keeps at most 2 * ((p + 2) // 2) chunk activations."""
    p = shape.num_ranks
    shift = 0 if p % 2 else 3
    blocks = [(2 * rank, 3 * p - 2 - rank, 3 * p + shift - 1 + 2 * rank, 6 * p + shift - 2 - rank) for rank in range(p)]
    return _block_schedule("v_half", shape, costs, tuple(blocks))


def v_schedule(name: str, shape: Shape, rows: Rows) -> Schedule:
    """A schedule in V placement that repeats the passes of one step."""
    return Schedule(shape, repeat_steps(shape, rows), name=name, placement=v_placement(shape))


def stage_passes(orders: Sequence[Sequence[Pass]]) -> list[list[list_order.Pass]]:
    """Passes of chunks as those of stages in V placement."""
    top = 2 * len(orders) - 1
    return [
        [list_order.Pass(kind, top - rank if chunk else rank, microbatch) for kind, chunk, microbatch in order]
        for rank, order in enumerate(orders)
    ]


def tune(made: Timed, costs: StageCosts, limit: int) -> Timed:
    """The order with the shortest span that these times lead to.

    `made` is the order for F = I = W; what is found spans no more, ends later by no more than it spans less, and holds
    no more than the limit of chunk activations on a rank.
    """
    if {*costs.forward, *costs.input_grad, *costs.weight_grad} == {costs.forward[0]} and not costs.hop:
        return made
    limit = max(limit, made.peak)
    found = made
    for trial in as_many_as_fit(_trials(made, costs, limit), sum(map(len, made.rows))):
        later = trial.makespan - made.makespan
        sound = trial.peak <= limit and later <= made.span - trial.span + ROUNDING * made.span
        if sound and trial.span < found.span * (1 - ROUNDING):
            found = trial
    return found


def _trials(made: Timed, costs: StageCosts, limit: int) -> Iterator[Timed]:
    rank_of = v_rank_of(costs.num_stages)
    rows = Lanes.of(made.rows).without(Kind.W)
    for fill in (Fill.SPARE, Fill.MOST, Fill.NONE, Fill.ANY):
        yield time_rows(rows, rank_of, costs, fill=fill, limit=limit)
    for how in PULLS:
        pulled = pull_rows(rows, rank_of, costs, limit, how)
        for fill in (Fill.NONE, Fill.SPARE, Fill.MOST):
            yield time_rows(pulled, rank_of, costs, fill=fill, limit=limit)


def v_rank_of(num_stages: int) -> list_order.RankOf:
    """Down the ranks and up again."""
    return lambda stage, _: min(stage, num_stages - 1 - stage)


def _block_schedule(
    name: str, shape: Shape, costs: StageCosts, blocks: tuple[Block, ...], by_priority: bool = False
) -> Schedule:
    check_v(name, shape)
    return v_schedule(name, shape, _rows(replace(shape, num_steps=1), costs, blocks, by_priority))


@lru_cache(maxsize=64)  # a partition search asks for an order several times, and for more steps of it
def _rows(shape: Shape, costs: StageCosts, blocks: tuple[Block, ...], by_priority: bool) -> Rows:
    equal, limit = _at_equal_times(shape, blocks, means())
    made = _tuned(equal, shape, costs, limit)
    return (_shorter(made, shape, costs, limit) if by_priority else made).rows


# Cached: a partition search asks for the same blocks under many times. `using` tells which arrays hold the rows.


@lru_cache(maxsize=8)
def _at_equal_times(shape: Shape, blocks: tuple[Block, ...], using: Means) -> tuple[Timed, int]:
    """The order of the blocks for F = I = W, and the most chunk activations on a rank."""
    m = shape.num_microbatches
    slots = [
        {Pass(*what, mb): first + SLOTS * mb for what, first in zip(PASSES, block, strict=True) for mb in range(m)}
        for block in blocks
    ]
    held = [_held(rank) for rank in slots]
    limit = max(map(max, held))
    _reorder(slots, held, limit, blocks)
    return _squeezed(stage_passes([sorted(rank, key=rank.__getitem__) for rank in slots]), shape, limit), limit


@lru_cache(maxsize=8)
def _at_equal_times_by_priority(shape: Shape, limit: int, using: Means) -> Timed | None:
    """The order by priority for F = I = W; None where there is none.

    The lower chunk may hold two less than the limit: of all caps, that gives the shortest order for most numbers of
    ranks.
    """
    orders = order_by_priority(shape.num_ranks, shape.num_microbatches, limit, limit - 2)
    return None if orders is None else _squeezed(orders, shape, limit)


def _squeezed(orders: Rows, shape: Shape, limit: int) -> Timed:
    """Orders for F = I = W with W added and empty slots removed."""
    return time_rows(orders, v_rank_of(shape.num_stages), unit_costs(shape), fill=Fill.ANY, limit=limit)


def _tuned(equal: Timed, shape: Shape, costs: StageCosts, limit: int) -> Timed:
    """The order that these times lead to from that for F = I = W."""
    is_equal = costs == unit_costs(shape)
    return tune(equal if is_equal else time_rows(equal.rows, v_rank_of(shape.num_stages), costs), costs, limit)


def _shorter(made: Timed, shape: Shape, costs: StageCosts, limit: int) -> Timed:
    """The order, or one by priority where that spans less, ends no later and holds no more than the limit.

    Orders with too many passes to try are left as they are.
    """
    is_short = SLOTS * shape.num_ranks * shape.num_microbatches <= PASSES_TO_TRY
    equal = _at_equal_times_by_priority(shape, limit, means()) if is_short else None
    if equal is None:
        return made
    trial = _tuned(equal, shape, costs, limit)
    ends_no_later = trial.makespan <= made.makespan * (1 + ROUNDING)
    return trial if trial.span < made.span * (1 - ROUNDING) and ends_no_later and trial.peak <= limit else made


def _needs(what: Pass, rank: int, last: int) -> tuple[int, Pass] | None:
    """The rank and pass whose output a pass needs; `last` is the last rank."""
    kind, chunk, microbatch = what
    downwards = (kind is Kind.F) == (chunk == 0)
    if downwards and rank:
        return rank - 1, what
    if not downwards and rank < last:
        return rank + 1, what
    if not downwards:
        return last, Pass(kind, 1 - chunk, microbatch)  # the turn from one chunk to the other
    return (0, Pass(Kind.F, 1, microbatch)) if kind is Kind.I else None  # the loss, the tokens


# --- reorder ------------------------------------------------------------------------------------------------


def _held(slots: Slots) -> list[int]:
    """Chunk activations on a rank in every slot, if each W takes the first slot that is free for it."""
    at = {slot: what for what, slot in slots.items()}
    change: dict[int, int] = {}
    waiting, slot, last = 0, 0, max(at)
    while waiting or slot <= last:
        what = at.get(slot)
        if what is None:
            if waiting:
                waiting -= 1
                change[slot + 1] = change.get(slot + 1, 0) - 1
        elif what.kind is Kind.F:
            change[slot] = change.get(slot, 0) + 1
        else:
            waiting += 1
        slot += 1
    return list(accumulate(change.get(moment, 0) for moment in range(slot)))


def _reorder(slots: list[Slots], held: list[list[int]], limit: int, blocks: Sequence[Block]) -> None:
    """Move passes, first come first served, to free slots before a rank's first turn or after its newest microbatch."""
    used = [set(rank.values()) for rank in slots]
    first_turns = [block[1] for block in blocks]
    newest = [block[0] + len(row) // len(PASSES) * SLOTS - SLOTS for block, row in zip(blocks, slots, strict=True)]
    standing = [(slot, rank, what) for rank, row in enumerate(slots) for what, slot in row.items()]
    for slot, rank, what in sorted(standing):
        need = _needs(what, rank, len(slots) - 1)
        ready = slots[need[0]][need[1]] + 1 if need else 0
        if ready >= first_turns[rank] and slot <= newest[rank] + 1:  # true of nearly all passes
            continue
        if what.kind is Kind.F:  # which holds its activations from then on: as far back as there is room
            room = slot
            while room > ready and held[rank][room - 1] < limit:
                room -= 1
            ready = room
        for earlier in chain(range(ready, min(slot, first_turns[rank])), range(max(ready, newest[rank] + 1), slot)):
            if earlier in used[rank]:
                continue
            for other in range(earlier, slot) if what.kind is Kind.F else ():
                held[rank][other] += 1
            used[rank].remove(slot)
            used[rank].add(earlier)
            slots[rank][what] = earlier
            break


# --- by priority ---------------------------------------------------------------------------------------------

# Kind and whether it is of the upper chunk, the most urgent first.
_URGENCY = ((Kind.F, True), (Kind.F, False), (Kind.I, True), (Kind.I, False))


def order_by_priority(
    num_ranks: int, num_microbatches: int, limit: int, of_lower: int
) -> list[list[list_order.Pass]] | None:
    """F and I of every rank: in every unit slot it takes the most urgent that is ready and has room.

    The most urgent is a forward of the upper chunk, then one of the lower, then an input gradient of the upper, then of
    the lower; a weight gradient comes when nothing else can run. A forward takes room for a chunk of activations. All
    passes take a slot and hops take none. A rank has at most `limit` of these chunks, and `of_lower` of its lower one;
    the rest stays free, so that a microbatch can turn. None where no rank can go on.
    """
    top = 2 * num_ranks - 1
    done = {kind: [0] * (top + 1) for kind in (Kind.F, Kind.I)}  # by stage; microbatches come in order
    weights: list[list[int]] = [[] for _ in range(num_ranks)]  # stages whose W is to be done
    held = [0] * (top + 1)  # chunk activations, by stage
    rows: list[list[list_order.Pass]] = [[] for _ in range(num_ranks)]

    def arrived(kind: Kind, stage: int) -> int:
        """How many microbatches have come to a pass."""
        if kind is Kind.F:
            return done[kind][stage - 1] if stage else num_microbatches
        return done[Kind.I][stage + 1] if stage < top else done[Kind.F][stage]

    def chosen_by(rank: int) -> list_order.Pass | None:
        """The most urgent pass that is ready at the beginning of the slot."""
        lower, upper = rank, top - rank
        is_full = held[lower] + held[upper] >= limit
        for kind, is_upper in _URGENCY:
            stage = upper if is_upper else lower
            no_room = kind is Kind.F and (is_full or (not is_upper and held[lower] >= of_lower))
            if not no_room and done[kind][stage] < arrived(kind, stage):
                return list_order.Pass(kind, stage, done[kind][stage])
        return None

    while done[Kind.I][0] < num_microbatches:
        chosen = [chosen_by(rank) for rank in range(num_ranks)]
        if not any(chosen) and not any(weights):
            return None
        for rank, what in enumerate(chosen):
            if what is not None:
                done[what.kind][what.stage] += 1
                rows[rank].append(what)
                if what.kind is Kind.F:
                    held[what.stage] += 1
                else:
                    weights[rank].append(what.stage)
            elif weights[rank]:
                held[weights[rank].pop(0)] -= 1
    return rows
