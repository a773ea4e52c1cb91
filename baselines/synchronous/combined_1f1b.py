"""Combined 1F1B: interleaved 1F1B whose steady forward and backward run together, for models with experts.

The all-to-all that sends tokens to their experts hides behind other work: attention, experts and both all-to-alls of a
forward alternate with those of a backward of another microbatch, on two streams. A pair must not wait for itself, so
every rank runs one more forward before its first backward. On one device, with 3 microbatches, and with 2 ranks, 4
microbatches and 2 chunks:

    device 0   0F0 (0F1;0B0) (0F2;0B1) 0B2

    rank 0     0F0 0F1 2F0 2F1 0F2 (0F3;2B0) (2F2;2B1) (2F3;0B0) 0B1 2B2 2B3 0B2 0B3
    rank 1     1F0 1F1 3F0 (3F1;3B0) (1F2;3B1) (1F3;1B0) (3F2;1B1) (3F3;3B2) 3B3 1B2 1B3

`cost.overlap_gain` says how long a pair takes: it is the part of the shorter action that is hidden. A rank holds one
chunk activation more than with `interleaved_1f1b`. `dualpipe` and `dualpipe_v` are orders made for such pairs.

Source: Megatron-LM, combined 1F1B (overlap of expert-parallel communication), from its description. That it runs one
more forward with interleaving is remembered, not read.
"""

from baselines.synchronous.interleaved_1f1b import check_rounds, group_size, visits
from rpbench.ir.action import Kind, overlap
from rpbench.ir.schedule import Row, Schedule, Shape, looped_placement, step_rows
from rpbench.registry import schedule


@schedule("combined_1f1b", source="Megatron-LM, combined 1F1B", looped=True)
def combined_1f1b(shape: Shape) -> Schedule:
    """Rank r runs one forward more than interleaved 1F1B before its first backward, then pairs."""
    check_rounds("combined_1f1b", shape)
    rows = step_rows(shape, lambda rank, batch: _step(shape, rank, batch))
    return Schedule(shape, rows, name="combined_1f1b", placement=looped_placement(shape))


def _step(shape: Shape, rank: int, batch: range) -> Row:
    forwards, backwards = (visits(shape, rank, batch, kind) for kind in (Kind.F, Kind.B))
    ahead = (shape.chunks_per_rank - 1) * group_size(shape) + 2 * (shape.num_ranks - 1 - rank) + 1
    num_warmup = min(len(forwards), ahead)
    num_pairs = len(forwards) - num_warmup
    pairs = map(overlap, forwards[num_warmup:], backwards[:num_pairs])
    return (*forwards[:num_warmup], *pairs, *backwards[num_pairs:])
