"""GIS: interleaved 1F1B in groups, timed so that activations live as short as possible.

Stage s lives on rank s mod p. A rank runs a group of g microbatches on its first chunk, then on its next, each
microbatch three slots after the one before: a forward takes one slot, a backward two. The order is made on this grid of
slots and then run as early as possible. Groups of p wait least; smaller groups hold less. With 2 ranks, 4 microbatches,
2 chunks and groups of 2 (I and W are adjacent, written B for short):

    rank 0   0F0 0F1 2F0 2F1 2B0 0F2 2B1 0F3 0B0 2F2 0B1 2F3 2B2 2B3 0B2 0B3
    rank 1   1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3

On device d, in a period of 3gv slots and with k = ceil(ceil(p/2)/g), member i of a group runs chunk c forward at

    3kgc + 3i + d + 3g floor(c gcd(v, k)/v)

and chunk v - 1 - c backward equally long after the slot at which the first backward of the last chunk can begin, 3(p -
1 - d) + 1 after its forward. For p ranks, 2 chunks and groups of p a rank holds 2p chunk activations, where
`interleaved_1f1b` holds 3p - 1.

Source: Wan et al., "PipeOffload: Improving Scalability of Pipeline Parallelism with Memory Optimization", arXiv
2503.01328: its orders without offloading (groups of p, and of p/2); the grid as in its released code.
"""

from collections.abc import Iterator
from math import ceil, gcd

from rpbench.ir.action import Action, Kind
from rpbench.ir.schedule import Row, Schedule, Shape, looped_placement, step_rows
from rpbench.registry import schedule


@schedule("gis", source="Wan et al., arXiv 2503.01328", looped=True)
def gis(shape: Shape, *, group_size: int | None = None) -> Schedule:
    """Interleaved 1F1B in groups of 1 to p microbatches, by default p; the last group of a step may be smaller."""
    p, chunks = shape.num_ranks, shape.chunks_per_rank
    size = p if group_size is None else group_size
    if type(size) is not int or not 1 <= size <= p:
        raise ValueError(f"schedule.group_size={size}: microbatches of a group, from 1 to {p}, the ranks; try {p}")
    rows = step_rows(shape, lambda rank, batch: _step(p, rank, chunks, size, batch))
    return Schedule(shape, rows, name="gis", placement=looped_placement(shape))


def _step(p: int, rank: int, chunks: int, size: int, batch: range) -> Row:
    apart = 3 * ceil(ceil(p / 2) / size) * size  # slots from a chunk to the next
    wrap = chunks // gcd(chunks, ceil(ceil(p / 2) / size))  # chunks after which a slot would be taken

    def offset(chunk: int, member: int) -> int:
        return apart * chunk + 3 * member + 3 * size * (chunk // wrap)

    def slots() -> Iterator[tuple[int, Kind, int, int]]:
        turn = rank + offset(chunks - 1, 0) + 3 * (p - 1 - rank) + 1
        for number, microbatch in enumerate(batch):
            group, member = divmod(number, size)
            start = 3 * size * chunks * group
            for chunk in range(chunks):
                yield start + rank + offset(chunk, member), Kind.F, chunk, microbatch
                yield start + turn + offset(chunk, member), Kind.B, chunks - 1 - chunk, microbatch

    return tuple(
        Action(part, chunk * p + rank, microbatch)
        for _, kind, chunk, microbatch in sorted(slots())
        for part in ((Kind.F,) if kind is Kind.F else (Kind.I, Kind.W))
    )
