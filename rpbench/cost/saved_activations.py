"""Bytes a layer keeps for its backward, and needs besides while it runs, in an eager and in a fused implementation.

    kept      both norms (the fp32 input and the fp16 product of each), the inputs of the products, queries, keys,
              values and attention output, what gate and product keep of each inner value; with experts, what the
              gather and the weighting keep of each visit
    working   gradients of the inner values while the MLP's backward runs; one expert at a time with experts

A layer with adapters keeps the inputs of its frozen products too, for the adapters' sake.
"""

from rpbench.cost.basis import Basis
from rpbench.cost.operators import stacked
from rpbench.workload.architecture import Architecture
from rpbench.workload.counts import BYTES_PER_VALUE


def kept_bytes(model: Architecture, num_tokens: float, basis: Basis, *, fused: bool = False, shards: int = 1) -> float:
    """Bytes one layer's forward keeps for its backward.

    Args:
        fused: kernels that keep fp16 inputs alone.
        shards: devices that divide heads and inner values; norms are the same on all.
    """
    norm = BYTES_PER_VALUE if fused else basis["kept_norm_bytes"]
    gate = 2 * BYTES_PER_VALUE if fused else basis["kept_clamped_gate_bytes" if stacked(model) else "kept_gate_bytes"]
    heads = model.q_dim + model.kv_dim
    whole = 2 * (norm + BYTES_PER_VALUE) * model.hidden
    attention = BYTES_PER_VALUE * (2 * model.q_dim + 2 * model.kv_dim)
    head_norms = norm * heads if model.qk_norm else 0.0
    dispatch = basis["kept_dispatch_bytes"] * model.hidden * model.expert_visits if model.experts else 0.0
    return num_tokens * (whole + (attention + head_norms + gate * model.inner_visits + dispatch) / shards)


def working_bytes(model: Architecture, num_tokens: float, basis: Basis, *, shards: int = 1) -> float:
    """Bytes one layer's backward needs besides what is kept, at its MLP.

    The gradient of one expert's slice of a stacked weight is a tensor of the whole stack.
    """
    stack = BYTES_PER_VALUE * model.layer_parameters if stacked(model) else 0
    return (num_tokens * basis["working_gate_bytes"] * model.inner_at_once + stack) / shards
