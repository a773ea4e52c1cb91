"""Bytes of each device by class, under any mesh."""

from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

from rpbench.ir.action import Kind, parts_of
from rpbench.ir.schedule import Schedule, Shape
from rpbench.mesh.job import Job
from rpbench.mesh.layer_bytes import layer_bytes
from rpbench.mesh.layer_seconds import padded_vocab
from rpbench.mesh.parameters import held, states_held, trained
from rpbench.registry import entry
from rpbench.workload.parts import Layer

Bytes = dict[str, float]
WEIGHT_SHARE = 0.55  # of a layer's activations that the gradient of the weights still needs


class Verdict(NamedTuple):
    """Whether a run fits: `ok`, `close` (within two standard deviations) or `oom`, and why."""

    answer: str
    reason: str


def rank_bytes(job: Job, rank: int) -> Bytes:
    """Bytes of a device of a pipeline rank, by class; allocated tensors, no reserve."""
    own, mesh, software = held(job, rank), job.mesh, job.software
    learns = trained(job, own, job.stages_of(rank))
    found: Bytes = {**states_held(job, learns)._asdict(), "weights": states_held(job, own).weights}
    adapters = 2.0 * learns.dense if job.adapters else 0.0
    if mesh.sharing.what == "parameters":
        found["gathered"] = (4.0 * own.largest + software.accumulate_bytes * learns.largest) * (mesh.shard_group > 1)
        if mesh.pipeline > 1 and not mesh.sharing.reshard:  # gathered once a step, gradients summed whole
            found["weights"] += 2.0 * (own.dense + own.experts) + adapters
            found["gradients"] = float(software.accumulate_bytes) * (learns.dense + learns.experts)
    else:
        found["weights"] += adapters
    found["activations"] = _activations(job, rank)
    found["working set"] = working_set_bytes(job)
    if rank == mesh.pipeline - 1:
        rows = padded_vocab(job.setting) / mesh.tensor
        found["logits"] = software.logit_bytes * job.setting.tokens * rows
    return found


def measured_bytes(job: Job, classes: Mapping[str, float]) -> float:
    """What a source reports for these classes: fragments and a reserve on top."""
    return job.software.scale * sum(classes.values()) + job.software.reserve_bytes


def fullest(job: Job) -> tuple[int, Bytes]:
    """The rank with most bytes, and its classes."""
    found = {rank: rank_bytes(job, rank) for rank in _candidates(job)}
    rank = max(found, key=lambda each: sum(found[each].values()))
    return rank, found[rank]


def needed_bytes(job: Job, classes: Mapping[str, float]) -> float:
    """Bytes that a device must have for these classes: tensors with their fragments, contexts and libraries."""
    return job.software.scale * sum(classes.values()) + (job.machine.reserved_memory_bytes or 0)


def fits(job: Job) -> bool:
    """Whether the fullest rank is predicted to fit into a device; without a margin, as a search asks."""
    return needed_bytes(job, fullest(job)[1]) <= job.machine.device.memory_bytes


def verdict(job: Job, log_sd: float = 0.06) -> Verdict:
    """Whether the fullest rank fits into a device, with a margin of two standard deviations."""
    return verdict_of(job, *fullest(job), log_sd)


def verdict_of(job: Job, rank: int, classes: Mapping[str, float], log_sd: float = 0.06) -> Verdict:
    """The same of a rank whose bytes are known."""
    need, room = needed_bytes(job, classes), job.machine.device.memory_bytes
    largest = max(classes, key=lambda name: classes[name])
    text = f"rank {rank} needs {need / 1e9:.1f} GB of {room / 1e9:.1f} GB; the most is {largest}"
    if need > room * (1 + 2 * log_sd):
        return Verdict("oom", text)
    return Verdict("close" if need > room * (1 - 2 * log_sd) else "ok", text)


