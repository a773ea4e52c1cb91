"""SpecTrain: forward and backward read weights predicted for the end of the minibatch.

The order of PipeDream with one copy of the weights. The prediction follows momentum: w - horizon * rate * momentum. All
stages predict the same moment, when the minibatch is back at the first stage: for stage k of p that is floor(k / 2)
steps after its backward, and p - 1 - k + floor(k / 2) after its forward. With 3 ranks, +n for weights predicted n steps
ahead:

    rank 0   0F0@0 0F1@0 0F2@0 0B0@0 0F3@1+2 0B1@1 ...
    rank 1   1F0@0 1F1@0 1B0@0 1F2@1+1 1B1@1 ...
    rank 2   2F0@0 2B0@0 2F1@1+1 2B1@1+1 ...

It is made for gradient descent with momentum (`optimizer=sgd optimizer.momentum=0.9`); with AdamW it uses Adam's
direction instead. Before the first step the prediction is the weights themselves.

Source: Chen et al., "Efficient and Robust Parallel DNN Training through Model Parallelism on Multi-GPU Platform"
(arXiv 1809.02839).
"""

from baselines.asynchronous.pipedream import never_flushed
from rpbench.ir.policy import Policy
from rpbench.ir.schedule import Schedule, Shape
from rpbench.registry import schedule


@schedule(
    "spectrain",
    source="Chen et al., arXiv 1809.02839",
    steps_each_microbatch=True,
    compensation=lambda: {"predictor": "spectrain"},
)
def spectrain(shape: Shape) -> Schedule:
    """Rank r keeps at most p - r microbatches in flight, one version, and the weights predicted for one minibatch."""
    return never_flushed(shape, "spectrain", Policy.PREDICT)
