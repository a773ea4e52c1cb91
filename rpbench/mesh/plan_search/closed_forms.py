"""Closed forms in arrays: seconds and bytes of all plans of a search at once, and which plans fit by them.

Seconds of layers depend on a few choices and are computed once for each (`layer_table`); all else is arithmetic on
columns. The forms are those of `rpbench.mesh.step` and `rpbench.mesh.memory` for the mean layer. The search simulates
the best plans afterwards.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cached_property, lru_cache, partial
from math import log2
from typing import Any, NamedTuple

import numpy as np

from rpbench.cost.arrays import Floats, Ints
from rpbench.cost.footprint.sizes import LAYERS_GATHERED
from rpbench.cost.hardware.machine import Machine
from rpbench.mesh.data_parallel import TAIL
from rpbench.mesh.job import Job
from rpbench.mesh.layer_bytes import WEIGHT_SHARE, layer_bytes, logits_bytes
from rpbench.mesh.layers.layer_seconds import LAYERWISE, Precision, padded_vocab
from rpbench.mesh.layout import SHARDED, Mesh
from rpbench.mesh.memory import kept_bytes, working_set_bytes
from rpbench.mesh.parameters import adapter_parameters, bits_of_weights, states_of
from rpbench.mesh.placement import hop_bytes_per_s, reached
from rpbench.mesh.plan_search.plans import EVEN, Inner, Plans, Space, enumerate_plans
from rpbench.mesh.software import Software
from rpbench.workload.architecture import Architecture
from rpbench.workload.counts import Layer

ROUNDING = 1e-9  # relative gain by which a cut must be better
NEAREST = 200  # most plans, slightly too large by closed forms, whose memory is counted from their orders
NEAR = 0.15  # fraction of a device's memory that these may lack; closed forms are off by at most 8 % there
DOUBTED = 0.08  # fraction of a device's memory: plans that lack no more are also counted from their orders


class Question(NamedTuple):
    """The input of a search; `global_batch` counts the sequences of a step."""

    architecture: Architecture
    machine: Machine
    software: Software
    seq_len: int
    global_batch: int
    precision: Precision = "bf16"

    def job(self, inner: Inner, machine: Machine, mesh: Mesh, **more: Any) -> Job:
        """A run with these inner choices on these devices; `more` are fields of a `Job`."""
        own, known = self.architecture, self.software
        return Job(own, machine, mesh, known, self.seq_len, inner.sequences, self.precision, inner.recompute, **more)

    def job_of(self, plans: Plans, number: int) -> Job:
        return self.job(
            plans.inners[int(plans.inner[number])],
            self.machine,
            plans.mesh(number),
            num_microbatches=int(plans.microbatches[number]),
            schedule=plans.schedules[int(plans.schedule[number])],
            chunks=int(plans.chunks[number]),
            cut=plans.cut(number, len(self.architecture.layers)),
        )


class Timed(NamedTuple):
    """Of every plan: seconds of a step, and bytes of the fullest device."""

    step_s: Floats
    peak_bytes: Floats


def layer_table(question: Question, inners: tuple[Inner, ...]) -> dict[str, Floats]:
    """Seconds and bytes of the mean layer and of the head, for each kind of inner choices."""
    own = question.machine
    if own.device_speeds is None:  # number of hosts, price and batch do not change the seconds of layers
        own = replace(own, num_devices=own.node_devices, price_usd_per_hour=None)
    rows = [_layer_row(question._replace(machine=own, global_batch=0), inner) for inner in inners]
    return {name: np.array([row[name] for row in rows]) for name in rows[0]}


@lru_cache(maxsize=4096)
def _layer_row(question: Question, inner: Inner) -> dict[str, float]:
    job = _smallest_job(question, inner)
    own, layers = question.architecture, question.architecture.layers
    kinds = {kind: layers.count(kind) / len(layers) for kind in job.kinds}

    def mean(of: Callable[[Layer], float]) -> float:
        return sum(part * of(kind) for kind, part in kinds.items())

    def seconds(name: str) -> float:
        return mean(lambda kind: getattr(job.kinds[kind], name))

    dense, experts = mean(own.dense_parameters) / inner.tensor, mean(own.expert_parameters) / inner.expert
    learned, learned_experts = dense, experts
    if own.lora_rank:
        learned = mean(lambda kind: adapter_parameters(job, kind)[0])
        learned_experts = mean(lambda kind: adapter_parameters(job, kind)[1])
    rows, again = padded_vocab(job) / inner.tensor, float(inner.recompute in LAYERWISE)
    whole = mean(partial(layer_bytes, job))
    return {
        "forward": seconds("forward_all"),
        "backward": seconds("backward_all"),
        "input_grad": seconds("input_grad_all"),
        "weight_grad": seconds("weight_grad"),
        "recompute": seconds("recompute"),
        "head": job.head.forward_all + job.head.backward_all,
        "hop": 2.0 * job.microbatch_tokens * own.hidden / inner.tensor,
        "kept": mean(partial(kept_bytes, job)),
        "whole": whole,
        "made_again": WEIGHT_SHARE * whole * again,
        "fits": float(inner.recompute == "fitting"),
        "working": working_set_bytes(job),
        "logits": logits_bytes(job),
        "logits_waiting": logits_bytes(job) * (1.0 - again),  # for every microbatch in flight
        "dense": dense,
        "experts": experts,
        "learned": learned,
        "learned_experts": learned_experts,
        "bits": bits_of_weights(job),
        "stepped": job.optimizer_share,
        "moved": job.optimizer_traffic_share,
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
    return question.job(inner, whole, mesh)


def balanced(question: Question, plans: Plans, table: dict[str, Floats]) -> Plans:
    """The plans, each with the cut whose busiest rank has least work."""
    return replace(plans, last=_Forms(question, plans, table).balanced())


def time_plans(question: Question, plans: Plans, table: dict[str, Floats]) -> Timed:
    forms, constants, device = _Forms(question, plans, table), question.software.constants, question.machine.device
    forms.keep_what_fits()
    step = forms.pipeline_s() + forms.data_s()
    step += forms.owned * constants["optimizer_bytes"] / (device.memory_bytes_per_s * device.sustained_memory)
    step += constants["step_s"]
    nodes = question.machine.num_apart
    step *= 1.0 + (constants["jitter"] * log2(nodes) if nodes > 1 else 0.0)
    return Timed(step, forms.peak_bytes())


def timed_plans(question: Question, space: Space) -> tuple[Plans, Timed]:
    """All plans with their seconds and bytes by closed forms; ValueError if none divides.

    Each is cut evenly, or so that its busiest rank has least work, if that fits as well.
    """
    even = enumerate_plans(question.architecture, question.machine, question.seq_len, question.global_batch, space)
    table = layer_table(question, even.inners)
    other = balanced(question, even, table)
    timed, found = time_plans(question, even, table), time_plans(question, other, table)
    better = (spare_bytes(question, found) >= 0) | (found.peak_bytes <= timed.peak_bytes)
    better &= found.step_s < timed.step_s
    columns = (np.where(better, *pair) for pair in zip(found, timed, strict=True))
    return replace(even, last=np.where(better, other.last, even.last)), Timed(*columns)


def spare_bytes(question: Question, timed: Timed) -> Floats:
    """Free bytes of each plan's fullest device, by closed forms; below 0 if the plan does not fit."""
    return question.machine.room_bytes - question.software.scale * timed.peak_bytes


