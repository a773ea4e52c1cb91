"""Analytic costs: seconds of every layer from the model's shape and the figures of a machine.

    products      FLOPs / (peak x share that large products reach)
    attention     FLOPs / (peak of fp32 sums x share that fused attention reaches)
    the rest      bytes / (memory bandwidth x share that element-wise kernels reach)

A device runs one after the other. Where the artifact of RoundPipe (arXiv 2604.27085) has measured a model's layers
on an RTX 4090, the sum is corrected by measured / counted of that machine, and the same correction is carried to
other machines: it stands for what the kernels of that model do worse or better than counted.

Of this project's own engine on a machine that was calibrated, `rpbench.cost.engine_times` knows more.

Two ways to run a layer: `eager` as the released library, DeepSpeed and FSDP do (Hugging Face modules; products
summed in fp16 where that is faster), `fused` as Megatron does (fused kernels; products summed in fp32).
"""

from typing import Literal

from rpbench.cost.basis import Basis
from rpbench.cost.operators import (
    Load,
    boundary_bytes,
    head_backward,
    head_forward,
    layer_forward,
    layer_input_grad,
    layer_weight_grad,
)
from rpbench.cost.table import LayerTimes
from rpbench.workload.architecture import Architecture

Kernels = Literal["eager", "fused"]

# Parts whose times the artifact has measured apart.
PARTS = ("forward", "backward", "head_forward", "head_backward")


def analytic_times(model: Architecture, num_tokens: float, basis: Basis, kernels: Kernels = "eager") -> LayerTimes:
    """Seconds of one microbatch through each layer.

    Args:
        num_tokens: of one microbatch, in sequences of `model.seq_len`; need not be whole for a mean microbatch.
        basis: of a machine; figures it lacks are an error.

    Raises:
        ValueError: if the basis lacks a figure.
    """
    launch = basis.get("launch_s", 0.0)
    factor = {part: correction(model, part, basis) if kernels == "eager" else 1.0 for part in PARTS}
    forward = factor["forward"] * seconds(layer_forward(model, num_tokens, basis), basis, kernels) + launch
    inputs = factor["backward"] * seconds(layer_input_grad(model, num_tokens, basis), basis, kernels) + launch
    weights = factor["backward"] * seconds(layer_weight_grad(model, num_tokens, basis), basis, kernels)
    head = factor["head_forward"] * head_s(model, num_tokens, basis, kernels, backward=False)
    head_back = factor["head_backward"] * head_s(model, num_tokens, basis, kernels, backward=True)
    layers = model.num_layers
    return LayerTimes(
        forward=[forward] * layers,
        recompute=[forward] * layers,
        backward=[inputs + weights] * layers,
        head_forward=head,
        head_backward=head_back,
        input_grad=[inputs] * layers,
        weight_grad=[weights] * layers,
        head_input_grad=head_back / 2,
        head_weight_grad=head_back / 2,
        hop=hop_s(model, num_tokens, basis),
    )


def hop_s(model: Architecture, num_tokens: float, basis: Basis) -> float:
    """Seconds of a boundary tensor from one device to another: down to the host, then up; 0 without a link."""
    rate = basis.get("copy_bytes_per_s", float("inf"))
    return 2 * boundary_bytes(model, num_tokens) / rate


def seconds(load: Load, basis: Basis, kernels: Kernels) -> float:
    """Time of a load on one device, its parts one after the other."""
    if kernels == "eager":
        rate = basis["matmul_flops_per_s"] * basis["matmul_efficiency"]
    else:
        rate = basis["wide_matmul_flops_per_s"] * basis["wide_matmul_efficiency"]
    traffic = load.memory_bytes * (1.0 if kernels == "eager" else basis["fused_traffic_share"])
    return (
        load.matmul_flops / rate
        + (load.attention_flops and load.attention_flops / _attention_rate(basis))
        + traffic / (basis["memory_bytes_per_s"] * basis["memory_efficiency"])
    )


def _attention_rate(basis: Basis) -> float:
    return basis["wide_matmul_flops_per_s"] * basis["attention_efficiency"]


def head_s(model: Architecture, num_tokens: float, basis: Basis, kernels: Kernels, *, backward: bool) -> float:
    """Seconds of final norm, output matrix and loss, one way."""
    load = head_backward(model, num_tokens, basis) if backward else head_forward(model, num_tokens, basis)
    if kernels == "fused":  # the loss in fp32 over the whole vocabulary, in kernels of its own
        passes = basis["fused_loss_bytes"] * (1 / 3 if backward else 2 / 3)
        extra = num_tokens * model.vocab * (passes - basis["logit_bytes"])
        load = load._replace(memory_bytes=load.memory_bytes + extra / basis["fused_traffic_share"])
    return seconds(load, basis, kernels)


def correction(model: Architecture, part: str, basis: Basis) -> float:
    """Measured over counted time of a part of a model's layers on the machine where it was measured.

    1 for models that were not measured, and for the backward of layers with experts: what that takes beyond the count
    is counted as bytes of their weights (`layer_weight_grad`). Their forward was timed on one device alone; the turns
    of one interpreter among several are counted elsewhere (`expert_pass_s`).
    """
    own = correction_name(model.published_name or "", part)
    return basis[own] if own in basis.values else 1.0


def correction_name(published_name: str, part: str) -> str:
    """The constant that holds a model's correction of a part of its layers."""
    slug = published_name.replace("-", "_").replace(".", "p")
    return f"{slug}_{part}_correction"
