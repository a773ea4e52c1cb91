"""PipeOptim: forward reads weights predicted for its own backward from the optimizer's direction.

1F1B that is never flushed, with one copy of the weights and a step for every minibatch. Between forward and backward of
a minibatch, stage s of p makes p - 1 - s steps. Forward reads w - (p - 1 - s) * d, where d is the optimizer's next
update (AdamW: with its weight decay); backward reads the newest weights. With a perfect prediction both read the same,
without stashed weights. With 3 ranks, +n for weights predicted n steps ahead:

    rank 0   0F0@0 0F1@0 0F2@0 0B0@0 0F3@1+2 0B1@1 0F4@2+2 0B2@2 ...
    rank 1   1F0@0 1F1@0 1B0@0 1F2@1+1 1B1@1 1F3@2+1 1B2@2 ...
    rank 2   2F0@0 2B0@0 2F1@1 2B1@1 2F2@2 2B2@2 ...

Before the first step the optimizer has no direction, and the prediction is the weights themselves.

Source: Guan et al., "PipeOptim: Ensuring Effective 1F1B Schedule with Optimizer-Dependent Weight Prediction" (arXiv
2312.00839).
"""

from baselines.asynchronous.pipedream import never_flushed
from rpbench.ir.policy import Policy
from rpbench.ir.schedule import Schedule, Shape
from rpbench.registry import schedule


@schedule(
    "pipeoptim",
    source="Guan et al., arXiv 2312.00839",
    steps_each_microbatch=True,
    compensation=lambda: {"predictor": "pipeoptim"},
)
def pipeoptim(shape: Shape) -> Schedule:
    """Rank r keeps at most p - r microbatches in flight, one version, and the weights predicted for one minibatch."""
    return never_flushed(shape, "pipeoptim", Policy.PREDICT)
