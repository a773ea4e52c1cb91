"""Interleaved zero bubble: interleaved 1F1B with backward cut in two and half the warmup.

Stage s lives on rank s mod p; I is the input gradient, W the weight gradient. As in ZB-H1, rank r puts off its first W
by r of its visits. With 3 ranks, 3 microbatches and 2 chunks:

    rank 0   0F0 0F1 0F2 3F0 3F1 3F2 3I0 3W0 3I1 3W1 3I2 3W2 0I0 0W0 0I1 0W1 0I2 0W2
    rank 1   1F0 1F1 1F2 4F0 4F1 4I0 4F2 4I1 4W0 4I2 4W1 1I0 4W2 1I1 1W0 1I2 1W1 1W2
    rank 2   2F0 2F1 2F2 5F0 5I0 5F1 5I1 5F2 5I2 5W0 2I0 5W1 2I1 5W2 2I2 2W0 2W1 2W2

The bubble is (p-1)(F+I-W)/v if p divides m; a rank holds at most v*p chunk activations, as many as with 1F1B.

Source: torch.distributed.pipelining 2.13, ScheduleInterleavedZeroBubble, whose orders these are; after Qi et al.,
"Zero Bubble Pipeline Parallelism", ICLR'24, and Narayanan et al., SC'21.
"""

from baselines.synchronous.interleaved_1f1b import check_rounds, group_size, visits
from baselines.zero_bubble.zb_h1 import split_step
from rpbench.ir.schedule import Row, Schedule, Shape, looped_placement, step_rows
from rpbench.registry import schedule


@schedule("interleaved_zb", source="torch.distributed.pipelining 2.13, ScheduleInterleavedZeroBubble", looped=True)
def interleaved_zb(shape: Shape) -> Schedule:
    """Every rank keeps at most v*p chunk activations until their W (m a multiple of p)."""
    check_rounds("interleaved_zb", shape)
    rows = step_rows(shape, lambda rank, batch: _step(shape, rank, batch))
    return Schedule(shape, rows, name="interleaved_zb", placement=looped_placement(shape))


def _step(shape: Shape, rank: int, batch: range) -> Row:
    # The rank's own forward and one per rank downstream, not two as in interleaved 1F1B: gradients come back without W.
    num_warmup = (shape.chunks_per_rank - 1) * group_size(shape) + shape.num_ranks - rank
    return split_step(lambda kind: visits(shape, rank, batch, kind), num_warmup, rank)
