"""Exact: a job timed with the project's own schedules and simulator, not by a closed form.

The seconds of a mesh's layers fill a `LayerTimes`, so schedules, partitions, simulators and records work under a mesh.
`rpbench.mesh.ordered_step` adds the exchanges of data parallelism.
"""

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any

from rpbench.cost.pieces import of_segments
from rpbench.cost.table import CostTable, LayerTimes
from rpbench.ir.partition import Partition, symmetric
from rpbench.ir.schedule import Schedule
from rpbench.mesh.job import Job
from rpbench.mesh.layers.layer_seconds import Seconds, Setting
from rpbench.mesh.layers.layer_times import as_times, lost_s
from rpbench.mesh.layout import Mesh
from rpbench.mesh.memory import Bytes, bytes_of_order, device_memory, fitted, mesh_sizes
from rpbench.mesh.ordered_step import exchange_alone, layered, scatter_layers, simulate_step, with_rest
from rpbench.mesh.step import Terms, step_terms
from rpbench.plan.problem import Problem
from rpbench.registry import entry

WAITING = ("1f1b", "dapple", "gpipe", "interleaved_1f1b")  # orders whose frameworks wait for a send to end


def mesh_times(job: Job, options: Mapping[str, Any] | None = None) -> LayerTimes:
    """Times of one microbatch through each layer of one pipeline rank, collectives inside layers included.

    `options` of the schedule, where they are not its defaults, say into how many segments a sequence is cut.
    """
    method = entry(job.schedule)
    blocks = job.software.blocking_hops and job.schedule in WAITING and job.mesh.pipeline > 1
    blocked_s = job.hop_s * (job.num_stages - 1) if blocks else 0.0  # of one microbatch and one way, in all stages
    each, split = lost_s(job) + blocked_s / len(job.layers_s), job.software.split_penalty
    times = as_times(job.layers_s, job.head, job.hop_s, each=each, split=split)
    segments = method.num_segments(method.options | dict(options or {}))
    if segments > 1:
        own = Setting(**{each.name: getattr(job, each.name) for each in fields(Setting)})
        own = replace(own, sequences=job.sequences / segments)
        kinds = [own.kinds[kind] for kind in own.architecture.layers]
        return of_segments(times, as_times(kinds, own.head, job.hop_s, each=each, split=split), segments)
    return times


def exact_terms(job: Job) -> Terms:
    """Seconds of a step by cause; the pipeline and the exchanges of its replicas are simulated."""
    if scatter_layers(job):
        return with_rest(job, layered(job).terms, ends_together=True)
    if exchange_alone(job):
        return step_terms(job)
    problem, partition = problem_of(job), symmetric(job.cut)
    order, costs = problem.order(partition), problem.costs(partition)
    found = simulate_step(job, order, costs, counts_layers=True).terms
    jitter = found.pop("jitter", 0.0)
    rest = {name: found.pop(name) for name in ("data", "tied", "optimizer", "fixed")}
    return {**rest, "work" if job.mesh.pipeline == 1 else "pipeline": sum(found.values()), "jitter": jitter}


def problem_of(job: Job) -> Problem:
    """A job's pipeline as the planning problem that searches and simulators take."""
    return Problem(
        entry(job.schedule),
        mesh_times(job),
        job.mesh.pipeline,
        job.num_microbatches,
        chunks_per_rank=job.chunks,
        fitting=job.recompute == "fitting",
        memory=device_memory(job),
        activations=mesh_sizes(job, streamed=False).of_a_layer,
    )


def exact(job: Job) -> tuple[Job, Terms, list[Bytes]]:
    """A job as it fits, the seconds of a step by cause and the bytes of each rank by class.

    The schedule is any registered one, and its order may follow from times. ValueError if it does not take the sizes.
    """
    cut = symmetric(job.cut)
    job, order, costs = as_fitted(job, problem_of(job), cut, lambda problem, _: problem.order(cut))
    step = simulate_step(with_cut(job, order), order, costs, counts_layers=True)
    return job, step.terms, bytes_of_order(job, step.order, step.graph.analysis)


def as_fitted(
    job: Job, problem: Problem, cut: Partition, build: Callable[[Problem, CostTable], Schedule]
) -> tuple[Job, Schedule, CostTable]:
    """A job with the layers that keep their activations, its order, and the times of its actions.

    An order that follows from times is that of recomputed layers; if none needs to recompute, it is made for that.
    """
    costs = problem.costs(cut)
    order = build(problem, costs)
    if not problem.fitting:
        return job, order, costs
    job = fitted(job, order)
    kept = job.kept_by_stage(cut)
    problem = replace(problem, keeps=kept)
    costs = problem.costs(cut)
    if problem.entry.needs_costs and kept == cut.backward:
        again = build(problem, costs)
        if fitted(job, again).kept_by_stage(cut) == kept:
            order = again
    return job, order, costs


def with_cut(job: Job, order: Schedule) -> Job:
    """The job with the stages of an order if its ranks take them in turn, else with an even cut.

    One rank runs all of its stages one after another, which take what one stage of all layers takes.
    """
    ranks, cut = order.shape.num_ranks, order.partition
    in_turn = all(stage % ranks == rank for rank, own in enumerate(order.stages_of_ranks()) for stage in own)
    if ranks == 1 or cut is None or cut.forward != cut.backward or not in_turn or len(cut.forward) % ranks:
        return replace(job, chunks=1, cut=())
    return replace(job, chunks=len(cut.forward) // ranks, cut=cut.forward)


# --- times of other sources: published, profiled, analytic ---


def under_mesh(times: LayerTimes, job: Job) -> LayerTimes:
    """The times of a job's layers on a device of its mesh, from `times` on one device; ValueError for other layers.

    They change by the ratio of this package's seconds on a device of the mesh to those on one device. A mesh whose
    layers are whole changes nothing, to the last bit.
    """
    if times.num_layers != len(job.architecture.layers):
        raise ValueError(f"times of {times.num_layers} layers for a model of {len(job.architecture.layers)}")
    if all(getattr(job.mesh, axis) == 1 for axis in ("tensor", "context", "expert")):
        return times
    alone = replace(job, mesh=Mesh(), machine=job.machine.with_devices(1), chunks=1, cut=())
    pairs = [(job.kinds[kind], alone.kinds[kind]) for kind in job.architecture.layers]

    def ratio(name: str, new: Seconds, old: Seconds) -> float:
        of = {"forward": "forward_all", "recompute": "forward_all", "backward": "backward_all"}.get(name, name)
        before = getattr(old, of)
        return getattr(new, of) / before if before else 1.0

    layers: dict[str, Any] = {
        name: [time * ratio(name, *pair) for time, pair in zip(getattr(times, name), pairs, strict=True)]
        for name in ("forward", "recompute", "backward", "input_grad", "weight_grad")
        if getattr(times, name)
    }
    head = {
        f"head_{name}": getattr(times, f"head_{name}") * ratio(name, job.head, alone.head)
        for name in ("forward", "backward", "input_grad", "weight_grad")
    }
    step = [value / job.mesh.tensor for value in times.step]
    return replace(times, **layers, **head, step=step, head_step=times.head_step / job.mesh.tensor)
