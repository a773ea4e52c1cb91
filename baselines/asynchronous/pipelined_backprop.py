"""Pipelined backpropagation: never flushed, no stashed weights, and an optimizer that compensates for the delay.

The order of PipeDream with one copy of the weights: a step after every microbatch, and backward reads the newest
weights. On stage s a gradient comes D = p - 1 - s steps after the weights that its forward read. Two remedies, which
may be combined, are made for gradient descent with momentum, v <- mu v + g and w <- w - eta v:

    spike compensation    w <- w - eta (a v + b g)       a = mu^D, b = (1 - mu^D) / (1 - mu)
    weight prediction     forward on w - eta D v         the velocity form; with the other, on w - eta D (a v + b g)

In the end an impulse moves a weight by eta / (1 - mu), compensated or not: b + a / (1 - mu) = 1 / (1 - mu). With
compensation it has moved the weight, as soon as it arrives, as far as it would have without delay. With 3 ranks, @v for
the version that is read and +n for weights predicted n steps ahead:

    rank 0   0F0@0 0F1@0 0F2@0 0B0@0 0F3@1+2 0B1@1 0F4@2+2 0B2@2 0B3@3 0B4@4
    rank 1   1F0@0 1F1@0 1B0@0 1F2@1+1 1B1@1 1F3@2+1 1B2@2 1F4@3+1 1B3@3 1B4@4
    rank 2   2F0@0 2B0@0 2F1@1 2B1@1 2F2@2 2B2@2 2F3@3 2B3@3 2F4@4 2B4@4

Before the first step there is no velocity, and nothing is predicted. D is measured on the order
(`rpbench.engine.state.updates.compensation`).

Source: after the description of Kosson et al., "Pipelined Backpropagation at Scale: Training Large Models without
Batches", MLSys'21 (arXiv 2003.11666). Formulas are from memory; the paper's text was not at hand.
"""

from baselines.asynchronous.pipedream import never_flushed
from rpbench.ir.policy import Policy
from rpbench.ir.schedule import Schedule, Shape
from rpbench.registry import schedule


@schedule(
    "pipelined_backprop",
    source="Kosson et al., MLSys'21 (arXiv 2003.11666)",
    steps_each_microbatch=True,
    compensation=lambda *, spike_compensation, weight_prediction: {
        "spike_compensation": spike_compensation,
        "predictor": "pipelined_backprop" if weight_prediction else "",
    },
)
def pipelined_backprop(shape: Shape, *, spike_compensation: bool = True, weight_prediction: bool = True) -> Schedule:
    """Rank r keeps at most p - r microbatches in flight, one version, and the weights predicted for one microbatch.

    Args:
        spike_compensation: a late gradient at once moves the weights as far as if it had come without delay (SC_D).
        weight_prediction: forward reads weights predicted for its backward (LWP_D).
    """
    policy = Policy.PREDICT if weight_prediction else Policy.LATEST
    return never_flushed(shape, "pipelined_backprop", policy)


def one_by_one(learning_rate: float, momentum: float, batch: int) -> tuple[float, float]:
    """Learning rate and momentum for a step after every microbatch, from those for a step after `batch` of them.

    mu_1 = mu^(1 / B), so that a velocity decays as much over as many microbatches, and eta_1 = eta (1 - mu_1) /
    ((1 - mu) B), so that a microbatch's gradient moves a weight as far in the end: eta / (1 - mu) / B. ValueError for a
    batch of none, or a momentum of 1 or more.

    Source: as above, from memory.
    """
    if batch < 1 or not 0 <= momentum < 1:
        raise ValueError(f"batch={batch}, momentum={momentum}: a batch of at least 1, and from 0 to below 1; try 0.9")
    single = momentum ** (1 / batch)
    return learning_rate * (1 - single) / ((1 - momentum) * batch), single
