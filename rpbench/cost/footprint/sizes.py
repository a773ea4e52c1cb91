"""Sizes of a model's layers in bytes: weights, gradients, optimizer state, activations, logits.

Mixed precision: weights and gradients in 16 bits; the optimizer (Adam) keeps master weights and two moments in 32 bits.
Frozen layers have weights only. With 8-bit moments, a parameter of a layer or of the head has a master weight of 4
bytes and two moments of 1 byte, with a scale of 4 bytes for every block of 2,048; the embedding keeps 32 bits.

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
# Per logit: 2 for the product, 4 for the softmax, which becomes the gradient; our reading.
LOGITS_BYTES = 6
# Tokens of a chunk in which RoundPipe's library computes head, loss and their gradients.
HEAD_CHUNK_TOKENS = 4096
# Layers held at a time by software that gathers layer by layer: the current and the next, own shards included.
LAYERS_GATHERED = 2


class LayerSize(NamedTuple):
    """Bytes of a layer or a stage.

    Integers, floats where a mesh divides a layer, or arrays of the stages of many cuts, (plans, stages).
    """

    weights: Any
    gradients: Any
    optimizer: Any
    activations: Any = 0  # of one microbatch
    # of one microbatch, if every layer is recomputed from its own input; 0: only the input of a stage is saved, and
    # all its layers are recomputed together
    inputs: Any = 0


class LayerActivations(NamedTuple):
    """Bytes of one microbatch in one layer."""

    whole: float  # held from F on
    for_weights: float  # the part held until W; I frees the rest


UNKNOWN = LayerActivations(1, 1)  # of unknown layers: all is held until W


@dataclass(frozen=True)
class ModelBytes:
    """Sizes of a model's layers for one microbatch size."""

    layers: tuple[LayerSize, ...]  # the decoder layers, in model order
    # embedding, head: of the first and of the last stage
    embedding: LayerSize
    head: LayerSize
    boundary: int  # of the tensor between two stages, for one microbatch
    # logits, logits_chunk: of a whole microbatch, and of one chunk of tokens under a chunked loss
    logits: int
    logits_chunk: int
    # whether they are saved from forward to backward; otherwise the input of a stage is
    keeps_activations: bool = False
    until_weights: float = 1.0  # fraction of the saved activations that is held until W; I frees the rest
    logits_until_weights: float = 1.0  # the same of logits, whose gradient W needs
    # tokens of every microbatch of a step over those of the largest, for which the sizes are; empty: all are equal
    each: tuple[float, ...] = ()
    working: int = 0  # further buffers of a backward, where stages are bound to devices
    # embedding and head are one matrix, of which a device with both has one copy; otherwise there are two
    tied: bool = False
    # summed_bytes, reduced_bytes: of a gradient value where a device accumulates it, and where replicas sum it. All
    # other sizes of gradients are in 16 bits
    summed_bytes: int = BYTES_PER_VALUE
    reduced_bytes: int = BYTES_PER_VALUE

    def under(self, schedule: Schedule) -> "ModelBytes":
        """The sizes for a schedule: a tied matrix counts once if embedding and head are on the same devices."""
        once = self.tied and schedule.weights is Weights.BOUND and schedule.ends_together
        return replace(self, head=LayerSize(0, 0, 0), tied=False) if once else self

    @property
    def by_layer(self) -> bool:
        """Whether layers are recomputed one by one."""
        return any(layer.inputs for layer in self.layers)

    @property
    def added_up(self) -> "ModelBytes":
        """The sizes with gradients as devices accumulate them."""
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
        """Activations of a layer that is not frozen, without recomputation; for orders that depend on them."""
        whole = max(layer.activations for layer in self.layers)
        return LayerActivations(whole, whole * self.until_weights) if whole else UNKNOWN

    @property
    def of_each(self) -> tuple["ModelBytes", ...]:
        """The sizes for every microbatch of a step, in proportion to its tokens; only these if all are equal."""
        if not self.each:
            return (self,)
        found = {part: replace(self.of_part(part), each=()) for part in set(self.each)}
        return tuple(found[part] for part in self.each)

    def of_part(self, part: float) -> "ModelBytes":
        """The sizes for that part of a microbatch's tokens."""
        changed: dict[str, Any] = {
            name: round(getattr(self, name) * part) for name in ("working", "boundary", "logits", "logits_chunk")
        }
        layers = tuple(
            layer._replace(activations=round(layer.activations * part), inputs=round(layer.inputs * part))
            for layer in self.layers
        )
        return replace(self, layers=layers, **changed)


@dataclass(frozen=True)
class DeviceMemory:
    """Sizes of a model's layers, and the bytes that a device has for them."""

    sizes: ModelBytes
    limit_bytes: int


def model_bytes(model: Architecture, tokens_per_microbatch: int, kept: float | None = None) -> ModelBytes:
    """Sizes of a model's layers; a tied matrix counts twice, in embedding and head.

    `kept`: activations of a layer, in bytes of a microbatch; None: the tensors that figure 2 of RoundPipe counts.
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
    """Bytes that optimizer state is smaller than with moments in 32 bits."""
    return OPTIMIZER_BYTES // BYTES_PER_VALUE * size.gradients - size.optimizer
