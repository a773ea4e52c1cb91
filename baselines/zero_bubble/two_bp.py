"""2BP: backward in two halves, with all weight gradients at the end of the step.

I is the input gradient, W the weight gradient. A rank sends its input gradient down at once, so that no rank waits for
weight gradients. With `base=gpipe`, 3 ranks and 4 microbatches:

    rank 0   0F0 0F1 0F2 0F3 0I0 0I1 0I2 0I3 0W0 0W1 0W2 0W3
    rank 1   1F0 1F1 1F2 1F3 1I0 1I1 1I2 1I3 1W0 1W1 1W2 1W3
    rank 2   2F0 2F1 2F2 2F3 2I0 2I1 2I2 2I3 2W0 2W1 2W2 2W3

`base=1f1b` alternates F and I as 1F1B alternates F and B. In both cases the bubble is (p-1)(F+I), that of GPipe and
1F1B (p-1)(F+I+W). Every rank keeps what W needs for all m microbatches: this buys time with memory.

Source: Rae, Lee and Richings, "2BP: 2-Stage Backpropagation", arXiv 2405.18047. The paper fuses the delayed products
over microbatches; that is left out.
"""

from baselines.zero_bubble.zb_h1 import split_schedule
from rpbench.ir.schedule import Schedule, Shape
from rpbench.registry import check_known, schedule

_BASES = ("gpipe", "1f1b")


@schedule("two_bp", source="Rae et al., arXiv 2405.18047", searched={"base": _BASES})
def two_bp(shape: Shape, *, base: str = "gpipe") -> Schedule:
    """Every rank keeps all microbatches until their W."""
    check_known("base", base, _BASES)
    p, m = shape.num_ranks, shape.num_microbatches
    return split_schedule("two_bp", shape, [(m if base == "gpipe" else p - rank, m) for rank in range(p)])
