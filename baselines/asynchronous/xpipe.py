"""XPipe: never flushed, minibatches of several microbatches; the first microbatch predicts weights for all of them.

Microbatches of different minibatches are in flight at once, and gradients are summed over a minibatch. On every stage
the first microbatch of a minibatch (the bellwether) predicts, by Adam's direction, the weights at the minibatch's own
step, and its other microbatches run forward on the same prediction. Backward reads the newest weights. With 3 ranks and
2 minibatches of 3 microbatches, +n for weights predicted n steps ahead:

    rank 0   0F0@0 0F1@0 0F2@0 0B0 0F3@0+1 0B1 0F4@0+1 0B2 0STEP@1 0F5@0+1 0B3 0B4 0B5 0STEP@2
    rank 1   1F0@0 1F1@0 1B0 1F2@0 1B1 1F3@0+1 1B2 1STEP@1 1F4@0+1 1B3 1F5@0+1 1B4 1B5 1STEP@2
    rank 2   2F0@0 2B0 2F1@0 2B1 2F2@0 2B2 2STEP@1 2F3@1 2B3 2F4@1 2B4 2F5@1 2B5 2STEP@2

The paper gives the number of steps to predict by a formula of stage and microbatches; here it is measured on the order.

Source: Guan et al., "XPipe: Efficient Pipeline Model Parallelism for Multi-GPU DNN Training" (arXiv 1911.04610).
"""

from baselines.asynchronous.pipedream import never_flushed
from rpbench.ir.policy import Policy
from rpbench.ir.schedule import Schedule, Shape
from rpbench.registry import schedule


@schedule("xpipe", source="Guan et al., arXiv 1911.04610", compensation=lambda: {"predictor": "xpipe"})
def xpipe(shape: Shape) -> Schedule:
    """Rank r keeps at most p - r microbatches in flight, one version, and the weights predicted for one minibatch."""
    return never_flushed(shape, "xpipe", Policy.PREDICT)
