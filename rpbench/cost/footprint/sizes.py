"""Sizes of a model's layers in bytes: weights, gradients, optimizer state, activations, logits.

Mixed precision: weights and gradients in 16 bits; the optimizer (Adam) keeps master weights and two moments in 32 bits.

Frozen layers have weights alone. With 8-bit moments a parameter of a layer or of the head has a master of 4 bytes and
two moments of one, each with a scale of 4 bytes for a block of 2,048; the embedding keeps 32 bits.

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC'20, section 3.1;
Dettmers et al., "8-bit Optimizers via Block-wise Quantization", arXiv 2110.02861, sections 2 and 3.
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from rpbench.ir.schedule import Schedule, Weights
from rpbench.workload.architecture import Architecture
from rpbench.workload.counts import BYTES_PER_VALUE

# Per trainable parameter: fp32 master, Adam's m and v (ZeRO, section 3.1).
OPTIMIZER_BYTES = 12
OPTIMIZER_BYTES_8 = 4 + 2 * (1 + 4 / 2048)  # the same with block-wise moments of 8 bits
# Per logit: 2 as the product comes, 4 for the softmax that becomes its gradient; our reading.
LOGITS_BYTES = 6
# The library computes head, loss and their gradients in chunks of so many tokens.
HEAD_CHUNK_TOKENS = 4096
# Layers gathered at a time by software that gathers layer by layer: the current and the next, own shards included.
LAYERS_GATHERED = 2


class LayerSize(NamedTuple):
    """Bytes of a layer or a stage; `optimizer` where it is kept on the device, `activations` of one microbatch.

    Whole numbers, fractions where a mesh divides a layer, or arrays of the stages of many cuts, (plans, stages).

    Args:
        inputs: of a microbatch, if every layer is recomputed from its own input; 0: only the input of its stage stays,
            and all its layers are recomputed at once.
    """

    weights: Any
    gradients: Any
    optimizer: Any
    activations: Any = 0
    inputs: Any = 0


class LayerActivations(NamedTuple):
    """Bytes of one microbatch in one layer.

    Args:
        whole: held from F on.
        for_weights: the part held until W; the rest goes at I.
    """

    whole: float
    for_weights: float


# Of unknown layers, all is held until W.
UNKNOWN = LayerActivations(1, 1)


@dataclass(frozen=True)
class ModelBytes:
    """Sizes of a model's layers for one microbatch size.

    Args:
        layers: the decoder layers, in model order.
        embedding, head: of the first and of the last stage.
        boundary: bytes of the tensor between two stages, for one microbatch.
        logits, logits_chunk: of a whole microbatch, and of as many tokens as a chunked loss takes at a time.
        keeps_activations: whether they stay from forward to backward; otherwise a stage's input does.
        until_weights: fraction of the activations kept that is held until W; the rest goes at I.
        logits_until_weights: the same of logits, of which W needs the gradient.
        each: tokens of every microbatch of a step over those of the largest, which the sizes are of; empty where all
            are alike.
        working: further buffers of a backward, of bound stages.
        tied: embedding and head are one matrix, which a device with both holds once; otherwise there are two.
        summed_bytes: of a gradient value that adds up on its device; `reduced_bytes` where replicas sum it. Other sizes
            of gradients are in 16 bits.
    """

    layers: tuple[LayerSize, ...]
    embedding: LayerSize
    head: LayerSize
    boundary: int
    logits: int
    logits_chunk: int
    keeps_activations: bool = False
    until_weights: float = 1.0
    logits_until_weights: float = 1.0
    each: tuple[float, ...] = ()
    working: int = 0
    tied: bool = False
    summed_bytes: int = BYTES_PER_VALUE
    reduced_bytes: int = BYTES_PER_VALUE

    def under(self, schedule: Schedule) -> "ModelBytes":
        """The sizes for a schedule: a tied matrix counts once if devices have both its ends."""
        once = self.tied and schedule.weights is Weights.BOUND and schedule.ends_together
        return replace(self, head=LayerSize(0, 0, 0), tied=False) if once else self

    @property
    def by_layer(self) -> bool:
        """Whether layers are recomputed one by one."""
        return any(layer.inputs for layer in self.layers)

    @property
    def added_up(self) -> "ModelBytes":
        """The sizes with gradients as they add up on a device."""
        if self.summed_bytes == BYTES_PER_VALUE:
            return self

        gradients = (layer.gradients * self.summed_bytes // BYTES_PER_VALUE for layer in self.every)
        *layers, embedding, head = (own._replace(gradients=new) for own, new in zip(self.every, gradients, strict=True))
        return replace(self, layers=tuple(layers), embedding=embedding, head=head, summed_bytes=BYTES_PER_VALUE)

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def every(self) -> tuple[LayerSize, ...]:
        """Decoder layers, embedding and head."""
        return (*self.layers, self.embedding, self.head)

    @property
    def of_a_layer(self) -> LayerActivations:
        """Activations that a layer which learns keeps where nothing is recomputed, for orders that depend on them."""
        whole = max(layer.activations for layer in self.layers)
        return LayerActivations(whole, whole * self.until_weights) if whole else UNKNOWN

    @property
    def of_each(self) -> tuple["ModelBytes", ...]:
        """The sizes for every microbatch of a step, all by tokens; these alone where all are alike."""
        if not self.each:
            return (self,)
        found = {part: self._scaled(part) for part in set(self.each)}
        return tuple(found[part] for part in self.each)

    def _scaled(self, part: float) -> "ModelBytes":
        return replace(
            self,
            layers=tuple(
                layer._replace(activations=round(layer.activations * part), inputs=round(layer.inputs * part))
                for layer in self.layers
            ),
            working=round(self.working * part),
            boundary=round(self.boundary * part),
            logits=round(self.logits * part),
            logits_chunk=round(self.logits_chunk * part),
            each=(),
        )


@dataclass(frozen=True)
class DeviceMemory:
    """Sizes of a model's layers, and the bytes a device has for them."""

    sizes: ModelBytes
    limit_bytes: int


