"""Closed forms in arrays: seconds and bytes of all plans of a search at once.

Seconds of layers depend on a few choices and are computed once for each (`layer_table`); all else is arithmetic on
columns. The forms are those of `rpbench.mesh.step` and `rpbench.mesh.memory`, with layers as their mean where kinds
differ; the best plans are simulated afterwards.
"""

from dataclasses import replace
from functools import lru_cache
from math import log2
from typing import Any, NamedTuple

import numpy as np

from rpbench.cost.footprint.sizes import LAYERS_GATHERED
from rpbench.cost.hardware.machine import Machine
from rpbench.mesh.data_parallel import TAIL
from rpbench.mesh.job import Job
from rpbench.mesh.layer_bytes import logits_bytes
from rpbench.mesh.layers.layer_seconds import Precision, padded_vocab
from rpbench.mesh.layout import Mesh
from rpbench.mesh.memory import kept_bytes, working_set_bytes
from rpbench.mesh.parameters import states_of
from rpbench.mesh.placement import hop_bytes_per_s, reached
from rpbench.mesh.plan_search.plans import SHARED, Floats, Inner, Plans
from rpbench.mesh.software import Software
from rpbench.workload.architecture import Architecture


class Question(NamedTuple):
    """What a search is about."""

    architecture: Architecture
    machine: Machine
    software: Software
    seq_len: int
    global_batch: int
    precision: Precision


class Timed(NamedTuple):
    """Seconds of a step, and bytes of the fullest device, of every plan."""

    step_s: Floats
    peak_bytes: Floats


def layer_table(question: Question, inners: tuple[Inner, ...]) -> dict[str, Floats]:
    """Seconds and bytes of the mean layer and of the head, for each kind of inner choices."""
    own = question.machine
    if own.device_speeds is None:  # seconds of layers are the same on any number of hosts, at any price and batch
        own = replace(own, num_devices=own.node_devices, price_usd_per_hour=None)
    rows = [_layer_row(question._replace(machine=own, global_batch=0), inner) for inner in inners]
    return {name: np.array([row[name] for row in rows]) for name in rows[0]}


@lru_cache(maxsize=4096)
def _layer_row(question: Question, inner: Inner) -> dict[str, float]:
    job = _smallest_job(question, inner)
    own, layers = question.architecture, question.architecture.layers
    kinds = {kind: layers.count(kind) / len(layers) for kind in job.kinds}

    def mean(name: str) -> float:
        return sum(part * getattr(job.kinds[kind], name) for kind, part in kinds.items())

    dense = sum(part * own.dense_parameters(kind) for kind, part in kinds.items())
    experts = sum(part * own.expert_parameters(kind) for kind, part in kinds.items())
    rows = padded_vocab(job.setting) / inner.tensor
    return {
        "forward": mean("forward_all"),
        "backward": mean("backward_all"),
        "input_grad": mean("input_grad_all"),
        "weight_grad": mean("weight_grad"),
        "recompute": mean("recompute"),
        "head": job.head.forward_all + job.head.backward_all,
        "hop": 2.0 * job.setting.tokens * own.hidden / inner.tensor,
        "kept": sum(part * kept_bytes(job, kind) for kind, part in kinds.items()),
        "working": working_set_bytes(job),
        "logits": logits_bytes(job.setting),
        "logits_waiting": logits_bytes(job.setting) * (inner.recompute != "full"),  # of every microbatch in flight
        "dense": dense / inner.tensor,
        "experts": experts / inner.expert,
        "matrix": rows * own.hidden,
        "tensor": float(inner.tensor),
        "context": float(inner.context),
        "expert": float(inner.expert),
    }


