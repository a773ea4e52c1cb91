"""BPipe: 1F1B whose full ranks move activations to ranks with room, and get them back for the backward.

Rank x holds p - x activations under 1F1B. Rank x < p/2 (the evictor) and rank p - 1 - x (the acceptor) form a pair. On
an evictor with more than K = ceil((p + 2)/2) microbatches in flight, the first K - 2 of every p - x microbatches keep
their activations. The others are stored as soon as their forward has run (STORE:A, lane d2h), and loaded one at a time,
each after the backward of the one before (LOAD:A, lane h2d). With 4 ranks and 5 microbatches, on rank 0, where one of
four stays:

    compute  0F0 0F1 0F2 0F3 0B0 0F4 0B1 0B2 0B3 0B4
    d2h      0STORE:A1>3 0FREE:A1 0STORE:A2>3 0FREE:A2 0STORE:A3>3 0FREE:A3
    h2d      0LOAD:A1>3 0FREE:A1 0LOAD:A2>3 0FREE:A2 0LOAD:A3>3 0FREE:A3

An evictor then holds the K - 2 that stay, one that was loaded and one that is about to leave; an acceptor its own x + 1
and at most p - x - K + 1 of its partner's. So no rank ever holds more than K, if links are so fast that a store ends
before the next forward begins. With recompute=none whole activations move, as in the paper; otherwise the inputs that a
stage recomputes from.

Source: Kim et al., "BPipe: Memory-Balanced Pipeline Parallelism for Training Large Language Models", ICML'23. The paper
does not fix which activations leave; the choice above is ours.
"""

from collections.abc import Sequence

from baselines.synchronous.one_f_one_b import one_f_one_b
from rpbench.ir.action import Kind, PlainRow, in_turn, joined, plain, plain_of
from rpbench.ir.schedule import Row, Schedule, Shape, check_one_stage
from rpbench.registry import schedule


@schedule("bpipe", source="Kim et al., ICML'23")
def bpipe(shape: Shape) -> Schedule:
    """1F1B; activations move between rank x and rank p - 1 - x."""
    check_one_stage("bpipe", shape)
    base = one_f_one_b(shape)
    p = shape.num_ranks
    rows = tuple(
        with_moved_activations(
            base.compute(rank), _evicted(shape, rank, base.compute(rank)), peer=p - 1 - rank, buffers=1
        )
        for rank in range(p)
    )
    return Schedule(shape, rows, name="bpipe", placement=base.placement)


def most_held(num_ranks: int) -> int:
    """Activations a rank holds at most: ceil((p + 2)/2)."""
    return -(-(num_ranks + 2) // 2)


def _evicted(shape: Shape, rank: int, row: Row) -> list[int]:
    """Places of the forwards whose activations are moved."""
    depth, limit = shape.num_ranks - rank, most_held(shape.num_ranks)
    if min(depth, shape.num_microbatches) <= limit:
        return []
    kinds, _, microbatches = plain_of(row).columns
    return [
        place
        for place, (kind, microbatch) in enumerate(zip(kinds, microbatches, strict=True))
        if kind == Kind.F and microbatch % shape.num_microbatches % depth >= limit - 2
    ]


def with_moved_activations(row: Row, moved: Sequence[int], *, peer: int | None, buffers: int) -> dict[str, Row]:
    """The lanes of a rank whose activations leave after some forwards and come back before their backwards.

    `moved` are the places of these forwards in its compute row, ascending. They go to a peer or, with None, to the
    host; at most `buffers` are loaded and not used yet.
    """
    if not moved:
        return {"compute": row}
    kinds, stages, microbatches = plain_of(row).columns
    named = list(zip(stages, microbatches, strict=True))
    chosen = {named[place] for place in moved}
    backwards = [place for place, kind in enumerate(kinds) if kind in (Kind.B, Kind.I) and named[place] in chosen]

    def moves(kind: Kind, places: Sequence[int]) -> PlainRow:
        return plain(kind, [stages[place] for place in places], [microbatches[place] for place in places], "A")

    loads, freed = moves(Kind.LOAD, backwards), moves(Kind.FREE, backwards)
    num_waiting = max(0, len(loads) - buffers)  # until one that came before has gone
    waiting = in_turn(freed[:num_waiting], loads[buffers:], 0)
    up = joined([loads[:buffers], waiting, freed[num_waiting:]])
    down = in_turn(moves(Kind.STORE, moved), moves(Kind.FREE, moved), 0)
    return {"compute": row, "h2d": _towards(peer, up), "d2h": _towards(peer, down)}


def _towards(peer: int | None, moves: PlainRow) -> Row:
    if peer is None:
        return moves
    return tuple(move if move.kind is Kind.FREE else move._replace(peer=peer) for move in moves)