def model_bytes(model: Architecture, tokens_per_microbatch: int, kept: float | None = None) -> ModelBytes:
    """Sizes of a model's layers; a matrix that embedding and head share counts twice, once at either end.

    Args:
        kept: bytes that a layer keeps of a microbatch; None: the tensors that figure 2 of RoundPipe counts.
    """
    adapters = model.trainable_layer_parameters if model.lora_rank else 0
    state = OPTIMIZER_BYTES if model.optimizer_bits == 32 else OPTIMIZER_BYTES_8
    layer = _size(model.layer_parameters + adapters, model.trainable_layer_parameters, state)
    layer = layer._replace(weights=model.layer_weight_bytes + BYTES_PER_VALUE * adapters)
    kept = model.layer_activation_bytes(tokens_per_microbatch) if kept is None else kept
    chunk_tokens = min(tokens_per_microbatch, HEAD_CHUNK_TOKENS)
    return ModelBytes(
        layers=(layer._replace(gradients=0, optimizer=0),) * model.frozen_layers
        + (layer._replace(activations=int(kept)),) * (model.num_layers - model.frozen_layers),
        embedding=_size(model.embedding_parameters, model.embedding_parameters * model.trains_embedding),
        head=_size(model.head_parameters, model.head_parameters * (model.lora_rank is None), state),
        boundary=model.boundary_bytes(tokens_per_microbatch),
        logits=LOGITS_BYTES * tokens_per_microbatch * model.vocab,
        logits_chunk=LOGITS_BYTES * chunk_tokens * model.vocab,
    )


def _size(parameters: int, trainable: int, state: float = OPTIMIZER_BYTES) -> LayerSize:
    return LayerSize(BYTES_PER_VALUE * parameters, BYTES_PER_VALUE * trainable, round(state * trainable))


def saved_state(size: LayerSize) -> int:
    """Bytes by which optimizer state is smaller than with moments in 32 bits."""
    return OPTIMIZER_BYTES // BYTES_PER_VALUE * size.gradients - size.optimizer