def fastest_first(timed: Timed, spare: Floats, may_lack: float = 0.0) -> Ints:
    """Numbers of the plans that lack at most `may_lack` bytes by closed forms, the fastest first."""
    fitting = spare >= -may_lack
    return np.argsort(np.where(fitting, timed.step_s, np.inf), kind="stable")[: int(fitting.sum())]


def nearest(question: Question, spare: Floats) -> Ints:
    """Numbers of the plans that lack little by closed forms, and of the smallest plan; the smallest first."""
    order = np.argsort(-spare, kind="stable")[:NEAREST]
    near = spare[order] > -NEAR * question.machine.device.memory_bytes
    near[0] = True
    return order[near]


class _Forms:
    """Seconds and bytes of all plans, each a column; p ranks, v chunks, m microbatches, n replicas.

    Parameters are of the fullest rank: `ends` of its embedding and head, `learned` all that learn, `owned` those that a
    device updates. `each` is the mean layer of every plan, by the names of `layer_table`.
    """

    def __init__(self, question: Question, plans: Plans, table: dict[str, Floats]) -> None:
        self.question, self.software, self.plans = question, question.software, plans
        self.each = {name: values[plans.inner] for name, values in table.items()}
        self.names = np.array(plans.schedules)[plans.schedule]
        self.p, self.v, self.m = (each.astype(float) for each in (plans.pipeline, plans.chunks, plans.microbatches))
        self.n = plans.data.astype(float) * self.each["context"]
        self.ranks = rank_layers(len(question.architecture.layers), self.p, self.v, plans.last)
        self.ends = self.each["matrix"] * np.where(self.p == 1, 1.0 if question.architecture.tied else 2.0, 1.0)
        self.learns = 0.0 if question.architecture.lora_rank else 1.0  # whether the ends do
        self.learned = self.each["learned"] * self.ranks.most + self.learns * self.ends
        self.learned_experts = self.each["learned_experts"] * self.ranks.most
        shares = self.n * self.each["tensor"] / self.each["expert"]
        self.expert_shards = np.maximum(1.0, np.minimum(self.n, shares))  # as `Mesh.expert_shard_group`
        moved = self.each["moved"]
        self.owned = moved * self.each["learned"] * self.ranks.most
        self.owned += self._of_ends("moved", 0.0) * self.learns * self.ends
        self.owned /= np.where(plans.shared == 0, 1.0, self.n)
        self.owned += moved * self.learned_experts / np.where(plans.shared == 0, 1.0, self.expert_shards)

    def _of_ends(self, name: str, rank: Floats | float) -> Floats:
        """A share of the optimizer's state, or of its traffic, for the matrices on a rank: the embedding has it all."""
        share, tied = self.each[name], self.question.architecture.tied
        of_both = np.where(tied, 1.0, (1.0 + share) / 2)
        return np.where(self.p == 1, of_both, np.where(np.asarray(rank) == 0, 1.0, share))

    @cached_property
    def layer_s(self) -> Floats:
        """Seconds of one microbatch in the mean layer, there and back."""
        split = np.isin(self.names, ("zb_h1", "zb_h2"))
        back = np.where(split, self.software.split_penalty, 1.0) * self.each["backward"] + self.each["recompute"]
        return self.each["forward"] + back

    def busiest_s(self, ranks: "RankLayers") -> Floats:
        """Seconds of one microbatch on the busiest rank."""
        return np.maximum(ranks.most * self.layer_s, ranks.last * self.layer_s + self.each["head"])

    def balanced(self) -> Ints:
        """The `Plans.last` whose busiest rank has least work; the last stage also has the head."""
        layers, others = len(self.question.architecture.layers), np.maximum(1.0, self.p * self.v - 1)
        head = self.each["head"] / self.layer_s
        # layers of the last rank beside the head in an equal division, and its part of the evenly cut stages
        shares, part = (layers + head) / self.p - head, (self.v - 1) / others
        alike = np.floor((shares - part * layers) / np.maximum(1 - part, 1 / others))
        best, least = np.full(len(self.p), EVEN), self.busiest_s(rank_layers(layers, self.p, self.v))
        for more in (2, 1, 0, -1):  # stages have whole layers, so the best cut is near, not at, the equal division
            last = np.clip(alike + more, 0, layers - others).astype(np.int64)
            busiest = self.busiest_s(rank_layers(layers, self.p, self.v, last))
            better = (busiest < least * (1 - ROUNDING)) & (self.p > 1)
            best, least = np.where(better, last, best), np.where(better, busiest, least)
        return best

    def pipeline_s(self) -> Floats:
        """Seconds of all microbatches."""
        constants, machine = self.software.constants, self.question.machine
        each, names, p, layer = self.each, self.names, self.p, self.layer_s
        busiest = self.busiest_s(self.ranks) + constants["microbatch_s"]
        layers = len(self.question.architecture.layers)
        mean = (layers * layer + each["head"]) / p + constants["microbatch_s"]
        inside = p * self.plans.data * each["tensor"] * each["context"] <= machine.domain_devices
        links = reached(machine, self.software)
        near, far = (hop_bytes_per_s(machine, links, inside=here) for here in (True, False))
        hop = each["hop"] / np.where(inside, near, far) + np.where(inside, 5e-6, 15e-6)
        fill = self.ranks.most * (each["forward"] + each["input_grad"] - each["weight_grad"])
        bubble = (p - 1) * mean
        bubble = np.where(names == "interleaved_1f1b", bubble / self.v, bubble)
        bubble = np.where(names == "zb_h1", (p - 1) * np.maximum(fill, 0.0), bubble)
        bubble = np.where(names == "zb_h2", 0.1 * (p - 1) * np.maximum(fill, 0.0), bubble)
        return self.m * busiest + bubble + 2 * (p - 1) * np.where(p > 1, hop, 0.0)

    def data_s(self) -> Floats:
        """Seconds that data parallelism adds.

        If parameters are sharded, embedding and head are one unit: gathered once for a microbatch, since its backward
        follows its forward, and reduced once a step. A tied matrix is gathered once for both uses.
        """
        software, machine, each, shared = self.software, self.question.machine, self.each, self.plans.shared
        m, n, most, beside = self.m, self.n, self.ranks.most, software.constants["beside"]
        bandwidth, latency = _group(machine, software, n, each["tensor"])
        part = (n - 1) / n
        own = self.learned * part / bandwidth
        others = n * each["tensor"] / each["expert"]
        expert_bandwidth, _ = _group(machine, software, others, each["expert"])
        own += self.learned_experts * (others - 1) / np.maximum(others, 1) / expert_bandwidth
        scatter = software.gradient_bytes * own * np.where(shared == 0, 2.0, 1.0) + latency
        gather = 2.0 * own * (shared > 0) + latency * (shared > 0)
        back = each["backward"] + each["recompute"]
        visits = np.where(shared == SHARDED.index("gradients"), m, 1.0)  # a sum after every backward
        behind_sums = visits * (most * back * software.gradients_beside)
        behind_sums += (visits - 1) * most * each["forward"] * software.gradients_beside  # of the next microbatches
        found = sum(
            np.where(behind > 0, np.maximum(tail * need, need - behind) + beside * np.minimum(need, behind), need)
            for need, behind, tail in (
                (visits * scatter, behind_sums, TAIL / visits),
                (gather, most * each["forward"] * software.parameters_beside, TAIL),
            )
        )
        layer = (each["dense"] + each["experts"] * (each["expert"] == 1)) * part / bandwidth
        scattered = self.learns * software.gradient_bytes  # of adapters, nothing to speak of
        gathered = 2.0 * each["bits"]
        ahead = np.maximum(each["forward"] * (1 + beside), gathered * layer) - each["forward"]
        later = np.maximum(back * (1 + beside), (gathered + scattered) * layer) - back
        whole = m * most * (ahead + later) + (2.0 * m + scattered) * self.ends * part / bandwidth
        fully = shared == SHARDED.index("parameters")
        return np.where(n == 1, 0.0, np.where(fully, whole, found))

    def peak_bytes(self) -> Floats:
        """Bytes of the fullest of four ranks."""
        return np.maximum.reduce([held for _, _, held in self._held()])

    def keep_what_fits(self) -> None:
        """Where as few layers are recomputed as the memory allows, leave out as many as fit on each of four ranks."""
        room = self.question.machine.room_bytes / self.software.scale
        more, again = self.each["whole"] - self.each["kept"], np.zeros_like(self.p)
        for rank, layers, held in self._held():
            kept = np.floor((room - held) / np.maximum(1.0, self._in_flight(rank) * more))
            again = np.maximum(again, 1.0 - np.clip(kept, 0.0, layers) / np.maximum(1.0, layers))
        self.each["recompute"] = self.each["recompute"] * np.where(self.each["fits"] > 0, again, 1.0)

    def _held(self) -> Iterator[tuple[Floats, Floats, Floats]]:
        """Number, layers and bytes of four ranks: the first, the first with most layers, and the last two."""
        p, ranks, each, ends = self.p, self.ranks, self.each, self.ends
        alone = p == 1
        of_loss = each["logits"] + np.where(self.names == "gpipe", self.m - 1, 0.0) * each["logits_waiting"]
        for rank, layers, matrix, logits in (
            (np.zeros_like(p), ranks.first, ends, alone),
            (ranks.fullest_rank, ranks.most, np.where(ranks.fullest_rank % (p - 1 + alone) == 0, ends, 0.0), alone),
            (np.maximum(p - 2, 0), ranks.before_last, np.where(p > 2, 0.0, ends), alone),
            (p - 1, ranks.last, ends, True),
        ):
            held = self._states_bytes(layers, matrix, self._of_ends("stepped", rank))
            held += self._in_flight(rank) * layers * each["kept"] + each["working"]
            held += self._between_halves(rank) * layers * each["made_again"]
            yield rank, layers, held + np.where(logits, of_loss, 0.0)

    def _in_flight(self, rank: Floats) -> Floats:
        """Microbatches whose activations a rank keeps."""
        p, m, names = self.p, self.m, self.names
        found = np.minimum(m, p - rank)
        found = np.where(names == "interleaved_1f1b", np.minimum(m, p + (p - 1 - 2 * rank) / self.v), found)
        found = np.where(names == "zb_h2", np.minimum(m, np.maximum(1.0, 2 * (p - rank) - 1)), found)
        return np.where(names == "gpipe", m, found)

    def _between_halves(self, rank: Floats) -> Floats:
        """Microbatches whose gradients of the weights a rank still has to compute."""
        found = np.where(self.names == "zb_h1", rank + 1, np.where(self.names == "zb_h2", 2 * rank + 1, 0.0))
        return np.minimum(found, self.m)

    def _states_bytes(self, layers: Floats, matrix: Floats, ends: Floats) -> Floats:
        """Bytes of weights, gradients and optimizer of ranks with that many layers; `ends` is of `_of_ends`."""
        each, shared = self.each, self.plans.shared
        found = np.zeros_like(self.n)
        of_layers = each["learned"] * layers
        stepped, of_ends, of_experts = each["stepped"], self.learns * matrix, each["learned_experts"] * layers
        for size, learned, updated, shards in (
            (
                each["bits"] * each["dense"] * layers + matrix,
                of_layers + of_ends,
                stepped * of_layers + ends * of_ends,
                self.n,
            ),
            (each["bits"] * each["experts"] * layers, of_experts, stepped * of_experts, self.expert_shards),
        ):
            parts = []
            for what in SHARDED:
                weights = states_of(self.software, what, size, size / shards).weights
                if not self.learns and what != "parameters":
                    weights = weights + 2.0 * learned
                gradients = states_of(self.software, what, learned, learned / shards).gradients
                optimizer = states_of(self.software, what, updated, updated / shards).optimizer
                parts.append(weights + gradients + optimizer)
            found = found + np.select([shared == number for number in range(len(SHARDED))], parts)
        layer, learned = each["dense"] + each["experts"], each["learned"] + each["learned_experts"]
        gathered = np.where(shared == SHARDED.index("parameters"), 2.0 * each["bits"] * LAYERS_GATHERED * layer, 0.0)
        scattered = np.where(shared >= SHARDED.index("gradients"), self.software.accumulate_bytes * learned, 0.0)
        return found + gathered + scattered


