"""Seconds of a step: stages, pipeline, data parallelism, optimizer; closed forms."""

from collections import Counter
from math import log2

from rpbench.mesh.data_parallel import beside_computation, gathered_layer, reduced
from rpbench.mesh.job import Job, StageSeconds, stage_seconds
from rpbench.mesh.layers.layer_seconds import padded_vocab
from rpbench.mesh.layers.layer_times import tied_s
from rpbench.mesh.parameters import bits_of_weights, gathered_layers, held_layers, trained

Terms = dict[str, float]

INTERLEAVED = ("interleaved_1f1b", "looped_bfs")


def step_terms(job: Job) -> Terms:
    """Seconds of a step by cause; they add up to the step."""
    stages = stages_of_step(job)
    terms = pipeline_terms(job, stages)
    if _gathers(job):
        terms["data"] = _ends_s(job)
    else:
        terms["data"] = max(_exposed_s(job, rank, stages) for rank in _fullest(job))
    terms["tied"] = tied_s(job)
    terms["optimizer"] = _optimizer_s(job)
    terms["fixed"] = job.software.constants["step_s"]
    if job.mesh.sharing.what == "optimizer":
        terms["fixed"] += _broadcasts_s(job)
    nodes = job.machine.num_apart
    if nodes > 1:
        terms["jitter"] = sum(terms.values()) * job.software.constants["jitter"] * log2(nodes)
    return terms


def _exposed_s(job: Job, rank: int, stages: StageSeconds) -> float:
    """Exposed seconds that data parallelism adds to a rank's step."""
    own = job.stages_of(rank)
    forward = sum(stages.forward[stage] for stage in own)
    backward = sum(stages.backward[stage] + stages.recompute[stage] for stage in own)
    visits = job.num_microbatches if job.mesh.sharing.what == "gradients" else 1
    return sum(beside_computation(job, reduced(job, trained(job, rank)), forward, backward, visits))


def _broadcasts_s(job: Job) -> float:
    """Seconds by which broadcasts of new parameters, owner by owner, take longer than one gather."""
    owners = job.replica_group(job.mesh.shard_group)
    constants, others = job.software.constants, owners.size // owners.here - 1
    return constants["broadcast_s"] + others * constants["hop_s"] if others > 0 else 0.0


def pipeline_terms(job: Job, stages: StageSeconds) -> Terms:
    """Seconds of all microbatches: work of the busiest rank, filling and draining, transfers."""
    p, v, m = job.mesh.pipeline, job.chunks, job.num_microbatches
    each = job.software.constants["microbatch_s"]
    by_rank = [sum(stages.both(stage) for stage in job.stages_of(rank)) + each for rank in range(p)]
    busiest, mean = max(by_rank), sum(by_rank) / p
    terms = {"work": m * busiest}
    if p == 1:
        return terms
    if v > 1 and job.schedule in INTERLEAVED:
        rounds = -(-m // p) * p if job.schedule == "interleaved_1f1b" else m
        terms["bubble"] = (p - 1) / v * mean + (rounds - m) * busiest * 0.5
        terms["hops"] = 2 * (p - 1) * job.hop_s + (2 * v * m * job.hop_s if job.software.blocking_hops else 0.0)
        return terms
    terms["bubble"] = sum(by_rank) - busiest
    terms["hops"] = 2 * (p - 1) * job.hop_s
    if job.schedule in ("1f1b", "dapple", "gpipe"):
        terms["hops"] += 2 * m * job.hop_s
    return terms


def _gathers(job: Job) -> bool:
    return job.mesh.sharing.what == "parameters" and job.mesh.shard_group > 1


def stages_of_step(job: Job) -> StageSeconds:
    """Seconds of a job's stages.

    Gathers of parameters are included if layers wait for them: without a pipeline, which gathers once a step.
    """
    if not _gathers(job) or job.mesh.pipeline > 1:
        return stage_seconds(job)
    own, mesh, bits = job.architecture, job.mesh, bits_of_weights(job)
    forward = backward = 0.0
    for (kind, seconds), count in Counter(zip(own.layers, job.layers_s, strict=True)).items():
        parameters = own.dense_parameters(kind) / mesh.tensor
        if mesh.expert == 1:  # else experts stay on the devices they are spread over
            parameters += own.expert_parameters(kind) / mesh.expert_tensor
        found = gathered_layer(job, seconds, bits * parameters)
        forward, backward = forward + count * found.forward, backward + count * found.backward
    return StageSeconds((forward + job.head.forward_all,), (backward + job.head.backward_all,), (0.0,))


def _ends_s(job: Job) -> float:
    """Seconds of the first gather and the last scatter: of the root unit for every microbatch; with a pipeline, of the
    first rank's parameters once a step.
    """
    own, mesh = job.architecture, job.mesh
    if mesh.pipeline > 1:
        stages = job.stages_of(0)
        layers = [each for stage in stages for each in job.stage_layers[stage]]
        first = gathered_layers(job, layers, first=True, last=job.num_stages - 1 in stages)
        whole = gathered_layer(job, job.head, first.dense)
        return whole.gather + whole.scatter
    root = padded_vocab(job) * own.hidden / mesh.tensor * (1 if own.tied else 2)
    found = gathered_layer(job, job.head, root)
    return found.scatter + found.gather * job.num_microbatches


def _fullest(job: Job) -> set[int]:
    """Ranks whose data parallelism may take longest: the first, the last, and one between."""
    return {0, job.mesh.pipeline // 2, job.mesh.pipeline - 1}


def _optimizer_s(job: Job) -> float:
    """Seconds of the optimizer on the rank whose devices own most parameters."""
    found = 0.0
    for rank in _fullest(job):
        own, share = trained(job, rank), job.optimizer_traffic_share
        whole = 0.0 if rank or job.has_adapters else held_layers(job, (), first=True, last=False).dense  # the embedding
        stepped = share * own.dense + (1.0 - share) * whole
        owned = stepped / job.mesh.shard_group + share * own.experts / job.mesh.expert_shard_group
        found = max(found, owned * job.software.constants["optimizer_bytes"] / job.memory_rate)
    return found
