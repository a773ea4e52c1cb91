"""Exact: a job timed with the project's own schedules and simulator, not by a closed form.

The seconds of a mesh's layers fill today's `LayerTimes`, so everything that takes those (schedules, partitions,
simulators, records) works under a mesh. What data parallelism moves stands on lane net: gathers, scatters and sums of a
stage over devices outside the schedule, whose seconds come from the bandwidth of their group.
"""

from dataclasses import replace
from functools import lru_cache

import numpy as np

from rpbench.cost.table import CostTable, LayerTimes
from rpbench.ir.moved_objects import Cargo
from rpbench.ir.partition import symmetric
from rpbench.ir.schedule import Schedule, Shape
from rpbench.ir.timeline import Timeline
from rpbench.mesh.data_parallel import reduced
from rpbench.mesh.job import Job
from rpbench.mesh.layer_times import as_times, lost_s
from rpbench.mesh.parameters import held_by_stage, trained
from rpbench.mesh.step import Terms, pipeline_terms, stages_of_step, step_terms
from rpbench.passes.offload import Per, shard
from rpbench.plan.problem import Problem
from rpbench.registry import entry
from rpbench.sim.graph import Graph, build_graph
from rpbench.sim.longest_path import simulate_graph

WAITING = ("1f1b", "dapple", "gpipe", "interleaved_1f1b")  # orders whose frameworks send before they go on
# What is gathered and what is reduced, and how often, by what replicas share (`rpbench.passes.offload.shard`).
LOWERED: dict[str, tuple[Per | None, Per]] = {
    "none": (None, "step"),
    "optimizer": ("step", "step"),
    "gradients": ("step", "visit"),
    "parameters": ("visit", "visit"),
}


def mesh_times(job: Job) -> LayerTimes:
    """Times of one microbatch through each layer of one pipeline rank, collectives inside layers included."""
    layers = [job.kinds[kind] for kind in job.architecture.layers]
    each = lost_s(job.setting) + _blocked_s(job) / len(layers)
    return as_times(layers, job.head, job.hop_s, each=each, split=job.software.split_penalty)


def _blocked_s(job: Job) -> float:
    """Seconds that all stages of one microbatch wait, one way, for transfers which a framework does not hide."""
    blocks = job.software.blocking_hops and job.schedule in WAITING
    return job.hop_s * (job.num_stages - 1) if blocks and job.mesh.pipeline > 1 else 0.0


def exact_terms(job: Job) -> Terms:
    """Seconds of a step by cause, the pipeline simulated."""
    terms = step_terms(job)
    if job.mesh.pipeline == 1:
        return terms
    closed = pipeline_terms(job, stages_of_step(job))
    terms = {name: value for name, value in terms.items() if name not in closed}
    scale = 1.0 + terms.pop("jitter", 0.0) / (sum(terms.values()) + sum(closed.values()))
    terms["pipeline"] = makespan_s(job)
    terms["jitter"] = (scale - 1.0) * sum(terms.values())
    return terms


def makespan_s(job: Job) -> float:
    """Seconds from the first forward to the last backward of a step, simulated."""
    partition = symmetric(job.cut)
    problem = problem_of(job)
    if problem.entry.needs_costs:
        graph = build_graph(problem.order(partition))
    else:
        graph = shared_graph(job.schedule, job.mesh.pipeline, job.num_stages, job.num_microbatches)
    timeline = simulate_graph(graph, problem.costs(partition))
    return float(np.max(np.asarray(timeline.end, float)))


def problem_of(job: Job, times: LayerTimes | None = None) -> Problem:
    """A job's pipeline as the planning problem that today's searches and simulators take.

    Args:
        times: of its layers; None for those of its mesh.
    """
    return Problem(
        entry(job.schedule),
        times or mesh_times(job),
        job.mesh.pipeline,
        job.num_microbatches,
        chunks_per_rank=job.chunks,
    )


@lru_cache(maxsize=64)
def shared_graph(name: str, ranks: int, stages: int, microbatches: int) -> Graph:
    """The graph of an order that does not depend on times: plans with equal sizes share it."""
    return build_graph(entry(name).build(Shape(ranks, stages, microbatches)))


# --- data parallelism as actions --------------------------------------------------------------------------------


def timeline(job: Job, times: LayerTimes | None = None) -> Timeline:
    """A step with what data parallelism moves on lane net, simulated.

    Args:
        times: of its layers; None for those of its mesh.

    Raises:
        ScheduleError: if the schedule cannot gather weights (`rpbench.passes.offload.shard`).
    """
    schedule, costs = lowered(job, times)
    return simulate_graph(build_graph(schedule), costs)


def lowered(job: Job, times: LayerTimes | None = None) -> tuple[Schedule, CostTable]:
    """The schedule of a job with gathers and sums over its replicas, and what all its actions take."""
    partition, problem = symmetric(job.cut), problem_of(job, times)
    order = problem.order(partition)
    costs = problem.costs(partition)
    if job.mesh.replicas == 1:
        return order, costs
    order = replace(order, shape=replace(order.shape, outer_replicas=job.mesh.replicas))
    parameters, gradients = LOWERED[job.mesh.sharing.what]
    if parameters == "visit" and not job.mesh.sharing.reshard:
        parameters = "step"
    seconds = [reduced(job, trained(job, held_by_stage(job, stage), [stage])) for stage in range(job.num_stages)]

    def transfer_time(cargo: Cargo) -> float | None:
        found = seconds[cargo.stage]
        return {"P": found.parameters, "G": found.gradients}.get(cargo.object)

    return shard(order, parameters=parameters, gradients=gradients), replace(costs, transfer_time=transfer_time)