def _smallest_job(question: Question, inner: Inner) -> Job:
    """A job with these inner choices on as few devices as hold them."""
    group = inner.tensor * inner.context
    data = max(1, inner.expert // group)
    machine = question.machine
    nodes = -(-group * data // machine.node_devices)
    whole = machine.with_devices(group * data if nodes == 1 else nodes * machine.node_devices)
    mesh = Mesh(whole.size // group, 1, inner.tensor, inner.context, inner.expert, sequence_parallel=inner.tensor > 1)
    return Job(
        question.architecture,
        whole,
        mesh,
        question.software,
        question.seq_len,
        inner.sequences,
        recompute=inner.recompute,
        precision=question.precision,
    )


def time_plans(question: Question, plans: Plans, table: dict[str, Floats]) -> Timed:
    """Seconds and bytes of all plans."""
    columns = {name: values[plans.inner] for name, values in table.items()}
    layers = len(question.architecture.layers)
    p, v = plans.pipeline.astype(float), plans.chunks.astype(float)
    m, data = plans.microbatches.astype(float), plans.data.astype(float)
    ranks = rank_layers(layers, p, v)
    most = ranks.most
    step = _pipeline_s(question, plans, columns, most, ranks.last, p, v, m)
    matrices = columns["matrix"] * end_matrices(question.architecture.tied, p)
    step += _data_s(question, plans, columns, most, matrices, data, m)
    constants = question.software.constants
    replicas = data * columns["context"]
    owned = (columns["dense"] * most + matrices) / np.where(plans.shared == 0, 1.0, replicas)
    owned += columns["experts"] * most / np.where(plans.shared == 0, 1.0, expert_shards(columns, replicas))
    rate = question.machine.device.memory_bytes_per_s * question.machine.device.sustained_memory
    step += owned * constants["optimizer_bytes"] / rate + constants["step_s"]
    nodes = question.machine.num_apart
    step *= 1.0 + (constants["jitter"] * log2(nodes) if nodes > 1 else 0.0)
    return Timed(
        step, peak_bytes(question.software, question.architecture.tied, plans, columns, ranks, p, v, m, replicas)
    )


def _pipeline_s(
    question: Question,
    plans: Plans,
    columns: dict[str, Floats],
    most: Floats,
    last: Floats,
    p: Floats,
    v: Floats,
    m: Floats,
) -> Floats:
    """Seconds of all microbatches of the plans."""
    constants, machine = question.software.constants, question.machine
    names = np.array(plans.schedules)[plans.schedule]
    split = np.isin(names, ("zb_h1", "zb_h2"))
    back = np.where(split, question.software.split_penalty, 1.0) * (columns["backward"]) + columns["recompute"]
    layer = columns["forward"] + back
    busiest = np.maximum(most * layer, last * layer + columns["head"]) + constants["microbatch_s"]
    mean = (len(question.architecture.layers) * layer + columns["head"]) / p + constants["microbatch_s"]
    inside = p * plans.data * columns["tensor"] * columns["context"] <= machine.domain_devices
    links = reached(machine, question.software)
    near, far = (hop_bytes_per_s(machine, links, inside=each) for each in (True, False))
    pace = np.where(inside, near, far)
    hop = np.where(p > 1, columns["hop"] / pace + np.where(inside, 5e-6, 15e-6), 0.0)
    fill = most * (columns["forward"] + columns["input_grad"] - columns["weight_grad"])
    bubble = (p - 1) * mean
    bubble = np.where(names == "interleaved_1f1b", bubble / v, bubble)
    bubble = np.where(names == "zb_h1", (p - 1) * np.maximum(fill, 0.0), bubble)
    bubble = np.where(names == "zb_h2", 0.1 * (p - 1) * np.maximum(fill, 0.0), bubble)
    return m * busiest + bubble + 2 * (p - 1) * hop


def _data_s(
    question: Question,
    plans: Plans,
    columns: dict[str, Floats],
    most: Floats,
    matrices: Floats,
    data: Floats,
    m: Floats,
) -> Floats:
    """Seconds that data parallelism adds; `matrices` counts parameters of embedding and head on a device.

    Where parameters are shared, embedding and head are one unit: gathered once for a microbatch, since its backward
    follows its forward, and reduced once a step. A tied matrix is gathered once for both uses.
    """
    software = question.software
    beside = software.constants["beside"]
    replicas = data * columns["context"]
    bandwidth, latency = _group(question.machine, software, replicas, columns["tensor"])
    part = (replicas - 1) / replicas
    own = (columns["dense"] * most + matrices) * part / bandwidth
    others = replicas * columns["tensor"] / columns["expert"]
    expert_bandwidth, _ = _group(question.machine, software, others, columns["expert"])
    own += columns["experts"] * most * (others - 1) / np.maximum(others, 1) / expert_bandwidth
    scatter = software.gradient_bytes * own * np.where(plans.shared == 0, 2.0, 1.0) + latency
    gather = 2.0 * own * (plans.shared > 0) + latency * (plans.shared > 0)
    backward = most * (columns["backward"] + columns["recompute"]) * software.gradients_beside
    forward = most * columns["forward"] * software.parameters_beside
    visits = np.where(plans.shared == SHARED.index("gradients"), m, 1.0)  # a sum after every backward
    next_forwards = (visits - 1) * most * columns["forward"] * software.gradients_beside
    found = sum(
        np.where(behind > 0, np.maximum(tail * need, need - behind) + beside * np.minimum(need, behind), need)
        for need, behind, tail in (
            (visits * scatter, visits * backward + next_forwards, TAIL / visits),
            (gather, forward, TAIL),
        )
    )
    layer = (columns["dense"] + columns["experts"] * (columns["expert"] == 1)) * part / bandwidth
    ahead = np.maximum(columns["forward"] * (1 + beside), 2.0 * layer) - columns["forward"]
    back = columns["backward"] + columns["recompute"]
    behind = np.maximum(back * (1 + beside), (2.0 + software.gradient_bytes) * layer) - back
    whole = m * most * (ahead + behind) + (2.0 * m + software.gradient_bytes) * matrices * part / bandwidth
    fully = plans.shared == SHARED.index("parameters")
    return np.where(replicas == 1, 0.0, np.where(fully, whole, found))


def _group(machine: Machine, software: Software, size: Floats, stride: Floats) -> tuple[Floats, Floats]:
    """Bandwidth and latency of groups; as `rpbench.mesh.placement.group_of`."""
    domain = machine.domain_devices
    intra, inter = reached(machine, software)
    here = np.maximum(1.0, np.minimum(np.floor(domain / stride), size))
    inside = size * stride <= domain
    pace = np.where(inside, intra, np.minimum(intra, inter * here))
    hops = np.where(inside, size - 1, here - 1 + 2 * np.log2(np.maximum(1.0, size / here)))
    return pace, hops * np.where(inside, machine.hop_latency_s, machine.inter_latency_s)


# --- bytes ---


Columns = dict[str, Floats]


class RankLayers(NamedTuple):
    """Layers of ranks as `split_evenly` deals them, larger stages in the middle: of the fullest, the first, the last.

    Args:
        fullest_rank: the first of those with most layers.
    """

    most: Floats
    first: Floats
    last: Floats
    fullest_rank: Floats


def rank_layers(layers: int, p: Floats, v: Floats) -> RankLayers:
    """The layers of the ranks of plans with p ranks and v chunks, each with one of the stages in turn."""
    base, extra = np.floor(layers / (p * v)), layers % (p * v)
    begin = np.floor((p * v - extra + 1) / 2)  # the first larger stage; the others follow it
    end, over = begin + extra, extra % p

    def larger(rank: Floats) -> Floats:
        found: Floats = np.floor((end - 1 - rank) / p) - np.floor((begin - 1 - rank) / p)
        return found

    around = (over == 0) | (begin % p + over > p)
    return RankLayers(
        base * v + np.ceil(extra / p),
        base * v + larger(np.zeros_like(p)),
        base * v + larger(p - 1),
        np.where(around, 0.0, begin % p),
    )


def end_matrices(tied: bool, p: Floats) -> Floats:
    """Matrices of embedding and head on an end of a pipeline: one, or two where it is both ends and they differ."""
    return np.where(p == 1, 1.0 if tied else 2.0, 1.0)


def peak_bytes(
    software: Software,
    tied: bool,
    plans: Plans,
    columns: Columns,
    ranks: RankLayers,
    p: Floats,
    v: Floats,
    m: Floats,
    n: Floats,
) -> Floats:
    """Bytes of the first rank, of the first of those with most layers, or of the last, whichever has most."""
    names = np.array(plans.schedules)[plans.schedule]
    alone = p == 1
    ends = columns["matrix"] * end_matrices(tied, p)
    of_loss = columns["logits"] + np.where(names == "gpipe", m - 1, 0.0) * columns["logits_waiting"]
    found = np.zeros_like(p)
    for rank, layers, matrix, logits in (
        (np.zeros_like(p), ranks.first, ends, alone),
        (ranks.fullest_rank, ranks.most, np.where(ranks.fullest_rank % (p - 1 + alone) == 0, ends, 0.0), alone),
        (p - 1, ranks.last, ends, True),
    ):
        held = _states_bytes(software, plans, columns, layers, matrix, n)
        held += _in_flight(names, rank, p, v, m) * layers * columns["kept"] + columns["working"]
        found = np.maximum(found, held + np.where(logits, of_loss, 0.0))
    return found


def _in_flight(names: "np.ndarray[Any, Any]", rank: Floats, p: Floats, v: Floats, m: Floats) -> Floats:
    """Microbatches whose activations a rank keeps, in the usual closed forms."""
    found = np.minimum(m, p - rank)
    found = np.where(names == "interleaved_1f1b", np.minimum(m, p + (p - 1 - 2 * rank) / v), found)
    found = np.where(names == "zb_h2", np.minimum(m, np.maximum(1.0, 2 * (p - rank) - 1)), found)
    return np.where(names == "gpipe", m, found)


def expert_shards(columns: Columns, replicas: Floats) -> Floats:
    """Devices that share the states of an expert; as `Mesh.expert_shard_group`."""
    found: Floats = np.maximum(1.0, np.minimum(replicas, replicas * columns["tensor"] / columns["expert"]))
    return found


def _states_bytes(
    software: Software, plans: Plans, columns: Columns, layers: Floats, matrix: Floats, n: Floats
) -> Floats:
    """Bytes of weights, gradients and optimizer of ranks with that many layers."""
    others = expert_shards(columns, n)
    found = np.zeros_like(n)
    for size, shards in ((columns["dense"] * layers + matrix, n), (columns["experts"] * layers, others)):
        parts = [sum(states_of(software, what, size, size / shards)) for what in SHARED]
        found = found + np.select([plans.shared == number for number in range(len(SHARED))], parts)
    layer = columns["dense"] + columns["experts"]
    gathered = np.where(plans.shared == SHARED.index("parameters"), 2.0 * LAYERS_GATHERED * layer, 0.0)
    scattered = np.where(plans.shared >= SHARED.index("gradients"), software.accumulate_bytes * layer, 0.0)
    whole: Floats = found + gathered + scattered
    return whole