def _group(machine: Machine, software: Software, size: Floats, stride: Floats) -> tuple[Floats, Floats]:
    """Bandwidth and latency of groups; as `rpbench.mesh.placement.group_of`."""
    domain = machine.domain_devices
    intra, inter = reached(machine, software)
    here = np.maximum(1.0, np.minimum(np.floor(domain / stride), size))
    inside = size * stride <= domain
    pace = np.where(inside, intra, np.minimum(intra, inter * here))
    hops = np.where(inside, size - 1, here - 1 + 2 * np.log2(np.maximum(1.0, size / here)))
    return pace, hops * np.where(inside, machine.hop_latency_s, machine.inter_latency_s)


class RankLayers(NamedTuple):
    """Layers of the fullest, first and last two ranks of `Plans.cut`; `fullest_rank` is the first with most layers."""

    most: Floats
    first: Floats
    last: Floats
    fullest_rank: Floats
    before_last: Floats


def rank_layers(layers: int, p: Floats, v: Floats, last: Ints | int = EVEN) -> RankLayers:
    """The layers of ranks in plans with p ranks and v chunks; ranks take stages in turn; `last` as in `Plans`."""
    apart = np.asarray(last) != EVEN  # the last stage is not in the even cut
    own = np.where(apart, last, 0)
    stages = np.maximum(1.0, p * v - apart)
    base, extra = np.floor((layers - own) / stages), (layers - own) % stages
    begin = np.floor((stages - extra + 1) / 2)  # the first larger stage; the others follow it
    end, over = begin + extra, extra % p

    def larger(rank: Floats) -> Floats:
        return np.floor((end - 1 - rank) / p) - np.floor((begin - 1 - rank) / p)

    around = (over == 0) | (begin % p + over > p)
    fullest = np.where(around, 0.0, begin % p)
    most, of_last = base * v + np.ceil(extra / p), base * (v - apart) + larger(p - 1) + own
    # a last rank with one stage less of the even cut is the fullest only by its last stage
    alone = apart & (over == 1) & (fullest == p - 1)
    most, fullest = most - alone, np.where(alone, 0.0, fullest)
    fullest = np.where(apart & (of_last > most), p - 1, fullest)
    first, before_last = (base * v + larger(rank) for rank in (np.zeros_like(p), np.maximum(p - 2, 0)))
    return RankLayers(np.maximum(most, of_last), first, of_last, fullest, before_last)
