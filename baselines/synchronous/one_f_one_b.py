"""1F1B with a flush at the end of the step (PipeDream-Flush, DAPPLE).

A rank first runs a few forwards (warmup), then alternates forward and backward (steady), then drains what is
left (cooldown). With 3 ranks and 4 microbatches:

    rank 0   0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3
    rank 1   1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3
    rank 2   2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3

Source: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM",
SC'21, section 2.2.1, figure 4.
"""

from collections.abc import Sequence

from rpbench.ir.action import Kind, PlainRow, in_turn, joined, plain
from rpbench.ir.schedule import Schedule, Shape, check_one_stage, looped_placement
from rpbench.registry import schedule


@schedule("1f1b", source="Narayanan et al., SC'21, section 2.2.1")
def one_f_one_b(shape: Shape) -> Schedule:
    """Rank r keeps at most min(num_ranks - r, num_microbatches) microbatches in flight."""
    check_one_stage("1f1b", shape, "interleaved_1f1b")
    # One forward per rank downstream: that is how long the first gradient takes to return.
    return alternating("1f1b", shape, [shape.num_ranks - rank - 1 for rank in range(shape.num_ranks)])


def alternating(name: str, shape: Shape, num_warmup: Sequence[int]) -> Schedule:
    """1F1B with a flush after every step; `num_warmup` are the forwards of each rank before its first backward."""
    rows = (joined([alternate(rank, batch, num) for batch in shape.batches]) for rank, num in enumerate(num_warmup))
    return Schedule(shape, tuple(rows), name=name, placement=looped_placement(shape))


def alternate(stage: int, microbatches: Sequence[int], num_warmup: int) -> PlainRow:
    """`num_warmup` forwards of a stage, then one forward and one backward in turn, then the backwards left."""
    forwards, backwards = plain(Kind.F, stage, microbatches), plain(Kind.B, stage, microbatches)
    return in_turn(forwards, backwards, min(num_warmup, len(forwards)))
