"""DAPPLE: 1F1B with a flush, and optionally a longer warm-up that hides the links (early backward, policies PA and PB).

Policy A runs p - r forwards on rank r before its first backward: plain 1F1B. Policy B runs 2(p - r) - 1, so that a
gradient can travel while the rank still has forwards to do. With 3 ranks and 6 microbatches, policy B:

    rank 0   0F0 0F1 0F2 0F3 0F4 0B0 0F5 0B1 0B2 0B3 0B4 0B5
    rank 1   1F0 1F1 1F2 1B0 1F3 1B1 1F4 1B2 1F5 1B3 1B4 1B5
    rank 2   2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3 2F4 2B4 2F5 2B5

Source: Fan et al., "DAPPLE: A Pipelined Data Parallel Approach for Training Large Models", PPoPP'21 (arXiv
2007.01045).
"""

from baselines.synchronous.one_f_one_b import alternating
from rpbench.ir.schedule import Schedule, Shape, check_one_stage
from rpbench.registry import schedule


@schedule("dapple", source="Fan et al., PPoPP'21", searched={"early_warmup": (True, False)})
def dapple(shape: Shape, *, early_warmup: bool = True) -> Schedule:
    """1F1B with a warm-up of policy A, or of policy B, the early one, which hides hops and holds nearly twice as many
    activations.
    """
    check_one_stage("dapple", shape, "interleaved_1f1b")
    pace = 2 if early_warmup else 1  # forwards ahead of the first backward for each rank downstream
    return alternating("dapple", shape, [pace * (shape.num_ranks - 1 - rank) for rank in range(shape.num_ranks)])
