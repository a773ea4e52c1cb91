"""Bytes of each device by class, under any mesh, of any order.

`rpbench.cost.footprint.memory` replays an order: stages dealt in turn or in a V, copies of stages, stashed versions,
streamed stages. Here the sizes are those of a device of the mesh under its software.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from rpbench.cost.footprint.memory import Footprint
from rpbench.cost.footprint.sizes import LAYERS_GATHERED, DeviceMemory, LayerSize, ModelBytes
from rpbench.ir.analysis import Analysis
from rpbench.ir.partition import Partition, symmetric
from rpbench.ir.schedule import Schedule, Shape, Weights
from rpbench.mesh.job import Job
from rpbench.mesh.layer_bytes import WEIGHT_SHARE, input_bytes, layer_bytes, logits_bytes, with_software, working_bytes
from rpbench.mesh.parameters import Held, bits_of_weights, held_layers, learning, states_held
from rpbench.registry import entry
from rpbench.workload.counts import Layer

Bytes = dict[str, float]
LOG_SD = 0.06  # of counted over measured bytes
_NO_LAYER = LayerSize(0, 0, 0)
_NOTHING = ModelBytes((_NO_LAYER,), _NO_LAYER, _NO_LAYER, 0, 0, 0, keeps_activations=True, until_weights=WEIGHT_SHARE)


class Verdict(NamedTuple):
    """Whether a run fits: `ok`, `close` (within two standard deviations) or `oom`, and why."""

    answer: str
    reason: str


def bytes_of_ranks(job: Job) -> list[Bytes]:
    """Bytes of a device of each pipeline rank, by class: allocated tensors, no reserve.

    The order is the one that the job's schedule has without costs.
    """
    order, footprint = _long_enough(job)
    return _with_mesh(job, order, footprint, symmetric(job.cut))


def bytes_of_order(job: Job, order: Schedule, analysis: Analysis) -> list[Bytes]:
    """The same for another order, which has a partition and no exchanges of data parallelism."""
    return _with_mesh(job, order, _footprint(order, analysis), order.cut)


def fitted(job: Job, order: Schedule | None = None) -> Job:
    """The job with the layers that keep their activations, if it recomputes as few as the memory allows: that of an
    order as of `bytes_of_order`, or else of `bytes_of_ranks`.
    """
    if job.recompute != "fitting" or (order is not None and order.weights is Weights.STREAMED):
        return job
    if order is None:
        (order, footprint), cut = _long_enough(job), symmetric(job.cut)
    else:
        footprint, cut = _footprint(order), order.cut
    memory, rows = device_memory(job), (np.array([cut.forward]), np.array([cut.backward]))
    keeps = footprint.of_sizes(memory.sizes).fitting(*rows, memory.limit_bytes)[0].tolist()
    pairs = zip(cut.backward_ranges(), keeps, strict=True)
    return replace(job, kept=tuple(layer for own, number in pairs for layer in own[len(own) - number :]))


def _long_enough(job: Job) -> tuple[Schedule, Footprint]:
    """The order that a job's schedule has without costs, with as many microbatches as its memory depends on."""
    ranks, chunks, microbatches = job.mesh.pipeline, job.chunks, job.num_microbatches
    enough = min(microbatches, 4 * ranks * chunks)  # most orders have no more in flight in a long step
    order, footprint, in_flight = _replayed(job.schedule, ranks, chunks, enough)
    if in_flight >= enough < microbatches:  # GPipe keeps them all
        order, footprint, _ = _replayed(job.schedule, ranks, chunks, microbatches)
    return order, footprint


def _footprint(order: Schedule, analysis: Analysis | None = None) -> Footprint:
    return Footprint(order, _NOTHING, [0] * order.shape.num_ranks, analysis=analysis)


def _with_mesh(job: Job, order: Schedule, footprint: Footprint, cut: Partition) -> list[Bytes]:
    """Bytes of each rank by class with the sizes of a mesh, and those of tensors that a collective has under way."""
    streamed = order.weights is Weights.STREAMED
    sized = footprint.of_sizes(mesh_sizes(job, streamed=streamed))
    keeps = np.array([job.kept_by_stage(cut)]) if job.recompute == "fitting" else None
    tables = sized.classes(np.array([cut.forward]), np.array([cut.backward]), keeps)
    more, ranks = {} if streamed else _on_their_way(job), range(order.shape.num_ranks)
    return [{name: float(table[0, rank]) for name, table in tables.items()} | more for rank in ranks]


def measured_bytes(job: Job, classes: Mapping[str, float]) -> float:
    """Bytes that a framework reports for these classes, fragments and reserve included."""
    return job.software.scale * sum(classes.values()) + job.software.reserve_bytes


class Fullest(NamedTuple):
    """The rank with most bytes; `needed` has its tensors with their fragments, contexts and libraries."""

    rank: int
    classes: Bytes
    needed: float
    room: float

    @property
    def lacks(self) -> float:
        """Bytes that a device lacks; 0 where the run fits, without a margin."""
        return max(0.0, self.needed - self.room)

    def verdict(self) -> Verdict:
        """Whether it fits, with a margin of two standard deviations."""
        largest = max(self.classes, key=lambda name: self.classes[name])
        sizes = f"{self.needed / 1e9:.1f} GB of {self.room / 1e9:.1f} GB"
        text = f"rank {self.rank} needs {sizes}; the most is {largest}"
        if self.needed > self.room * (1 + 2 * LOG_SD):
            return Verdict("oom", text)
        return Verdict("close" if self.needed > self.room * (1 - 2 * LOG_SD) else "ok", text)


