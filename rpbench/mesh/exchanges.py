"""Exchanges: seconds of what data parallelism moves of each stage, and where an order has place for it."""

from rpbench.ir.action import Kind, parts_of
from rpbench.ir.moved_objects import Cargo
from rpbench.ir.policy import STEPS_BEHIND
from rpbench.ir.schedule import Schedule
from rpbench.mesh.data_parallel import Reduced, reduced
from rpbench.mesh.job import Job
from rpbench.mesh.parameters import held_layers
from rpbench.passes.offload import Per
from rpbench.workload.counts import Layer

# How often weights are gathered and gradients summed, by what replicas share (`rpbench.passes.offload.shard`).
LOWERED: dict[str, tuple[Per | None, Per]] = {
    "none": (None, "step"),
    "optimizer": ("step", "step"),
    "gradients": ("step", "visit"),
    "parameters": ("visit", "visit"),
}


def lowered(job: Job, order: Schedule) -> tuple[Per | None, Per | None]:
    """When weights are gathered and gradients summed on lane net; None for an exchange after the step.

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


def gathers_late(job: Job, parameters: Per | None) -> bool:
    return parameters is None and LOWERED[job.mesh.sharing.what][0] is not None


def late_s(order: Schedule, up: tuple[Reduced, ...], down: tuple[Reduced, ...], *, gathers: bool, sums: bool) -> float:
    """Exposed seconds of the exchanges after the step, on the rank that waits longest."""
    found = 0.0
    for rank in range(order.shape.num_ranks):
        parts = [part for action in order.compute(rank) for part in parts_of(action)]
        gathered = {part.stage for part in parts if gathers and part.kind is Kind.F}
        summed = {part.stage for part in parts if sums and part.kind in (Kind.B, Kind.W, Kind.FB)}
        seconds = sum(up[stage].parameters for stage in gathered) + sum(down[stage].gradients for stage in summed)
        found = max(found, seconds)
    return found


def transfer_time(up: tuple[Reduced, ...], down: tuple[Reduced, ...], units: int, cargo: Cargo) -> float | None:
    """Time of a gather or a sum of a stage."""
    found = (down if cargo.backward else up)[cargo.stage]
    seconds = {"P": found.parameters, "G": found.gradients}.get(cargo.object)
    return None if seconds is None else seconds * units


def exchanged(job: Job, counts: tuple[int, ...], *, ends_together: bool = False) -> tuple[Reduced, ...]:
    """Seconds of the exchanges of each stage of a cut.

    Args:
        ends_together: whether one device has both ends, and so a tied matrix once.
    """
    end = len(counts) - 1
    found, begin = [], 0
    for stage, count in enumerate(counts):
        layers = job.architecture.layers[begin : begin + count]
        kinds: list[tuple[Layer, int]] = [(kind, layers.count(kind)) for kind in dict.fromkeys(layers)]
        last = stage == end and not (ends_together and job.architecture.tied)
        found.append(reduced(job, held_layers(job, kinds, first=stage == 0, last=last)))
        begin += count
    return tuple(found)
