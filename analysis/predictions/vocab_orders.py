"""Orders of runs whose head is cut over all ranks: one barrier, two barriers, interlaced.

A pass S of a microbatch is a rank's share of the head. With 4 ranks and 8 microbatches, F = 1 and B = 2:

    one barrier    rank 0   F0 F1 F2 F3 S0 F4 S1 S2 S3 B0 F5 S4 B1 F6 S5 B2 F7 S6 B3 S7 B4 B5 B6 B7 S8
                   rank 3   F0 S0 F1 B0 S1 F2 B1 S2 F3 B2 S3 F4 B3 S4 F5 B4 S5 F6 B5 S6 F7 B6 S7 B7 S8
    two barriers   rank 0   F0 F1 F2 F3 S0 F4 S1 F5 S2 S3 S4 B0 F6 S5 B1 F7 S6 B2 S7 B3 S8 B4 B5 B6 B7
    interlaced     rank 0   F0 F1 F2 F3 F4 F5 S0 S1 S2 S3 B0 S4 F6 B1 S5 F7 B2 S6 B3 S7 B4 B5 B6 B7

What S waits for and what waits for it:

    one barrier    S(i) holds the logits of i and the weight gradient of i - 1. One all-reduce after all S(i) brings the
                   sums and the input gradient: the last stage's B(i) waits for it, ranks do not.
    two barriers   S(i) holds the logits of i and both gradients of i - 1, which wait for the sums of all S(i - 1). The
                   last stage's B(i) waits for all S(i + 1).
    interlaced     S(i) holds logits and gradients of i, and every rank waits inside it for the sums of all.

As actions: HF is the first half of a share, HB the second. With one barrier the second half is the all-reduce, on the
lane `net`, and all the work is HF: HB(i) waits for every HF(i), and the last stage's B(i) for every HB(i).

Source: Yeung, Qi, Lin and Wan, "Balancing Pipeline Parallelism with Vocabulary Parallelism", MLSys'25 (arXiv
2411.05288), and the orders of the released code (sail-sg/VocabularyParallelism@6191c3b), described, not copied.
"""

from collections.abc import Iterator
from itertools import chain, repeat
from typing import NamedTuple

from rpbench.ir.action import Action, Kind
from rpbench.ir.schedule import Row, Schedule, Shape

METHODS = ("vocab", "synctwice", "interlaced")  # as the measured runs name one barrier, two barriers, interlaced

Token = tuple[str, int]  # F, B or S, and its microbatch


class Turn(NamedTuple):
    """How a rank goes through the steady phase.

    Args:
        backward_first: its triple is B S F, not B F S.
        num_passes: passes S between the last forward of the warmup and the first triple.
    """

    backward_first: bool
    num_passes: int


def build_order(method: str, num_ranks: int, num_microbatches: int, forward: float, backward: float) -> Schedule:
    """The schedule of a method of `METHODS`, one stage on each rank.

    Args:
        forward, backward: times of a mean stage, which some orders depend on; any unit.

    Raises:
        ValueError: for an unknown method, or so few microbatches that the steady phase is empty.
    """
    if method not in METHODS:
        raise ValueError(f"method={method!r}: one of {', '.join(METHODS)}")
    if num_microbatches < 2 * num_ranks:
        raise ValueError(
            f"num_microbatches={num_microbatches}: orders with a cut head need two for each of {num_ranks} ranks; "
            f"take at least {2 * num_ranks}"
        )
    rows = tuple(
        _lanes(method, rank, tokens(method, rank, num_ranks, num_microbatches, forward, backward), num_microbatches)
        for rank in range(num_ranks)
    )
    shape = Shape(num_ranks, num_ranks, num_microbatches, num_head_shards=num_ranks)
    return Schedule(shape, rows, name=method)


def tokens(
    method: str, rank: int, num_ranks: int, num_microbatches: int, forward: float, backward: float
) -> tuple[Token, ...]:
    """The row of one rank; a cut pass S of a method with barriers is counted from 0 to `num_microbatches`."""
    if method == "interlaced":
        kinds = _interlaced(rank, num_ranks, num_microbatches)
    else:
        turn = _turns(num_ranks, forward, backward)[rank]
        kinds = _with_barriers(rank, num_ranks, num_microbatches, turn, int(method == "synctwice"))
    count = {
        "F": iter(range(num_microbatches)),
        "B": iter(range(num_microbatches)),
        "S": iter(range(num_microbatches + 1)),
    }
    return tuple((kind, next(count[kind])) for kind in kinds)


def _turns(num_ranks: int, forward: float, backward: float) -> list[Turn]:
    """The steady phase of every rank, found from the last rank upwards.

    Going up a rank, its forward is due one forward earlier; once that is a whole backward early, the rank runs its
    forward ahead of the pass S instead.
    """
    offset, was_late = 0.0, False
    turns = [Turn(True, 0)]
    for _ in range(num_ranks - 1):
        if was_late:
            early, was_late, offset = True, False, offset + backward - forward
        elif offset - forward >= -backward:
            early, offset = True, offset - forward
        else:
            early, was_late = False, True
        more = not (early and not turns[0].backward_first)
        turns.insert(0, Turn(early, turns[0].num_passes + more))
    return turns


def _with_barriers(rank: int, num_ranks: int, num_microbatches: int, turn: Turn, second: int) -> Iterator[str]:
    """Kinds of a row with one barrier, or with a `second`."""
    warmup = num_ranks - rank
    yield from chain("F" * warmup, "SF" * (1 + second), "S" * turn.num_passes)
    steady = num_microbatches - warmup - 1 - second
    yield from ("BSF" if turn.backward_first else "BFS") * steady
    passes_left = num_microbatches + 1 - (1 + second + turn.num_passes + steady)
    backwards_left = num_microbatches - steady
    paired = min(passes_left - (1 - second), backwards_left)  # with one barrier, the last pass ends the row
    yield from chain("BS" * paired, "B" * (backwards_left - paired), "S" * (passes_left - paired))


def _interlaced(rank: int, num_ranks: int, num_microbatches: int) -> Iterator[str]:
    """Kinds of an interlaced row."""
    warmup = min(3 * num_ranks // 2 - rank, num_microbatches)
    passes = min(num_ranks - rank, num_microbatches)
    ahead = max(0, warmup - passes - (num_ranks - rank - 1) // 2)
    triple = "FBS" if rank % 2 == num_ranks % 2 else "BFS"
    yield from chain("F" * warmup, "S" * passes, "BS" * ahead, triple * (num_microbatches - warmup))
    yield from chain("BS" * (warmup - passes - ahead), "B" * passes)


def _lanes(method: str, rank: int, row: tuple[Token, ...], num_microbatches: int) -> dict[str, Row]:
    """The lanes of a rank; the pass after the last microbatch has no logits."""
    compute: list[Action] = []
    for kind, microbatch in row:
        if kind != "S":
            compute.append(Action(Kind[kind], rank, microbatch))
        elif method == "interlaced":
            compute += [Action(Kind.HF, rank, microbatch), Action(Kind.HB, rank, microbatch)]
        else:
            if method == "synctwice" and microbatch > 0:
                compute.append(Action(Kind.HB, rank, microbatch - 1))
            if microbatch < num_microbatches:
                compute.append(Action(Kind.HF, rank, microbatch))
    if method != "vocab":
        return {"compute": tuple(compute)}
    sums = zip(repeat(Kind.HB), repeat(rank), range(num_microbatches))
    return {"compute": tuple(compute), "net": tuple(Action(*what) for what in sums)}