def fullest(job: Job, ranks: Sequence[Bytes] = ()) -> Fullest:
    """The rank of a job with most bytes; `ranks` are the bytes of all ranks, if they are known."""
    each = ranks or bytes_of_ranks(job)
    rank = max(range(len(each)), key=lambda number: sum(each[number].values()))
    needed = job.software.scale * sum(each[rank].values()) + (job.machine.reserved_memory_bytes or 0)
    return Fullest(rank, each[rank], needed, job.machine.device.memory_bytes)


def device_memory(job: Job) -> DeviceMemory:
    """Sizes of a model's layers on a device of the mesh, and the bytes that the device has for them."""
    room = job.machine.room_bytes / job.software.scale
    return DeviceMemory(mesh_sizes(job, streamed=False), max(0, int(room - sum(_on_their_way(job).values()))))


def kept_bytes(job: Job, layer: Layer) -> float:
    """Bytes one layer keeps of one microbatch in flight."""
    if job.recomputes_layers:
        return input_bytes(job)
    found = layer_bytes(job, layer)
    return 0.5 * found if job.recompute == "per_op" else found


def working_set_bytes(job: Job) -> float:
    """Bytes of a backward's buffers, and of one layer's activations where everything is recomputed."""
    own = working_bytes(job)
    if job.recomputes_layers:
        return own + max(layer_bytes(job, kind) for kind in dict.fromkeys(job.architecture.layers))
    return own


@lru_cache(maxsize=512)
def _replayed(name: str, ranks: int, chunks: int, microbatches: int) -> tuple[Schedule, Footprint, float]:
    """An order, its footprint and the most microbatches of a stage in flight; ValueError if the sizes do not fit it."""
    order = entry(name).build(Shape(ranks, ranks * chunks, microbatches))
    footprint = _footprint(order)
    return order, footprint, max(levels.max() for levels in footprint.moments())


# --- the sizes of a device of a mesh ----------------------------------------------------------------------------


def mesh_sizes(job: Job, *, streamed: bool) -> ModelBytes:
    """Sizes of a model's layers on one device of the mesh, after data parallelism has sharded their states."""
    own = job.architecture
    sizes = {kind: _layer(job, kind, streamed) for kind in dict.fromkeys(own.layers)}
    found = ModelBytes(
        layers=tuple(sizes[kind] for kind in own.layers),
        embedding=_shared(job, held_layers(job, (), first=True, last=False), ()),
        head=_stepped(job, _shared(job, held_layers(job, (), first=False, last=True), ())),
        boundary=round(input_bytes(job)),
        logits=0,
        logits_chunk=round(logits_bytes(job)),
        keeps_activations=not streamed and not job.recomputes_layers,
    )
    return with_software(found, job)


def _layer(job: Job, kind: Layer, streamed: bool) -> LayerSize:
    layers = ((kind, 1),)
    found = _stepped(job, _shared(job, held_layers(job, layers, first=False, last=False), layers))
    whole = streamed or job.recomputes_layers
    activations = layer_bytes(job, kind) if whole else kept_bytes(job, kind)
    return found._replace(activations=activations, inputs=0 if streamed or not whole else input_bytes(job))


def _shared(job: Job, own: Held, layers: tuple[tuple[Layer, int], ...]) -> LayerSize:
    """Bytes of some layers' parameters and states on one device, after sharding."""
    learns = learning(job, own, layers)
    found, adapters = states_held(job, learns), 2.0 * (learns.dense + learns.experts) if job.has_adapters else 0.0
    bits = bits_of_weights(job) if layers else 1.0
    found = found._replace(weights=states_held(job, own).weights * bits)
    if job.mesh.sharing.what != "parameters":
        return found._replace(weights=found.weights + adapters)
    if job.mesh.pipeline == 1 or job.mesh.sharing.reshard:
        return found
    # gathered once a step, gradients summed whole
    weights = found.weights + (2.0 * bits * (own.dense + own.experts) + adapters)
    return found._replace(weights=weights, gradients=job.software.accumulate_bytes * (learns.dense + learns.experts))


def _stepped(job: Job, size: LayerSize) -> LayerSize:
    return size._replace(optimizer=size.optimizer * job.optimizer_share)


def _on_their_way(job: Job) -> Bytes:
    """Bytes in collectives under way: gathered weights of two layers, if parameters are sharded, and a gradient."""
    what = job.mesh.sharing.what
    if what not in ("gradients", "parameters") or job.mesh.shard_group == 1:
        return {}
    held = [(held_layers(job, ((kind, 1),), first=False, last=False), ((kind, 1),)) for kind in job.kinds]
    learns = max(learning(job, own, layers).largest for own, layers in held)
    found = {"gradients on their way": job.software.accumulate_bytes * learns}
    gathered = 2.0 * bits_of_weights(job) * LAYERS_GATHERED * max(own.largest for own, _ in held)
    return found | ({"gathered weights": gathered} if what == "parameters" else {})
