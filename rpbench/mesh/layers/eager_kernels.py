"""Eager kernels: seconds of a layer whose modules run operator by operator, as Hugging Face's do.

    products      FLOPs / (peak x share that large products reach)
    attention     FLOPs / (peak of fp32 sums x share that fused attention reaches)
    the rest      bytes / (memory bandwidth x share that element-wise kernels reach)

A device runs one after the other. Products count 2 FLOPs a weight and token that visits it. A narrow product runs below
the rate of a large one: with d its smallest dimension - inputs, outputs, or tokens, which experts divide among them -
it counts 1 + w/d times, w being the width that reaches half the rate. Attention counts the keys that a causal mask and
sliding windows leave, as a mean over the layers, like published timings. Element-wise kernels are counted in bytes:
each reads and writes whole tensors, and an eager implementation runs many of them; fused ones move a fraction of these.
Shards have a part of each product's weights and of the heads; every shard runs all norms and residuals.

If the artifact of RoundPipe (arXiv 2604.27085) has measured a model's layers on an RTX 4090, the sum is multiplied by
measured / counted of that machine, also on other machines: the kernels of that model are that much faster or slower.

Source of attention's backward: five products for two forward, Dao, "FlashAttention-2: Faster Attention with Better
Parallelism and Work Partitioning", ICLR'24.
"""

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from rpbench.cost.hardware.basis import Basis
from rpbench.workload.architecture import Architecture
from rpbench.workload.counts import BYTES_PER_VALUE, Linear, mean_keys

ATTENTION_BACKWARD = 2.5  # over forward, where no kernel's factor is known
PARTS = ("forward", "backward", "head_forward", "head_backward")  # which the artifact has timed one by one


class Load(NamedTuple):
    """FLOPs of products and of attention, and bytes moved by everything else."""

    matmul_flops: float
    attention_flops: float = 0.0
    memory_bytes: float = 0.0


def product_flops(each: Linear, num_tokens: float, half_rate_width: float, shards: int = 1, rank: int = 0) -> float:
    """FLOPs of equal linear maps and adapters of a rank, over all tokens; narrow products count more than once."""
    tokens = max(1.0, num_tokens * (each.visits / each.matrices))  # that one matrix sees
    narrow = 1 + half_rate_width / min(each.inputs, each.outputs / shards, tokens)
    found = 2 * num_tokens * each.visits * each.inputs * each.outputs * narrow / shards
    if rank:
        thin = 1 + half_rate_width / min(rank, tokens)
        found += 2 * num_tokens * each.visits * rank * (each.inputs + each.outputs) * thin / shards
    return found


def stacked(own: Architecture) -> bool:
    """Whether the experts of a layer are one tensor: the gradient of one expert's slice then has the size of all."""
    return own.family == "gpt_oss"


def input_share(own: Architecture) -> float:
    """Fraction of a layer's backward that makes the gradient of its input, for backwards that were timed whole.

    Each linear map costs as much for the gradient of its input as for that of its weights. Attention has no weights, so
    all of its backward is for inputs. Frozen weights have no gradients but those of adapters. Derived, not measured.
    """
    every, trained = _flops(own, 1, 0.0)
    attention = ATTENTION_BACKWARD * 4 * own.q_dim * own.keys_per_query("causal")
    return (every + attention) / (every + attention + trained)


def _flops(own: Architecture, num_tokens: float, half: float, shards: int = 1) -> tuple[float, float]:
    """FLOPs of the products of a layer's forward, and of its weight gradients; the mean if layers differ."""

    def total(shards: int = 1, *, adapters: bool = True) -> float:
        return sum(
            part * product_flops(each, num_tokens, half, shards, _rank(own, each) * adapters)
            for routed, part in own.kinds.items()
            for each in own.linear_maps(routed)
        )

    return total(shards), (total() - (total(adapters=False) if own.lora_rank else 0)) / shards


def _rank(own: Architecture, each: Linear) -> int:
    return own.lora_rank or 0 if own.adapted(each) and each.part != "router" else 0


