"""BitPipe: two pipelines in opposite directions, each a V of two chunks on every rank.

Of 2p stages, the pipeline that goes down has stage s on rank s and, after the turn at stage p, on rank 2p - 1 - s; the
pipeline that goes up is its mirror image. So a rank holds four chunks, of which two are copies of chunks of rank p - 1
- r, and a turn needs no transfer. A unit is p microbatches; the first half goes down. With 4 ranks and 4 microbatches,
of which 2 and 3 go up:

    rank 0   0F0 0F1 3F2 4F2 3F3 4F3 7F0 7B0 7F1 7B1 4B2 3B2 4B3 3B3 0B0 0B1
    rank 1   1F0 2F2 1F1 2F3 5F2 6F0 5F3 6F1 6B0 5B2 6B1 5B3 2B2 1B0 2B3 1B1
    rank 2   1F2 2F0 1F3 2F1 5F0 6F2 5F1 6F3 6B2 5B0 6B3 5B1 2B0 1B2 2B1 1B3
    rank 3   0F2 0F3 3F0 4F0 3F1 4F1 7F2 7B2 7F3 7B3 4B0 3B0 4B1 3B1 0B2 0B3

A rank holds two copies of the weights, whose gradients are summed before the step.

Source: Wu et al., "BitPipe: Bidirectional Interleaved Pipeline Parallelism for Accelerating Large Models Training",
AAAI'25 (arXiv 2410.19367); order and placement as in its released code.
"""

from collections.abc import Iterator
from itertools import chain

from baselines.bidirectional.dualpipe import check_even_ranks
from baselines.bidirectional.dualpipe_v import check_v, v_placement
from rpbench.ir.action import Action, Kind
from rpbench.ir.schedule import Schedule, Shape, check_even, step_rows
from rpbench.registry import schedule


@schedule("bitpipe", source="Wu et al., AAAI'25", looped=True, chunks=2)
def bitpipe(shape: Shape) -> Schedule:
    """Of the p microbatches of a unit, the first half goes down and the second up."""
    p = shape.num_ranks
    check_v("bitpipe", shape)
    check_even_ranks("bitpipe", shape)
    check_even("bitpipe", shape, "ranks")
    rows = step_rows(shape, lambda rank, batch: _step(p, rank, batch))
    placement = tuple((rank, p - 1 - rank) for (rank,) in v_placement(shape))
    return Schedule(shape, rows, name="bitpipe", placement=placement)


def _step(p: int, rank: int, batch: range) -> Iterator[Action]:
    """The units of a step, each beginning where the one before it drains."""
    units = [batch[first : first + p] for first in range(0, len(batch), p)]
    forwards = chain.from_iterable(_unit(Kind.F, p, rank, unit) for unit in units)
    backwards = chain.from_iterable(_unit(Kind.B, p, rank, unit) for unit in units)
    num_warmup = p + p // 2 + min(rank, p - 1 - rank)
    num_pairs = 2 * p - num_warmup
    counts = [(num_warmup, 0), *[(1, 1)] * num_pairs]
    for _ in units[1:]:
        rest = num_warmup - num_pairs + 1
        counts += [(0, rest), *[(1, 1)] * (num_pairs - 1), (rest, 0), *[(1, 1)] * num_pairs]
    for num_forward, num_backward in (*counts, (0, num_warmup)):
        yield from (next(forwards) for _ in range(num_forward))
        yield from (next(backwards) for _ in range(num_backward))


def _unit(kind: Kind, p: int, rank: int, unit: range) -> Iterator[Action]:
    """A rank's forwards or backwards of a unit: each symbol takes the next microbatch of its chunk.

    M, M2: first and second chunk of the direction that enters at this end; O, O2: of the other direction.
    """
    half = p // 2
    down, up = unit[:half], unit[half:]
    end = min(rank, p - 1 - rank)
    mine, other = (down, up) if rank < half else (up, down)
    near, far = half - end, end  # microbatches of the half before, and beside, the other direction's
    stages = {"M": end, "M2": 2 * p - 1 - end, "O": p - 1 - end, "O2": p + end}
    turns = {
        Kind.F: ["M"] * near + ["O", "M"] * far + ["O", "O2"] * near + ["M2", "O2"] * far + ["M2"] * near,
        Kind.B: ["M2"] * near + ["O2", "M2"] * far + ["O2", "O"] * near + ["M", "O"] * far + ["M"] * near,
    }
    following = {name: iter(mine if name.startswith("M") else other) for name in stages}
    return (Action(kind, stages[name], next(following[name])) for name in turns[kind])
