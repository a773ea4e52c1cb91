"""Bytes of every class of tensor on a device and on the host, per system, and whether they fit.

A device counts at its fullest moment. Weights and gradients have 16 bits, Adam's state 32. A system that recomputes
keeps the input of every layer or stage and one layer's activations at a time.

Source: Rajbhandari et al., "ZeRO", SC'20, section 3.1, for bytes per parameter; each function says what its system
keeps.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import NamedTuple

from rpbench.cost.footprint.sizes import HEAD_CHUNK_TOKENS, model_bytes
from rpbench.cost.hardware.basis import Basis
from rpbench.cost.transfers import StageBytes
from rpbench.ir.partition import Partition
from rpbench.mesh.layers.layer_seconds import eager_kernels
from rpbench.mesh.layout import Mesh
from rpbench.predict.case import Bytes, Case
from rpbench.predict.roundpipe import first_plan, planned
from rpbench.workload.architecture import Architecture
from rpbench.workload.counts import BYTES_PER_VALUE

# Gradients of a boundary's size that a backward visit holds for each of its microbatches: one in, one out.
GRADIENT_TENSORS = 2
FP32, ADAM = 4, 8
# DeepSpeed fills one bucket of gradients while another is sent.
BUCKETS = 2
# Host bytes of a parameter: 16-bit weights; if trained also fp32 master, gradient and Adam's moments, 16-bit gradient.
HOST_TRAINED, HOST_FROZEN = 20, 2


class Verdict(NamedTuple):
    """Whether a run fits."""

    fits: bool
    margin: float  # free fraction of the memory of the fuller of device and host; negative if it does not fit
    breaks: str  # the largest class of tensors there, and the place: `logits on a device`


@dataclass(frozen=True)
class Footprint:
    """Bytes by class on the fullest device, and on the host."""

    device: Bytes
    host: Bytes

    def verdict(self, basis: Basis) -> Verdict:
        limits = (
            ("a device", self.device, basis.usable_memory_bytes),
            ("the host", self.host, basis.get("host_memory_bytes", inf)),
        )
        margins = [1 - sum(classes.values()) / limit for _, classes, limit in limits]  # 1 without a limit
        margin = min(margins)
        place, classes, _ = limits[margins.index(margin)]
        largest = max(classes, key=lambda name: classes[name], default="nothing")
        return Verdict(margin >= 0, margin, f"{largest} on {place}")


# --- RoundPipe and Mobius ------------------------------------------------------------------------------------


def streamed(case: Case) -> Footprint:
    """RoundPipe: the stage that runs, the next one, one stage's (or layer's) activations, boundary tensors.

    The fullest moment of two plans: that of measured times, and that of the first calls, which know sizes alone.
    """
    model, tokens = case.model, case.chunk_tokens
    plan = planned(case)
    moments = [moment for each in (plan, first_plan(case)) for moment in _moments(case, each)]
    inputs = len(plan.backward) if case.grain == "stage" else model.num_layers
    kept = case.settings.chunks.num * inputs * model.boundary_bytes(tokens)
    return Footprint(_fullest(moments), _host_state(model) | {"kept inputs": kept})


def _fullest(moments: Iterable[Bytes]) -> Bytes:
    return max(moments, key=lambda moment: sum(moment.values()))


def _moments(case: Case, plan: Partition) -> Iterator[Bytes]:
    """Bytes of a device in every backward visit of a plan, and in the largest forward visit.

    With experts, the next stage's weights come only when this stage has ended.
    """
    model, tokens = case.model, case.chunk_tokens
    boundary = model.boundary_bytes(tokens)
    ahead = model.experts is None
    buffers = min(2, case.settings.chunks.num)  # the next microbatch comes in while this one runs
    kernels = eager_kernels(case.setting(tokens))
    kept_by_layer, working = kernels.kept_bytes(), kernels.working_bytes()
    stages = StageBytes(plan, model_bytes(model, 1))
    backward = [stages.stage(number, backward=True) for number in range(len(plan.backward))]
    forward = [stages.stage(number, backward=False).weights for number in range(len(plan.forward))]
    logits = case.basis["chunk_logit_bytes"] * min(tokens, HEAD_CHUNK_TOKENS) * model.vocab
    for stage, layers in enumerate(plan.backward):
        fused = stage == len(plan.backward) - 1
        live = layers if case.grain == "stage" or fused else min(1, layers)
        kept_inputs = 1 if case.grain == "stage" or fused else max(1, layers)
        yield {
            "weights": float(backward[stage].weights),
            "prefetched weights": float(backward[stage - 1].weights) if stage and ahead else 0.0,
            "gradients": float(backward[stage].gradients),
            "activations": live * kept_by_layer + min(1, layers) * working,
            "boundary tensors": buffers * (kept_inputs + GRADIENT_TENSORS) * boundary,
            **({"logits": logits} if fused else {}),
        }
    most = max(plan.forward)
    outputs = most if case.grain == "layer" else 1  # on their way to the host
    yield {
        "weights": float((1 + ahead) * max(forward)),
        "activations": kept_by_layer / 2 + working,
        "boundary tensors": buffers * (outputs + 1) * boundary,
    }


def _host_state(model: Architecture) -> Bytes:
    frozen = model.total_parameters if model.lora_rank else 0
    return {
        "weights and optimizer state": float(HOST_TRAINED * model.trainable_parameters),
        "frozen weights": float(HOST_FROZEN * frozen),
    }


# --- data-parallel systems -----------------------------------------------------------------------------------


def zero2(case: Case) -> Footprint:
    """ZeRO-2: all weights, a share of gradients and state, a bucket, and what Hugging Face's loss makes of logits."""
    model, devices = case.model, case.num_devices
    trained = model.trainable_parameters
    state = {
        "weights": float(BYTES_PER_VALUE * _all_parameters(model)),
        "gradients": BYTES_PER_VALUE * trained / devices,
        "optimizer state": (FP32 + ADAM) * trained / devices,
        "buffers": BUCKETS * case.basis["bucket_bytes"],
    }
    return Footprint(_loss_or_backward(case, state), {})


