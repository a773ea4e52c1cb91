"""The two halves of a backward that somebody timed as one: input and weight gradients in the ratio of their FLOPs.

Each linear map of a layer costs as much for the gradient of its input as for that of its weights; attention has no
weights, so all of its backward is for inputs; of frozen weights only the adapters' gradients are made. The ratio is
derived, not measured: kernels of the two halves may differ in what they reach of the peak.

Source of attention's factor: five products backward for two forward, Dao, "FlashAttention-2: Faster Attention with
Better Parallelism and Work Partitioning", ICLR'24.
"""

from dataclasses import replace

from rpbench.cost.basis import Basis
from rpbench.cost.operators import products_of
from rpbench.cost.table import LayerTimes
from rpbench.workload.architecture import Architecture

ATTENTION_BACKWARD = 2.5
_PLAIN = Basis("counted", {"half_rate_width": 0.0}, {})  # every product at the same rate, however narrow


def input_share(model: Architecture) -> float:
    """Share of a layer's backward that the layer below waits for, from 0 to 1."""
    products = products_of(model)
    every = sum(product.flops(1, _PLAIN) for product in products)
    trained = every
    if model.lora_rank:
        trained -= sum(product._replace(rank=0).flops(1, _PLAIN) for product in products)
    attention = ATTENTION_BACKWARD * 4 * model.q_dim * model.keys_per_query("causal")
    return (every + attention) / (every + attention + trained)


def with_halves(times: LayerTimes, model: Architecture) -> LayerTimes:
    """The same times with both halves of every backward; a frozen head has no weight gradient."""
    share, head = input_share(model), 1.0 if model.lora_rank else 0.5
    return replace(
        times,
        input_grad=[share * time for time in times.backward],
        weight_grad=[(1 - share) * time for time in times.backward],
        head_input_grad=head * times.head_backward,
        head_weight_grad=(1 - head) * times.head_backward,
    )


def penalised(times: LayerTimes, penalty: float) -> LayerTimes:
    """The same times where both halves of a backward together take `penalty` times what one whole backward takes.

    Args:
        penalty: at least 1; 1.02 to 1.04 in measured runs of others. A whole backward (B) keeps its time.
    """
    if penalty == 1:
        return times
    return replace(
        times,
        input_grad=[penalty * time for time in times.input_grad],
        weight_grad=[penalty * time for time in times.weight_grad],
        head_input_grad=penalty * times.head_input_grad,
        head_weight_grad=penalty * times.head_weight_grad,
    )
