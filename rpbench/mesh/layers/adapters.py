"""Adapters of a layer's linear maps on one device of a mesh (LoRA, arXiv 2106.09685): two thin matrices beside each."""

from typing import NamedTuple

from rpbench.workload.architecture import Architecture
from rpbench.workload.counts import Layer, Linear

# Maps whose inputs are cut over tensor shards, and those that every shard has whole; the others are cut by outputs.
CUT_INSIDE, UNCUT = ("o_proj", "down_proj"), ("q_a_proj", "kv_a_proj_with_mqa", "router")


class Adapters(NamedTuple):
    """Adapters of a run whose framework fuses linear maps before it adapts them; routed experts have none."""

    rank: int  # inner width
    mlp: bool = True  # whether the maps of the MLP have them too, or attention's alone


def adapted_maps(own: Architecture, fused: Adapters | None, layer: Layer, tensor: int) -> list[tuple[int, int]]:
    """(inputs, outputs) of a layer's maps with adapters, on one of so many shards, without those of routed experts.

    With `fused=None` the architecture's own adapters, if any, beside maps that are not fused.
    """
    if fused is None:
        adapted = [each for each in own.linear_maps(layer.routed) if own.adapted(each) and each.part != "experts"]
        maps = [(m.inputs, m.outputs, m.name in CUT_INSIDE, m.name not in (*CUT_INSIDE, *UNCUT)) for m in adapted]
    else:
        maps = [*own.attention_maps(), *(own.mlp_maps(own.inner) if fused.mlp and not layer.routed else ())]
    return [(k // tensor if cut_in else k, n // tensor if cut_out else n) for k, n, cut_in, cut_out in maps]


def adapted_experts(own: Architecture, layer: Layer) -> list[Linear]:
    """The maps of all routed experts of a layer that have adapters."""
    return [each for each in own.linear_maps(layer.routed) if each.part == "experts" and own.adapted(each)]
