"""What the kernels of one layer do: products, attention, and bytes of a device's memory moved besides.

Products count 2 FLOPs a weight and token that visits it. A narrow product runs below the rate of a large one: with
d its smallest dimension - inputs, outputs, or tokens, which experts divide among them - it counts 1 + w/d times,
w being the width that reaches half the rate. Attention counts the keys that a causal mask and a sliding window
leave, over the true width of the heads. Element-wise kernels are counted in bytes: each reads and writes whole
tensors, and an eager implementation runs many of them.

With tensor parallelism every device has a share of each product's weights and of the heads; norms and residuals are
the same on all.
"""

from typing import NamedTuple

from rpbench.cost.basis import Basis
from rpbench.workload.architecture import Architecture
from rpbench.workload.counts import BYTES_PER_VALUE


class Load(NamedTuple):
    """FLOPs of products and of attention, and bytes moved by everything else."""

    matmul_flops: float
    attention_flops: float = 0.0
    memory_bytes: float = 0.0


def layer_forward(model: Architecture, num_tokens: float, basis: Basis, shards: int = 1) -> Load:
    """One decoder layer's forward over `num_tokens` tokens in sequences of `model.seq_len`.

    Args:
        shards: devices that divide the layer among them; the load is that of one.
    """
    products = sum(product.flops(num_tokens, basis, shards) for product in products_of(model))
    attention = 4 * num_tokens * model.q_dim * model.keys_per_query("causal") / shards
    return Load(products, attention, num_tokens * _token_bytes(model, basis, shards))


def expert_forward(model: Architecture, num_tokens: float, basis: Basis) -> Load:
    """The part of a layer's forward that its experts are: what cannot begin before the router has chosen."""
    products = sum(product.flops(num_tokens, basis) for product in products_of(model) if product.share < 1)
    if model.experts is None:
        return Load(products)
    gate = gate_bytes(model, basis) * model.experts.inner
    dispatch = basis["dispatch_bytes"] * model.hidden
    return Load(products, memory_bytes=num_tokens * model.expert_visits * (gate + dispatch))


class Product(NamedTuple):
    """A linear map of a layer: one matrix, or one for each expert, with the adapter that stands beside it."""

    inputs: int
    outputs: int
    share: float = 1.0  # of the tokens that one matrix sees: experts divide them
    visits: float = 1.0  # matrices a token meets
    rank: int = 0

    def flops(self, num_tokens: float, basis: Basis, shards: int = 1) -> float:
        """FLOPs over all tokens, a narrow product counted more than once."""
        tokens = max(1.0, num_tokens * self.share)
        half = basis["half_rate_width"]
        narrow = 1 + half / min(self.inputs, self.outputs / shards, tokens)
        found = 2 * num_tokens * self.visits * self.inputs * self.outputs * narrow / shards
        if self.rank:
            thin = 1 + half / min(self.rank, tokens)
            found += 2 * num_tokens * self.visits * self.rank * (self.inputs + self.outputs) * thin / shards
        return found


def products_of(model: Architecture) -> list[Product]:
    """Every linear map of one decoder layer; where layers differ, visits are a mean over them."""
    return [
        Product(
            each.inputs,
            each.outputs,
            each.visits / each.matrices,
            each.visits * part,
            model.lora_rank or 0 if model.adapted(each) and each.part != "router" else 0,
        )
        for routed, part in model.kinds.items()
        for each in model.linear_maps(routed)
    ]


def layer_input_grad(model: Architecture, num_tokens: float, basis: Basis, shards: int = 1) -> Load:
    """The half of a backward that the layer below waits for."""
    forward = layer_forward(model, num_tokens, basis, shards)
    return Load(
        forward.matmul_flops,
        forward.attention_flops * basis["attention_backward_factor"],
        forward.memory_bytes * basis["backward_traffic_factor"],
    )


def layer_weight_grad(model: Architecture, num_tokens: float, basis: Basis, shards: int = 1) -> Load:
    """The other half: products, and adding the gradient to what has accumulated."""
    products = products_of(model)
    if model.lora_rank:  # the adapters alone
        with_frozen = sum(product.flops(num_tokens, basis) for product in products)
        flops = with_frozen - sum(product._replace(rank=0).flops(num_tokens, basis) for product in products)
    else:
        flops = sum(product.flops(num_tokens, basis) for product in products)
    added = basis["accumulate_bytes"] * model.trainable_layer_parameters
    if model.experts:
        added += basis["stacked_expert_bytes" if stacked(model) else "expert_bytes"] * model.layer_parameters
    return Load(flops / shards, memory_bytes=added / shards)


def stacked(model: Architecture) -> bool:
    """Whether the experts of a layer are one tensor: the gradient of one expert's slice then has the size of all."""
    return model.family == "gpt_oss"


def gate_bytes(model: Architecture, basis: Basis) -> float:
    """Bytes that an eager gate moves for one inner value of one expert."""
    return basis["clamped_gate_bytes" if stacked(model) else "gate_bytes"]


def head_forward(model: Architecture, num_tokens: float, basis: Basis) -> Load:
    """Final norm, output matrix and the loss."""
    norm = basis["norm_bytes"] * model.hidden
    return Load(model.head_forward_flops(1) * num_tokens, 0.0, num_tokens * (norm + basis["logit_bytes"] * model.vocab))


def head_backward(model: Architecture, num_tokens: float, basis: Basis) -> Load:
    """Gradients of the hidden states and, unless frozen, of the output matrix."""
    both = 1 if model.lora_rank else 2
    added = 0.0 if model.lora_rank else basis["accumulate_bytes"] * model.head_parameters
    norm = basis["norm_bytes"] * basis["backward_traffic_factor"] * model.hidden
    logits = basis["logit_bytes"] * model.vocab
    return Load(both * model.head_forward_flops(1) * num_tokens, 0.0, num_tokens * (norm + logits) + added)


def _token_bytes(model: Architecture, basis: Basis, shards: int) -> float:
    """Bytes the element-wise kernels of one layer's forward move for one token."""
    heads = model.q_dim + model.kv_dim
    rotary = basis["rope_bytes"] * heads if model.family != "gpt" else 0.0
    head_norms = basis["norm_bytes"] * heads if model.qk_norm else 0.0
    dispatch = basis["dispatch_bytes"] * model.expert_visits * model.hidden if model.experts else 0.0
    gate = gate_bytes(model, basis) * model.inner_visits
    whole = 2 * (basis["norm_bytes"] + basis["residual_bytes"]) * model.hidden
    return whole + (gate + rotary + head_norms + dispatch) / shards


def boundary_bytes(model: Architecture, num_tokens: float) -> float:
    """Bytes that pass between stages for so many tokens."""
    return BYTES_PER_VALUE * num_tokens * model.hidden
