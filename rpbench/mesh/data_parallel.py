"""Data parallelism: the exposed seconds of a step, for every way of sharding states."""

from typing import NamedTuple

from rpbench.mesh.job import Job
from rpbench.mesh.layers.collectives import gather_s, reduce_s, scatter_s
from rpbench.mesh.layers.layer_seconds import Seconds
from rpbench.mesh.parameters import Held, trained
from rpbench.mesh.placement import expert_replica_group, replica_group

TAIL = 0.06  # of exchanges beside computation: the first or the last bucket has no computation to hide behind


class Reduced(NamedTuple):
    """Seconds of one step on one device.

    Args:
        gradients: reducing them.
        parameters: gathering the new ones.
    """

    gradients: float
    parameters: float


def reduced(job: Job, own: Held) -> Reduced:
    """Seconds of reducing gradients and gathering parameters, without FSDP: devices keep their parameters."""
    mesh, links, software = job.mesh, job.setting.links, job.software
    gradients = parameters = 0.0
    groups = (
        (own.dense, mesh.replicas, mesh.shard_group, replica_group(mesh, job.machine, links)),
        (own.experts, mesh.expert_replicas, mesh.expert_shard_group, expert_replica_group(mesh, job.machine, links)),
    )
    for count, replicas, shards, group in groups:
        if replicas == 1 or not count:
            continue
        volume = software.gradient_bytes * count
        if shards == 1:
            gradients += reduce_s(volume, group)
            continue
        whole = shards == replicas
        near = group if whole else replica_group(mesh, job.machine, links, shards)
        scatter = scatter_s(volume, near)
        if software.reduce_volumes == 3 or not whole:
            scatter = reduce_s(volume, group)
        gradients += scatter
        parameters += gather_s(2.0 * count, near)
    return Reduced(gradients, parameters)


def exposed_s(job: Job, rank: int, forward: float, backward: float) -> float:
    """Exposed seconds that data parallelism adds to a step of a rank.

    Args:
        forward, backward: of one microbatch on that rank, behind which collectives may hide.
    """
    found = reduced(job, trained(job, rank))
    visits = job.num_microbatches if job.mesh.sharing.what == "gradients" else 1  # a sum after every backward
    return sum(beside_computation(job, found, forward, backward, visits))


def beside_computation(job: Job, found: Reduced, forward: float, backward: float, visits: int = 1) -> Reduced:
    """Exposed seconds of a step's exchanges, which go bucket by bucket beside one microbatch's computation.

    Args:
        forward, backward: seconds of one microbatch, for the layers exchanged.
        visits: sums of a step; all but the last also run beside the next microbatch's forward.
    """
    behind = visits * backward + (visits - 1) * forward
    hidden_gradients = behind if job.software.gradients_beside else 0.0
    hidden_parameters = forward if job.software.parameters_beside else 0.0
    gradients = _left(visits * found.gradients, hidden_gradients, job, TAIL / visits)
    return Reduced(gradients, _left(found.parameters, hidden_parameters, job, TAIL))


def _left(seconds: float, behind: float, job: Job, tail: float) -> float:
    if not behind or not seconds:
        return seconds
    beside = min(seconds, behind) * job.software.constants["beside"]
    return max(tail * seconds, seconds - behind) + beside


class Gathered(NamedTuple):
    """Seconds of a layer whose parameters are gathered for every use, computation and collectives together."""

    forward: float
    backward: float
    gather: float
    scatter: float


def gathered_layer(job: Job, seconds: Seconds, parameters: float) -> Gathered:
    """Seconds of a layer under FSDP: computation and collectives beside each other, the longer of the two.

    Args:
        parameters: of the layer on a device of the tensor group.
    """
    mesh, links, beside = job.mesh, job.setting.links, 1.0 + job.software.constants["beside"]
    near = replica_group(mesh, job.machine, links, mesh.shard_group)
    gather = gather_s(2.0 * parameters, near)
    scatter = 0.0 if job.adapters else scatter_s(job.software.gradient_bytes * parameters, near)
    if mesh.shard_group < mesh.replicas and not job.adapters:
        others = replica_group(mesh, job.machine, links)
        scatter += reduce_s(job.software.gradient_bytes * parameters / mesh.shard_group, others)
    again = gather if mesh.sharing.reshard else 0.0
    return Gathered(
        max(seconds.forward_all * beside, gather),
        max((seconds.backward_all + seconds.recompute) * beside, again + scatter),
        gather,
        scatter,
    )