def fsdp(case: Case) -> Footprint:
    """FSDP: a share of fp32 weights and Adam's moments; the root unit and two layers in 16 bits.

    Sharded gradients do not exist yet at the loss, where logits are largest; they do in the last backward.
    """
    model, devices = case.model, case.num_devices
    trained = model.trainable_parameters
    root = BYTES_PER_VALUE * (model.embedding_parameters + (0 if model.tied else model.head_parameters))
    state = {
        "weights": FP32 * _all_parameters(model) / devices,
        "optimizer state": ADAM * trained / devices,
        "gathered weights": float(root + 2 * BYTES_PER_VALUE * _layer_parameters(model)),
    }
    gradients = {"gradients": FP32 * trained / devices}
    return Footprint(_loss_or_backward(case, state, gradients), {})


def zero_infinity(case: Case) -> Footprint:
    """ZeRO-Infinity with weights and optimizer on the host: buckets, the head, the layers that run.

    Adapters are many small tensors, which stay on the devices; their gradients leave for the host with their bucket.
    """
    model = case.model
    resident = BYTES_PER_VALUE * model.trainable_parameters if model.lora_rank else 0
    state = {
        "resident adapters": float(resident),
        "gathered weights": float(BYTES_PER_VALUE * (model.head_parameters + 2 * _layer_parameters(model))),
        "buffers": BUCKETS * case.basis["bucket_bytes"],
    }
    gradients = {"gradients": float(BYTES_PER_VALUE * model.trainable_layer_parameters)}
    return Footprint(_loss_or_backward(case, state, gradients), _host_state(model))


def _loss_or_backward(case: Case, state: Bytes, in_backward: Bytes | None = None) -> Bytes:
    """The fuller moment: the loss, with all logits, or the first backward, with a layer's activations."""
    kernels = eager_kernels(case.setting(case.microbatch_tokens))
    logits = case.basis["eager_logit_bytes"] * case.microbatch_tokens * case.model.vocab
    layer = kernels.kept_bytes() + kernels.working_bytes()
    return _either(case, state, {**state, **(in_backward or {})}, logits, layer)


def _either(case: Case, in_loss: Bytes, in_backward: Bytes, logits: float, layer: float) -> Bytes:
    """The fuller of two moments, both with all saved inputs: at the loss with logits, or with a layer's activations."""
    kept = {"kept inputs": case.model.num_layers * case.model.boundary_bytes(case.microbatch_tokens)}
    return _fullest(({**in_loss, **kept, "logits": logits}, {**in_backward, **kept, "activations": layer}))


def _all_parameters(model: Architecture) -> int:
    return model.total_parameters + (model.trainable_parameters if model.lora_rank else 0)


def _layer_parameters(model: Architecture) -> int:
    return model.layer_parameters + (model.trainable_layer_parameters if model.lora_rank else 0)


# --- Megatron ------------------------------------------------------------------------------------------------


def pipeline_stage(case: Case, stage: int, num_layers: int) -> Bytes:
    """A stage of 1F1B: its state, an input a layer and microbatch in flight, one layer's activations, logits."""
    model, tokens, last = case.model, case.microbatch_tokens, case.num_devices - 1
    state = _megatron_state(case, num_layers, embedding=stage == 0, head=stage == last)
    in_flight = min(case.num_devices - stage, case.settings.num_calls)
    kernels = eager_kernels(case.setting(tokens))
    activations = kernels.kept_bytes() + kernels.working_bytes() / 2
    return {
        "weights, gradients and optimizer state": state,
        "kept inputs": in_flight * max(1, num_layers) * model.boundary_bytes(tokens),
        "activations": activations * min(1, num_layers),
        "logits": case.basis["pipeline_logit_bytes"] * tokens * model.vocab * (stage == last),
    }


def pipeline(case: Case, layers: Sequence[int]) -> Footprint:
    return Footprint(_fullest(pipeline_stage(case, stage, count) for stage, count in enumerate(layers)), {})


def tensor_parallel(case: Case) -> Footprint:
    """Tensor parallelism: state and logits are divided among the devices, the input of every layer is not."""
    model, tokens, devices = case.model, case.microbatch_tokens, case.num_devices
    state = _megatron_state(case, model.num_layers, embedding=True, head=not model.tied) / devices
    kernels = eager_kernels(replace(case.setting(tokens), mesh=Mesh(tensor=devices)))
    layer = kernels.kept_bytes() + kernels.working_bytes() / 2
    logits = case.basis["tensor_logit_bytes"] * tokens * model.vocab / devices
    states = {"weights, gradients and optimizer state": state}
    return Footprint(_either(case, states, states, logits, layer), {})


def _megatron_state(case: Case, num_layers: int, *, embedding: bool, head: bool) -> float:
    model, per_parameter = case.model, case.basis["megatron_state_bytes"]
    ends = model.embedding_parameters * embedding + model.head_parameters * head
    if model.lora_rank is None:
        return per_parameter * (num_layers * model.layer_parameters + ends)
    frozen = BYTES_PER_VALUE * (num_layers * model.layer_parameters + ends)
    return frozen + per_parameter * num_layers * model.trainable_layer_parameters
