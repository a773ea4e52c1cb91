"""Data parallelism: the exposed seconds that exchanges add to a step, for every way of sharding states."""

from typing import NamedTuple

from rpbench.ir.action import Kind, parts_of
from rpbench.ir.moved_objects import Payload
from rpbench.ir.policy import STEPS_BEHIND
from rpbench.ir.schedule import Schedule
from rpbench.mesh.job import Job, kinds_of, stages_of
from rpbench.mesh.layers.collectives import gather_s, reduce_s, scatter_s
from rpbench.mesh.layers.layer_seconds import Seconds
from rpbench.mesh.parameters import Held, gathered_layers, held_layers, learning
from rpbench.passes.offload import Per

TAIL = 0.06  # fraction of exchanges beside computation that nothing hides: the first or the last bucket


class Reduced(NamedTuple):
    """Seconds in which a device reduces gradients and gathers new parameters, in one step."""

    gradients: float
    parameters: float


Exchanges = tuple[Reduced, ...]  # of each stage


def reduced(job: Job, own: Held) -> Reduced:
    """The seconds without FSDP: devices keep their parameters."""
    mesh, software = job.mesh, job.software
    gradients = parameters = 0.0
    of_experts = job.group(mesh.expert_replicas, mesh.expert * mesh.expert_tensor)
    groups = (
        (own.dense, mesh.replicas, mesh.shard_group, job.replica_group()),
        (own.experts, mesh.expert_replicas, mesh.expert_shard_group, of_experts),
    )
    for count, replicas, shards, group in groups:
        if replicas == 1 or not count:
            continue
        volume, all_share = software.gradient_bytes * count, shards == replicas
        scatters = all_share and software.reduce_volumes != 3
        gradients += scatter_s(volume, group) if scatters else reduce_s(volume, group)
        parameters += gather_s(2.0 * count, group if all_share else job.replica_group(shards))
    return Reduced(gradients, parameters)


def beside_computation(job: Job, found: Reduced, forward: float, backward: float, visits: int = 1) -> Reduced:
    """Exposed seconds of a step's exchanges, which go bucket by bucket beside one microbatch's computation: its forward
    and backward through the layers exchanged. Of `visits` gradient reductions in a step, one after every backward or 1,
    all but the last also run beside the next forward.
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
    """Seconds of a layer whose parameters are gathered for every use; both ways include the collectives."""

    forward: float
    backward: float
    gather: float
    scatter: float


def gathered_layer(job: Job, seconds: Seconds, parameters: float) -> Gathered:
    """Seconds of a layer with `parameters` of 16 bits on a device, under FSDP: the longer of computation and
    collectives.
    """
    mesh, beside = job.mesh, 1.0 + job.software.constants["beside"]
    near = job.replica_group(mesh.shard_group)
    gather = gather_s(2.0 * parameters, near)
    scatter = 0.0 if job.has_adapters else scatter_s(job.software.gradient_bytes * parameters, near)
    if mesh.shard_group < mesh.replicas and not job.has_adapters:
        others = job.replica_group()
        scatter += reduce_s(job.software.gradient_bytes * parameters / mesh.shard_group, others)
    again = gather if mesh.sharing.reshard else 0.0
    return Gathered(
        max(seconds.forward_all * beside, gather),
        max((seconds.backward_all + seconds.recompute) * beside, again + scatter),
        gather,
        scatter,
    )


# --- exchanges in an order ---


# Sharded states -> how often weights are gathered and gradients reduced (`rpbench.passes.offload.shard`).
LOWERED: dict[str, tuple[Per | None, Per]] = {
    "none": (None, "step"),
    "optimizer": ("step", "step"),
    "gradients": ("step", "visit"),
    "parameters": ("visit", "visit"),
}


def lowered(job: Job, order: Schedule) -> tuple[Per | None, Per | None]:
    """How often lane net gathers weights and reduces gradients; None for an exchange after the step.

    An order whose weights change with every microbatch has no place for either.
    """
    parameters, gradients = LOWERED[job.mesh.sharing.what]
    if parameters == "visit" and not job.mesh.sharing.reshard:
        parameters = "step"
    changes = order.policy not in STEPS_BEHIND
    no_gather = changes or order.shape.separate_cuts or order.shape.num_head_shards
    if parameters == "step" and (no_gather or not job.software.parameters_beside):
        parameters = None
    return parameters, None if changes or not job.software.gradients_beside else gradients


def late_s(
    job: Job, order: Schedule, up: Exchanges, down: Exchanges, parameters: Per | None, gradients: Per | None
) -> float:
    """Exposed seconds of the exchanges after the step, which are not `lowered`, on the rank that waits longest."""
    gathers, found = parameters is None and LOWERED[job.mesh.sharing.what][0] is not None, 0.0
    for rank in range(order.shape.num_ranks):
        parts = [part for action in order.compute(rank) for part in parts_of(action)]
        gathered = {part.stage for part in parts if gathers and part.kind is Kind.F}
        summed = {part.stage for part in parts if gradients is None and part.kind in (Kind.B, Kind.W, Kind.FB)}
        seconds = sum(up[stage].parameters for stage in gathered) + sum(down[stage].gradients for stage in summed)
        found = max(found, seconds)
    return found


def transfer_time(up: Exchanges, down: Exchanges, units: int, payload: Payload) -> float | None:
    """Time of a stage's gather or reduction; None for other payloads."""
    found = (down if payload.backward else up)[payload.stage]
    seconds = {"P": found.parameters, "G": found.gradients}.get(payload.object)
    return None if seconds is None else seconds * units


def exchanged(job: Job, counts: tuple[int, ...], *, ends_together: bool = False) -> Exchanges:
    """Seconds of the exchanges of each stage; a device with both ends of the model holds a tied matrix once."""
    end = -1 if ends_together and job.architecture.tied else len(counts) - 1
    stages = enumerate(map(kinds_of, stages_of(job.architecture.layers, counts)))
    held = [(kinds, {"first": stage == 0, "last": stage == end}) for stage, kinds in stages]
    found = [reduced(job, learning(job, held_layers(job, kinds, **ends), kinds)) for kinds, ends in held]
    if job.has_adapters and job.mesh.sharing.what == "parameters":  # all weights are gathered
        gathered = [reduced(job, gathered_layers(job, kinds, **ends)).parameters for kinds, ends in held]
        found = [each._replace(parameters=whole) for each, whole in zip(found, gathered, strict=True)]
    return tuple(found)
