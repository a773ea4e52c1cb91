"""ZB-H2: twice the warmup of ZB-H1, so that the pipeline is full before the first gradient arrives.

I is the input gradient, W the weight gradient. Rank r begins with 2(p-r)-1 forwards and puts off its first W by 2r
microbatches. With 3 ranks and 4 microbatches, fewer than the 2p-1 that fill it:

    rank 0   0F0 0F1 0F2 0F3 0I0 0W0 0I1 0W1 0I2 0W2 0I3 0W3
    rank 1   1F0 1F1 1F2 1I0 1F3 1I1 1I2 1W0 1I3 1W1 1W2 1W3
    rank 2   2F0 2I0 2F1 2I1 2F2 2I2 2F3 2I3 2W0 2W1 2W2 2W3

The bubble of the longest device-local span is (p-1)(F+I-2W), none if F = I = W and m >= 2p-1: ranks start one after
another and end one after another, and without a barrier between steps the next step starts as they end. A rank holds up
to 2p-1 activations.

Source: Qi et al., "Zero Bubble Pipeline Parallelism", ICLR'24 (arXiv 2401.10241). The paper writes B for what is I
here.
"""

from baselines.zero_bubble.zb_h1 import split_schedule
from rpbench.ir.schedule import Schedule, Shape
from rpbench.registry import schedule


@schedule("zb_h2", source="Qi et al., ICLR'24")
def zb_h2(shape: Shape) -> Schedule:
    """Every rank keeps at most min(2 * num_ranks - 1, num_microbatches) activations until their W."""
    p = shape.num_ranks
    return split_schedule("zb_h2", shape, [(2 * (p - rank) - 1, 2 * rank) for rank in range(p)])
