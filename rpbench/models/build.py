"""A model as a sequence of layers with random weights: embedding, `num_layers` decoder layers, head.

Every parameter is drawn on the CPU in float32 from its own generator, so a weight depends on the seed, its layer and
its name only: not on the partition, the device, the order of construction or adapters, and on the type only by
rounding.
"""

import torch
from torch import nn

from rpbench.models.data import generator_for
from rpbench.models.families import TRAITS
from rpbench.models.layers import DecoderLayer, Embedding, Head
from rpbench.models.linear import add_adapters
from rpbench.workload.architecture import Architecture, why_not_built

INITIAL_DEVIATION = 0.02  # `initializer_range` of the public configurations

Place = tuple[int, str]  # (layer, name of the parameter in that layer)


def build_model(
    model: Architecture, *, seed: int = 0, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> nn.Sequential:
    """All `num_layers + 2` layers: tokens (B, S) -> logits (B, S, V). Tied weights are one parameter.

    The loss of labels (B, S) is `layers[-1](layers[:-1](tokens), labels)`.
    """
    layers = nn.Sequential(
        *(build_layer(model, index, seed=seed, dtype=dtype, device=device) for index in range(model.num_layers + 2))
    )
    for (owner, name), *others in shared_parameters(model):
        for layer, other in others:
            setattr(layers[layer], other, getattr(layers[owner], name))
    return layers


def build_layer(
    model: Architecture,
    index: int,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> nn.Module:
    """Layer `index` alone, with its weights in the whole model; on the `meta` device without values.

    Raises ValueError for an unknown layer, or a shape without a module.
    """
    if not 0 <= index < model.num_layers + 2:
        raise ValueError(
            f"layer {index}: {model.name} has the layers 0 (embedding), 1 to {model.num_layers}, "
            f"and {model.num_layers + 1} (head)"
        )
    if why := why_not_built(model):
        raise ValueError(why)
    if TRAITS[model.family].needs_gate and not model.gated:
        raise ValueError(f"model.gated=false: the activation of family {model.family} needs a gate; use gated=true")
    with torch.device("meta"):
        layer = _module(model, index)
    for module in layer.modules():  # as Module.to_empty, which imports a compiler
        for name, parameter in list(module.named_parameters(recurse=False)):
            values = torch.empty(parameter.shape, dtype=dtype, device=device)
            setattr(module, name, nn.Parameter(values, parameter.requires_grad))
    if torch.device(device).type != "meta":
        _draw(layer, model, index, seed)
    return layer


def shared_parameters(model: Architecture) -> tuple[tuple[Place, ...], ...]:
    """Groups of places that hold one tensor, its owner first: embedding and head if they are tied."""
    return (((0, "weight"), (model.num_layers + 1, "weight")),) if model.tied else ()


def _module(model: Architecture, index: int) -> nn.Module:
    if index == 0:
        layer: nn.Module = Embedding(model)
    elif index <= model.num_layers:
        layer = DecoderLayer(model, index - 1)
    else:
        layer = Head(model)
    if model.lora_rank is None:
        return layer
    if isinstance(layer, DecoderLayer):
        return add_adapters(layer, model.lora_rank)
    return layer.requires_grad_(False)


@torch.no_grad()
def _draw(layer: nn.Module, model: Architecture, index: int, seed: int) -> None:
    owners = {place: places[0] for places in shared_parameters(model) for place in places}
    for name, parameter in layer.named_parameters():
        owner, owned = owners.get((index, name), (index, name))
        kind = owned.rpartition(".")[2]
        if kind == "scale":
            parameter.fill_(1.0)
        elif kind in ("bias", "lora_b"):  # an adapter starts without effect
            parameter.zero_()
        else:
            values = torch.empty(parameter.shape, dtype=torch.float32)
            values.normal_(std=INITIAL_DEVIATION, generator=generator_for("weights", seed, owner, owned))
            parameter.copy_(values)
