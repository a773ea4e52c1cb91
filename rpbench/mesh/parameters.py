"""Parameters on one device of each pipeline rank or stage, dense and of experts, under a mesh."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

from rpbench.cost.footprint.sizes import LayerSize
from rpbench.mesh.job import Job
from rpbench.mesh.layers.adapters import adapted_experts, adapted_maps
from rpbench.mesh.layers.layer_seconds import padded_vocab
from rpbench.mesh.layout import Sharded
from rpbench.mesh.software import Software
from rpbench.workload.counts import BYTES_PER_VALUE, Layer


class Held(NamedTuple):
    """Parameters of a device before data parallelism shares them."""

    # dense, experts: of the layers, embedding and head among the dense ones
    dense: float
    experts: float
    largest: float  # dense and expert parameters of the largest layer


def held(job: Job, rank: int) -> Held:
    """The parameters of a device of a pipeline rank; a tied matrix counts once where both its uses are."""
    stages = [held_by_stage(job, stage) for stage in job.stages_of(rank)]
    own = job.architecture
    twice = own.tied and job.mesh.pipeline == 1
    matrix = padded_vocab(job) / job.mesh.tensor * own.hidden if twice else 0.0
    return Held(
        sum(each.dense for each in stages) - matrix,
        sum(each.experts for each in stages),
        max(each.largest for each in stages),
    )


def states_of(software: Software, what: Sharded, whole: Any, shard: Any) -> LayerSize:
    """Bytes of some parameters on a device, of which replicas share `what`.

    `whole` and `shard` are the number of parameters, and of those that a device owns, or arrays of many plans.
    """
    return LayerSize(
        2.0 * (shard if what == "parameters" else whole),
        software.accumulate_bytes * (shard if what in ("gradients", "parameters") else whole),
        software.optimizer_bytes * (whole if what == "none" else shard),
    )


def states_held(job: Job, own: Held) -> LayerSize:
    """The same for the parameters of a device of a job."""
    mesh = job.mesh
    shard = own.dense / mesh.shard_group + own.experts / mesh.expert_shard_group
    return states_of(job.software, mesh.sharing.what, own.dense + own.experts, shard)


def trained(job: Job, rank: int) -> Held:
    """The parameters of a device of a pipeline rank that learn."""
    return learning(job, held(job, rank), (each for stage in job.stages_of(rank) for each in job.stage_layers[stage]))


def learning(job: Job, own: Held, layers: Iterable[tuple[Layer, int]]) -> Held:
    """The parameters of some layers, (kind, how many), that learn: all of them, or the adapters beside them."""
    return _summed(layers, partial(adapter_parameters, job)) if job.has_adapters else own


def _summed(layers: Iterable[tuple[Layer, int]], of_kind: Callable[[Layer], tuple[float, float]]) -> Held:
    """The parameters of layers, (kind, how many), from the dense ones and those of experts of one layer."""
    dense = experts = largest = 0.0
    for kind, count in layers:
        of_layer, of_experts = of_kind(kind)
        dense, experts = dense + count * of_layer, experts + count * of_experts
        largest = max(largest, of_layer + of_experts)
    return Held(dense, experts, largest)


def adapter_parameters(job: Job, kind: Layer) -> tuple[float, float]:
    """Parameters of a layer's adapters on a device, and of those beside its routed experts; 0 without adapters."""
    own, mesh = job.architecture, job.mesh
    rank = job.adapters.rank if job.adapters else own.lora_rank or 0
    beside = sum(map(sum, adapted_maps(own, job.adapters, kind, mesh.tensor)))
    of_experts = sum(m.matrices * (m.inputs + m.outputs) for m in adapted_experts(own, kind))
    return float(rank * beside), rank * of_experts / (mesh.expert * mesh.expert_tensor)


def held_by_stage(job: Job, stage: int) -> Held:
    """The parameters of a device for one stage; the first has the embedding, the last the head."""
    return held_layers(job, job.stage_layers[stage], first=stage == 0, last=stage == job.num_stages - 1)


def held_layers(job: Job, layers: Iterable[tuple[Layer, int]], *, first: bool, last: bool) -> Held:
    """The parameters of a device for layers, (kind, how many), with the embedding if `first` and the head if `last`."""
    own, mesh = job.architecture, job.mesh
    cuts = mesh.expert * mesh.expert_tensor
    found = _summed(layers, lambda kind: (own.dense_parameters(kind) / mesh.tensor, own.expert_parameters(kind) / cuts))
    rows = padded_vocab(job) / mesh.tensor
    dense = found.dense + first * (rows + own.learned_positions) * own.hidden
    return found._replace(dense=dense + last * rows * own.hidden)


def bits_of_weights(job: Job) -> float:
    """Bits of a layer's weights over the usual 16: fewer where frozen ones are quantised."""
    return job.architecture.layer_weight_bytes / (BYTES_PER_VALUE * job.architecture.layer_parameters)


def gathered_layers(job: Job, layers: Iterable[tuple[Layer, int]], *, first: bool, last: bool) -> Held:
    """`held_layers` as so many values of 16 bits, which a gather moves; quantised weights stay so on their way."""
    bits, ends = bits_of_weights(job), held_layers(job, (), first=first, last=last)
    found = held_layers(job, layers, first=False, last=False)
    return Held(bits * found.dense + ends.dense, bits * found.experts, bits * found.largest)