@dataclass(frozen=True, eq=False)
class EagerKernels:
    """The work and the seconds of one layer's kernels, for a microbatch on a device; ValueError for missing numbers."""

    own: Architecture
    seq_len: int
    tokens: float  # of a mean microbatch, so they need not be whole
    numbers: Basis
    shards: int  # devices that divide the layer; results are those of one device
    fused: bool  # kernels like Megatron's: products summed in fp32, less element-wise traffic, no corrections

    def layer(self) -> tuple[float, float, float]:
        """Seconds of a layer: forward, gradient of its input, gradient of its weights."""
        launch = self.numbers.get("launch_s", 0.0)
        forward, backward = (self.correction(part) for part in ("forward", "backward"))
        return (
            forward * self.seconds(self.forward) + launch,
            backward * self.seconds(self.input_grad()) + launch,
            backward * self.seconds(self.weight_grad()),
        )

    def head(self) -> tuple[float, float]:
        """Seconds of final norm, output matrix and loss: forward and backward."""
        loads, found = (self.head_forward(), self.head_backward()), []
        for part, load, share in zip(("head_forward", "head_backward"), loads, (2 / 3, 1 / 3), strict=True):
            if self.fused:  # the loss in fp32 over the whole vocabulary, in kernels of its own
                each = self.numbers["fused_loss_bytes"] * share - self.numbers["logit_bytes"]
                extra = self.tokens * self.own.vocab * each / self.numbers["fused_traffic_share"]
                load = load._replace(memory_bytes=load.memory_bytes + extra)
            found.append(self.correction(part) * self.seconds(load))
        return found[0], found[1]

    def correction(self, part: str) -> float:
        """Measured over counted time of a part of a model's layers on the measured machine.

        1 for models that were not measured, and for the backward of layers with experts, whose further time is counted
        as bytes of their weights. Their forward was timed on one device; `rpbench.predict.case` adds the time that one
        interpreter takes to serve several devices.
        """
        name = correction_name(self.own.published_name or "", part)
        return 1.0 if self.fused or name not in self.numbers.values else self.numbers[name]

    def seconds(self, load: Load) -> float:
        """Time of a load on one device, its parts one after the other."""
        numbers = self.numbers
        wide = "wide_" if self.fused else ""
        rate = numbers[f"{wide}matmul_flops_per_s"] * numbers[f"{wide}matmul_efficiency"]
        attention = load.attention_flops
        if attention:
            attention /= numbers["wide_matmul_flops_per_s"] * numbers["attention_efficiency"]
        traffic = load.memory_bytes * (numbers["fused_traffic_share"] if self.fused else 1.0)
        return load.matmul_flops / rate + attention + traffic / numbers.memory_rate

    # --- bytes -----------------------------------------------------------------------------------------------------

    def kept_bytes(self) -> float:
        """Bytes one layer's forward keeps for its backward, without recomputation.

        They are: both norms (the fp32 input and the fp16 product of each; fused norms keep fp16 inputs alone), the
        inputs of the products, queries, keys, values and attention output, the values of gate and product for each
        inner value; with experts, those of gather and weighting for each visit. The inputs of frozen products stay too,
        since adapters need them. Shards divide heads and inner values.
        """
        own, numbers = self.own, self.numbers
        norm, gate = float(BYTES_PER_VALUE), 2.0 * BYTES_PER_VALUE
        if not self.fused:
            norm = numbers["kept_norm_bytes"]
            gate = numbers["kept_clamped_gate_bytes" if stacked(own) else "kept_gate_bytes"]
        heads = own.q_dim + own.kv_dim
        whole = 2 * (norm + BYTES_PER_VALUE) * own.hidden
        cut = 2 * BYTES_PER_VALUE * heads + (norm * heads if own.qk_norm else 0.0) + gate * own.inner_visits
        if own.experts is not None:
            cut += numbers["kept_dispatch_bytes"] * own.hidden * own.expert_visits
        return self.tokens * (whole + cut / self.shards)

    def working_bytes(self) -> float:
        """Bytes of one layer's further buffers in its backward.

        They are gradients of the inner values, one expert at a time. The gradient of one expert's slice of a stacked
        weight is a tensor of the whole stack.
        """
        own = self.own
        stack = BYTES_PER_VALUE * own.layer_parameters if stacked(own) else 0
        gradients = self.tokens * self.numbers["working_gate_bytes"] * own.inner_at_once
        return (gradients + stack) / self.shards

    # --- loads ---------------------------------------------------------------------------------------------------

    @cached_property
    def forward(self) -> Load:
        products, _ = _flops(self.own, self.tokens, self.numbers["half_rate_width"], self.shards)
        windows = Counter(layer.window for layer in self.own.layers)
        keys = sum(count * mean_keys(self.seq_len, window) for window, count in windows.items())
        attention = 4 * self.tokens * self.own.q_dim * keys / self.own.num_layers / self.shards
        return Load(products, attention, self.tokens * self._token_bytes())

    def input_grad(self) -> Load:
        """The first half of a backward, gradients of inputs."""
        forward = self.forward
        return Load(
            forward.matmul_flops,
            forward.attention_flops * self.numbers["attention_backward_factor"],
            forward.memory_bytes * self.numbers["backward_traffic_factor"],
        )

    def weight_grad(self) -> Load:
        """The second half: gradients of weights, added to those accumulated."""
        own, numbers = self.own, self.numbers
        _, flops = _flops(own, self.tokens, numbers["half_rate_width"], self.shards)
        added = numbers["accumulate_bytes"] * own.trainable_layer_parameters
        if own.experts is not None:
            added += numbers["stacked_expert_bytes" if stacked(own) else "expert_bytes"] * own.layer_parameters
        return Load(flops, memory_bytes=added / self.shards)

    def experts(self) -> Load:
        """The experts' part of a layer's forward, which begins after the router."""
        own, half = self.own, self.numbers["half_rate_width"]
        if own.experts is None:
            return Load(0.0)
        products = sum(
            part * product_flops(each, self.tokens, half, rank=_rank(own, each))
            for routed, part in own.kinds.items()
            for each in own.linear_maps(routed)
            if each.visits < each.matrices
        )
        moved = self._gate_bytes() * own.experts.inner + self.numbers["dispatch_bytes"] * own.hidden
        return Load(products, memory_bytes=self.tokens * own.expert_visits * moved)

    def head_forward(self) -> Load:
        """Final norm, output matrix and the loss."""
        own = self.own
        moved = self.numbers["norm_bytes"] * own.hidden + self.numbers["logit_bytes"] * own.vocab
        return Load(own.head_forward_flops(1) * self.tokens, 0.0, self.tokens * moved)

    def head_backward(self) -> Load:
        """Gradients of the hidden states and, unless frozen, of the output matrix."""
        own, numbers = self.own, self.numbers
        both = 1 if own.lora_rank else 2
        added = 0.0 if own.lora_rank else numbers["accumulate_bytes"] * own.head_parameters
        norm = numbers["norm_bytes"] * numbers["backward_traffic_factor"] * own.hidden
        moved = self.tokens * (norm + numbers["logit_bytes"] * own.vocab) + added
        return Load(both * own.head_forward_flops(1) * self.tokens, 0.0, moved)

    def _token_bytes(self) -> float:
        """Bytes the element-wise kernels of one layer's forward move for one token."""
        own, numbers = self.own, self.numbers
        heads = own.q_dim + own.kv_dim
        rotary = numbers["rope_bytes"] * heads if own.family != "gpt" else 0.0
        head_norms = numbers["norm_bytes"] * heads if own.qk_norm else 0.0
        dispatch = numbers["dispatch_bytes"] * own.expert_visits * own.hidden if own.experts else 0.0
        whole = 2 * (numbers["norm_bytes"] + numbers["residual_bytes"]) * own.hidden
        return whole + (self._gate_bytes() * own.inner_visits + rotary + head_norms + dispatch) / self.shards

    def _gate_bytes(self) -> float:
        """Bytes that an eager gate moves for one inner value of one expert."""
        return self.numbers["clamped_gate_bytes" if stacked(self.own) else "gate_bytes"]


def correction_name(published_name: str, part: str) -> str:
    """The constant that holds a model's correction of a part of its layers."""
    slug = published_name.replace("-", "_").replace(".", "p")
    return f"{slug}_{part}_correction"
