"""Megatron: a pipeline in the order of 1F1B, or every product divided among all devices.

    pipeline  stages bound to devices; the layers are cut so that the slowest stage is as fast as the memory of the
              devices allows (`rpbench.predict.cuts`); the order is timed by the simulator; optimizer on the devices
    tensor    every layer reduces its output twice on all devices in forward, recomputation and backward, behind the
              computation; embedding and head reduce once each way

Kernels are fused ones whose products are summed in fp32, and the loss is taken in fp32 over the whole vocabulary.

Source: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", SC'21,
section 2; Shoeybi et al., "Megatron-LM" (arXiv 1909.08053), section 3, for the collectives.
"""

from dataclasses import replace
from functools import lru_cache

from rpbench import registry
from rpbench.cost.hardware.basis import Basis
from rpbench.cost.table import LayerTimes
from rpbench.ir.schedule import Shape
from rpbench.mesh.layers.collectives import reduce_s
from rpbench.mesh.layers.layer_seconds import eager_kernels
from rpbench.mesh.layers.layer_times import boundary_bytes, setting_of, times_of
from rpbench.mesh.layout import Mesh
from rpbench.predict.case import FUSED, Case, Terms, ring
from rpbench.predict.cuts import bound_cut
from rpbench.predict.experts import loop_s
from rpbench.sim.graph import Graph, build_graph
from rpbench.sim.longest_path import simulate_graph

GRADIENT_BYTES = 4  # gradients of a tied embedding are reduced in fp32


def pipeline_step(case: Case, basis: Basis) -> Terms:
    """Seconds of a step of the 1F1B pipeline."""
    cut = bound_cut(case)
    times = pipeline_times(case, basis)
    timeline = simulate_graph(_graph(case.num_devices, case.settings.num_calls), times.table(cut))
    model, most = case.model, max(cut.forward)
    rate = basis["memory_bytes_per_s"] * basis["memory_efficiency"]
    tied = GRADIENT_BYTES * model.embedding_parameters if model.tied and case.num_devices > 1 else 0
    return {
        "pipeline": float(max(timeline.end)),
        "tied embedding": reduce_s(tied, ring(2, basis)) if tied else 0.0,
        "optimizer": basis["adam_bytes"] * most * model.trainable_layer_parameters / rate,
    }


def pipeline_times(case: Case, basis: Basis) -> LayerTimes:
    """Times of a microbatch through each layer, and from device to device.

    Grouped products know no adapters: with them, every process loops over the experts of its stage.
    """
    times = times_of(setting_of(case.model, case.microbatch_tokens, basis, FUSED))
    hop = 0.0
    if case.num_devices > 1:  # directly, or down to the host and up again, whichever is faster
        pace = max(basis["collective_bytes_per_s"], basis["copy_bytes_per_s"] / 2)
        hop = boundary_bytes(case.model, case.microbatch_tokens) / pace
    loop = loop_s(case.model, basis) if case.model.lora_rank else 0.0
    forward, recompute, backward = (
        [time + loop for time in part] for part in (times.forward, times.recompute, times.backward)
    )
    return LayerTimes(forward, recompute, backward, times.head_forward, times.head_backward, hop=hop)


@lru_cache(maxsize=16)
def _graph(num_devices: int, num_microbatches: int) -> Graph:
    return build_graph(registry.entry("1f1b").build(Shape(num_devices, num_devices, num_microbatches)))


def tensor_step(case: Case, basis: Basis) -> Terms:
    """Seconds of a step with every layer divided among all devices."""
    model, tokens, devices = case.model, case.microbatch_tokens, case.num_devices
    kernels = eager_kernels(replace(setting_of(model, tokens, basis, FUSED), mesh=Mesh(tensor=devices)))
    forward, input_grad, weight_grad = kernels.layer()
    layer, head = 2 * forward + input_grad + weight_grad, sum(kernels.head())
    reduced = basis["tensor_reductions"] * model.num_layers + 2
    each = reduce_s(boundary_bytes(model, tokens), ring(devices, basis))
    rate = basis["memory_bytes_per_s"] * basis["memory_efficiency"]
    calls = case.settings.num_calls
    return {
        "computation": calls * (model.num_layers * layer + head / devices),
        "reductions": calls * reduced * each,
        "optimizer": basis["adam_bytes"] * model.trainable_parameters / devices / rate,
    }
