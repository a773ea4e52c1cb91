"""Memory of an order: bytes by class on every pipeline rank, for any schedule, from what stands in its rows.

`rpbench.mesh.memory` counts for stages dealt in turn, as searches need it. Here the sizes of a device of the mesh take
the place of the model's, and `rpbench.cost.memory` replays the order: stages in a V, copies of stages, stashed
versions, streamed stages.
"""

from collections.abc import Sequence

from rpbench.cost.memory import classes_of
from rpbench.cost.sizes import LayerSize, ModelBytes
from rpbench.ir.action import parts_of
from rpbench.ir.analysis import Analysis
from rpbench.ir.schedule import Schedule, Weights
from rpbench.mesh.job import Job
from rpbench.mesh.layer_bytes import layer_bytes
from rpbench.mesh.layer_seconds import padded_vocab
from rpbench.mesh.memory import Bytes, kept_bytes, working_set_bytes
from rpbench.mesh.parameters import Held, held_layers, states_held
from rpbench.workload.parts import Layer


def bytes_of_ranks(job: Job, order: Schedule, in_flight: Sequence[int], analysis: Analysis) -> list[Bytes]:
    """Bytes of a device of every pipeline rank, by class; allocated tensors, no reserve.

    Args:
        order: what the ranks compute, with its partition; without what data parallelism moves.
        in_flight: most stage inputs each rank holds (`rpbench.sim.memory.peak_in_flight`).
        analysis: of the order.
    """
    found: list[Bytes] = []
    streamed = order.weights is Weights.STREAMED
    for rank, classes in enumerate(classes_of(order, mesh_sizes(job, streamed=streamed), in_flight, analysis=analysis)):
        each: Bytes = {name: float(value) for name, value in classes.items()}
        if not streamed:
            each |= {"working set": working_set_bytes(job)} | _gathered(job) | _logits(job, order, rank)
        found.append(each)
    return found


def mesh_sizes(job: Job, *, streamed: bool) -> ModelBytes:
    """A model's layers as one device of the mesh holds them, after data parallelism has shared their states."""
    own, tokens = job.architecture, job.setting.tokens
    sizes = {kind: _layer(job, kind, streamed) for kind in dict.fromkeys(own.layers)}
    logits = job.software.logit_bytes * tokens * padded_vocab(job.setting) / job.mesh.tensor
    return ModelBytes(
        layers=tuple(sizes[kind] for kind in own.layers),
        embedding=_shared(job, held_layers(job, (), first=True, last=False)),
        head=_shared(job, held_layers(job, (), first=False, last=True)),
        boundary=round(2.0 * tokens * own.hidden / job.setting.spread),
        logits=0,  # one microbatch's, counted apart: the loss is taken as soon as they are there
        logits_chunk=round(logits),
        keeps_activations=not streamed,
    )


def _layer(job: Job, kind: Layer, streamed: bool) -> LayerSize:
    found = _shared(job, held_layers(job, ((kind, 1),), first=False, last=False))
    kept = layer_bytes(job.setting, kind) if streamed else kept_bytes(job, kind)
    return found._replace(activations=round(kept))


def _shared(job: Job, own: Held) -> LayerSize:
    """Bytes of parameters on one device; what is shared is divided by the devices that share it."""
    return LayerSize(*map(round, states_held(job, own)))


def _gathered(job: Job) -> Bytes:
    """Two layers' gathered weights, and the gradients of one, where parameters are shared."""
    if job.mesh.sharing.what != "parameters" or job.mesh.shard_group == 1:
        return {}
    kinds = dict.fromkeys(job.architecture.layers)
    largest = max(held_layers(job, ((kind, 1),), first=False, last=False).largest for kind in kinds)
    return {"gathered": (4.0 + job.software.accumulate_bytes) * largest}


def _logits(job: Job, order: Schedule, rank: int) -> Bytes:
    """Of one microbatch, on the ranks that hold the last stage, or a share of the head."""
    shape = order.shape
    held = (part.stage for action in order.compute(rank) for part in parts_of(action))
    if not shape.num_head_shards and shape.num_stages - 1 not in held:
        return {}
    rows = padded_vocab(job.setting) / job.mesh.tensor / (shape.num_head_shards or 1)
    return {"logits": job.software.logit_bytes * job.setting.tokens * rows}