def kept_bytes(job: Job, layer: Layer) -> float:
    """Bytes one layer keeps of one microbatch in flight."""
    if job.recompute == "full":
        return 2.0 * job.setting.tokens * job.architecture.hidden / job.setting.spread
    found = layer_bytes(job.setting, layer)
    return 0.5 * found if job.recompute == "per_op" else found


def _activations(job: Job, rank: int) -> float:
    stages = job.stages_of(rank)
    sizes = tuple(sum(count * kept_bytes(job, kind) for kind, count in job.stage_layers[stage]) for stage in stages)
    most = 0.0
    for counts in _most_in_flight(job, rank):
        most = max(most, sum(size * count for size, count in zip(sizes, counts, strict=True)))
    return most


def _most_in_flight(job: Job, rank: int) -> tuple[tuple[float, ...], ...]:
    """`_moments` of a step; most orders have no more in flight in a long one than in a shorter one."""
    microbatches, ranks = job.num_microbatches, job.mesh.pipeline
    enough = min(microbatches, 4 * ranks * job.chunks)
    found = _moments(job.schedule, ranks, job.chunks, enough, rank)
    if enough < microbatches and any(max(counts) >= enough for counts in found):  # GPipe keeps them all
        return _moments(job.schedule, ranks, job.chunks, microbatches, rank)
    return found


def working_set_bytes(job: Job) -> float:
    """What a backward needs besides: one layer's activations where everything is recomputed, and buffers."""
    own = job.setting.tokens * job.architecture.hidden * 8.0
    if job.recompute == "full":
        return own + max(layer_bytes(job.setting, kind) for kind in dict.fromkeys(job.architecture.layers))
    return own


@lru_cache(maxsize=4096)
def _moments(name: str, ranks: int, chunks: int, microbatches: int, rank: int) -> tuple[tuple[float, ...], ...]:
    """Microbatches that each stage of a rank has in flight, at the moments when no other has more of all."""
    schedule = order(name, ranks, chunks, microbatches)
    place = {stage: number for number, stage in enumerate(sorted(_stages_of(schedule, rank)))}
    now, found = [0.0] * len(place), set[tuple[float, ...]]()
    for action in schedule.lanes[rank]["compute"]:
        for part in parts_of(action):
            if part.kind is Kind.F:
                now[place[part.stage]] += 1.0
                found.add(tuple(now))
            elif part.kind is Kind.B:
                now[place[part.stage]] -= 1.0
            elif part.kind is Kind.I:
                now[place[part.stage]] -= 1.0 - WEIGHT_SHARE
            elif part.kind is Kind.W:
                now[place[part.stage]] -= WEIGHT_SHARE
    return _largest(found)


def _largest(found: set[tuple[float, ...]]) -> tuple[tuple[float, ...], ...]:
    """Those that no other exceeds in every stage."""
    if len(found) > 400:
        found = set(sorted(found, key=sum)[-400:])
    return tuple(
        each
        for each in found
        if not any(other != each and all(a >= b for a, b in zip(other, each, strict=True)) for other in found)
    )


def _stages_of(schedule: Schedule, rank: int) -> set[int]:
    return {part.stage for action in schedule.lanes[rank]["compute"] for part in parts_of(action)}


@lru_cache(maxsize=512)
def order(name: str, ranks: int, chunks: int, microbatches: int) -> Schedule:
    """The order a registered schedule gives to these sizes.

    Raises:
        ValueError: if the schedule does not take them.
    """
    return entry(name).build(Shape(ranks, ranks * chunks, microbatches))


def _candidates(job: Job) -> tuple[int, ...]:
    """Ranks that may be fullest: at both ends, and the first with each set of layers, since later ones keep less."""
    last = job.mesh.pipeline - 1
    if last < 4:
        return tuple(range(last + 1))
    first: dict[object, int] = {}
    for rank in range(last + 1):
        first.setdefault(tuple(job.stage_layers[stage] for stage in job.stages_of(rank)), rank)
    return tuple(sorted({0, 1, last - 1, last, *first.values()}))
