"""Megatron: a pipeline in the order of 1F1B, or every product divided among all devices.

    pipeline  stages bound to devices; the layers are cut so that the slowest stage is as fast as the memory of the
              devices allows; the order is timed by the simulator; optimizer on the devices
    tensor    every layer reduces its output twice on all devices in forward, recomputation and backward, behind the
              computation; embedding and head reduce once each way

The cuts of the published runs are not public. We assume the cut of the artifact's simulator for 1F1B if it fits, else
the fastest cut that fits, of all numbers of layers in the first and last stage, with the others even.

Kernels are fused ones whose products are summed in fp32, and the loss is taken in fp32 over the whole vocabulary.

Source: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", SC'21,
section 2; Shoeybi et al., "Megatron-LM" (arXiv 1909.08053), section 3, for the collectives.
"""

from dataclasses import dataclass, field, replace
from functools import cache, lru_cache

from rpbench.cost.hardware.basis import Basis
from rpbench.cost.published import published_partition
from rpbench.cost.table import LayerTimes
from rpbench.ir.partition import Partition, symmetric
from rpbench.ir.schedule import Shape
from rpbench.mesh.layers.collectives import reduce_s
from rpbench.mesh.layers.layer_seconds import eager_kernels
from rpbench.mesh.layers.layer_times import times_of
from rpbench.mesh.layout import Mesh
from rpbench.predict.case import Case, Terms, loop_s, ring
from rpbench.predict.footprint import pipeline_stage
from rpbench.registry import entry
from rpbench.sim.graph import Graph, build_graph
from rpbench.sim.longest_path import simulate_graph


def bound_cut(case: Case) -> Partition:
    """The artifact's cut if it fits; else the cut that lacks least memory, and then has the fastest slowest stage."""
    identity = (case.model, case.num_devices, case.settings, tuple(sorted(case.basis.values.items())))
    return symmetric(case.cut or _best(_Key(identity, case)))


@dataclass(frozen=True)
class _Key:
    """A case as a cache key: equal where its cut is."""

    identity: tuple[object, ...]
    case: Case = field(compare=False)


@lru_cache(maxsize=256)
def _best(key: _Key) -> tuple[int, ...]:
    case = key.case
    times = times_of(case.setting(case.microbatch_tokens))
    layer = times.forward[0] + times.recompute[0] + times.backward[0]
    head = times.head_forward + times.head_backward
    limit = case.basis.usable_memory_bytes

    @cache
    def size(stage: int, count: int) -> float:
        return sum(pipeline_stage(case, stage, count).values())

    def lacks(cut: tuple[int, ...]) -> float:
        return max(0.0, max(size(stage, count) for stage, count in enumerate(cut)) - limit)

    def rank(cut: tuple[int, ...]) -> tuple[float, float, int]:
        slowest = max(layer * count + head * (stage == len(cut) - 1) for stage, count in enumerate(cut))
        return lacks(cut), slowest, -min(cut)

    if case.num_devices == 8 and case.model.published_name:
        cut = published_partition("1f1b", case.model.published_name).forward
        if lacks(cut) == 0:
            return cut
    return min(_candidates(case.model.num_layers, case.num_devices), key=rank)


def _candidates(num_layers: int, num_stages: int) -> list[tuple[int, ...]]:
    if num_stages == 1:
        return [(num_layers,)]
    if num_stages == 2:
        return [(num_layers - last, last) for last in range(num_layers + 1)]
    most = -(-num_layers // num_stages) + 1
    return [
        (first, *_even(num_layers - first - last, num_stages - 2), last)
        for last in range(min(most, num_layers) + 1)
        for first in range(min(most, num_layers - last) + 1)
    ]


def _even(num_layers: int, num_stages: int) -> tuple[int, ...]:
    each, more = divmod(num_layers, num_stages)
    return tuple(each + (stage < more) for stage in range(num_stages))


GRADIENT_BYTES = 4  # gradients of a tied embedding are reduced in fp32


def pipeline_step(case: Case, basis: Basis) -> Terms:
    """Seconds of a step of the 1F1B pipeline."""
    cut = bound_cut(case)
    times = pipeline_times(case, basis)
    timeline = simulate_graph(graph_of(case.num_devices, case.settings.num_calls), times.table(cut))
    model, most = case.model, max(cut.forward)
    tied = GRADIENT_BYTES * model.embedding_parameters if model.tied and case.num_devices > 1 else 0
    return {
        "pipeline": float(max(timeline.end)),
        "tied embedding": reduce_s(tied, ring(2, basis)) if tied else 0.0,
        "optimizer": basis["adam_bytes"] * most * model.trainable_layer_parameters / basis.memory_rate,
    }


def pipeline_times(case: Case, basis: Basis) -> LayerTimes:
    """Times of a microbatch through each layer, and from device to device.

    Grouped products know no adapters: with them, every process loops over the experts of its stage.
    """
    times = times_of(case.setting(case.microbatch_tokens, basis))
    hop = 0.0
    if case.num_devices > 1:  # directly, or down to the host and up again, whichever is faster
        pace = max(basis["collective_bytes_per_s"], basis["copy_bytes_per_s"] / 2)
        hop = case.model.boundary_bytes(case.microbatch_tokens) / pace
    loop = loop_s(case.model, basis) if case.model.lora_rank else 0.0
    forward, recompute, backward = (
        [time + loop for time in part] for part in (times.forward, times.recompute, times.backward)
    )
    return LayerTimes(forward, recompute, backward, times.head_forward, times.head_backward, hop=hop)


@lru_cache(maxsize=16)
def graph_of(num_devices: int, num_microbatches: int) -> Graph:
    return build_graph(entry("1f1b").build(Shape(num_devices, num_devices, num_microbatches)))


def tensor_step(case: Case, basis: Basis) -> Terms:
    """Seconds of a step with every layer divided among all devices."""
    model, tokens, devices = case.model, case.microbatch_tokens, case.num_devices
    kernels = eager_kernels(replace(case.setting(tokens, basis), mesh=Mesh(tensor=devices)))
    forward, input_grad, weight_grad = kernels.layer()
    layer, head = 2 * forward + input_grad + weight_grad, sum(kernels.head())
    reduced = basis["tensor_reductions"] * model.num_layers + 2
    each = reduce_s(model.boundary_bytes(tokens), ring(devices, basis))
    calls = case.settings.num_calls
    return {
        "computation": calls * (model.num_layers * layer + head / devices),
        "reductions": calls * reduced * each,
        "optimizer": basis["adam_bytes"] * model.trainable_parameters / devices / basis.memory_rate,
    }
