"""Mesh run: the work of a request under a mesh: the chosen schedule simulated, its ranks groups of devices."""

from dataclasses import replace
from typing import Any

from rpbench.config.mesh import RECOMPUTED, MeshChoice
from rpbench.config.request import Request
from rpbench.cost.table import LayerTimes
from rpbench.mesh.exact import mesh_times, under_mesh
from rpbench.mesh.job import Job
from rpbench.mesh.memory import bytes_of_order, fullest
from rpbench.mesh.ordered_step import Step, simulate_step
from rpbench.mesh.plan_search.smallest_change import smallest_change
from rpbench.plan import Choice, choose
from rpbench.plan.problem import Problem
from rpbench.run.assemble import build_schedule
from rpbench.run.layer_times import layer_times
from rpbench.run.recording import Fields, Outcome, Work
from rpbench.run.scheduled import collection_paused
from rpbench.sim.metrics import measure


def prepare(request: Request) -> Work:
    """The work of a run under a mesh, checked."""
    assert request.mesh is not None
    with collection_paused():
        job = job_of(request, request.mesh)
        problem = _problem(request, job)
        choice = choose(request.partition, problem)
        costs = problem.costs(choice.partition)
        order = build_schedule(problem, choice, costs, request.dispatch)
        step = simulate_step(job, order, costs, counts_layers=request.mesh.counts_layers)
    return Work(_opening(request, choice, step), lambda: _outcome(request, job, step))


def job_of(request: Request, chosen: MeshChoice) -> Job:
    """The run as `rpbench.mesh` takes it.

    Raises:
        ValueError: if model and mesh do not fit each other, with the sizes that do.
    """
    assert chosen.architecture is not None
    assert chosen.machine is not None
    return Job(
        chosen.architecture,
        chosen.machine,
        chosen.mesh,
        chosen.software,
        chosen.architecture.seq_len,
        request.workload.microbatch_sequences,
        num_microbatches=request.num_microbatches,
        schedule=request.entry.name,
        recompute=RECOMPUTED[request.recompute],  # type: ignore[arg-type]
        precision=chosen.precision,
    )


def _problem(request: Request, job: Job) -> Problem:
    """The planning problem of the ranks; what methods move themselves is not lowered."""
    entry, cost = request.entry, request.cost
    return Problem(
        entry=entry,
        times=_times(request, job),
        num_ranks=job.mesh.pipeline,
        num_microbatches=request.num_microbatches,
        num_steps=request.num_steps,
        chunks_per_rank=request.chunks_per_device,
        options=dict(request.schedule.options),
        recompute_ahead=entry.recompute_ahead if cost.recompute_ahead is None else cost.recompute_ahead,
        fused_ahead=cost.fused_ahead,
    )


def _times(request: Request, job: Job) -> LayerTimes:
    """Seconds of layers: counted for the machine, or those of `cost=` as the mesh changes them."""
    assert request.mesh is not None
    if request.mesh.counts_layers:
        return mesh_times(job)
    of_rank = replace(request, num_devices=job.mesh.pipeline)
    return under_mesh(layer_times(of_rank, len(job.architecture.layers)), job)


def _opening(request: Request, choice: Choice, step: Step) -> Fields:
    shape = step.order.shape
    assert request.mesh is not None
    assert request.mesh.machine is not None
    return {
        "partition_layers": str(choice.partition),
        "num_devices": request.num_devices,
        "num_ranks": shape.num_ranks,
        "num_stages": shape.num_stages,
        "num_backward_stages": shape.num_backward_stages,
        "num_updates": shape.num_steps,
        "notes": [*request.notes, *_notes(request)],
    }


def _notes(request: Request) -> list[str]:
    """Notes on the transfers that the figures leave out, for a schedule that moves its own weights or states."""
    entry = request.entry
    if entry.lower is None and not entry.separate_cuts:
        return []
    return [
        f"what {entry.name} moves between host and device, and what it shares over its ranks, is neither timed nor in "
        "the memory here: a mesh shares over replicas, as mesh.shard says"
    ]


def _outcome(request: Request, job: Job, step: Step) -> Outcome:
    assert request.mesh is not None
    counted = request.mesh.counts_layers
    evidence = "predicted" if counted else "simulated"
    facts = _facts(job, step)
    memory = bytes_of_order(job, step.order, step.graph.analysis)
    most = fullest(job, memory)
    found = most.verdict()
    facts |= {
        "peak_memory_bytes": [round(sum(classes.values())) for classes in memory],
        "fullest_rank": most.rank,
        "memory_bytes": {name: round(value) for name, value in most.classes.items()},
        "verdict": found.answer,
    }
    if found.answer == "oom":
        facts |= {"status": "infeasible", "reason": found.reason, "smallest_change": _smallest_change(job, step)}
        return Outcome({**facts, "evidence": evidence})
    fields = measure(
        step.sharded, step.timeline, step.costs, switch_after_last_forward=request.entry.switch_after_last_forward
    )
    seconds = step.step_time_s
    tokens_per_s = _tokens(job, step) / seconds
    more: dict[str, Any] = {
        "step_time_s": seconds,
        "tokens_per_s": tokens_per_s,
        "tokens_per_s_per_device": tokens_per_s / request.num_devices,
        "terms_s": dict(step.terms),
    }
    return Outcome({**facts, **fields, **more, "evidence": evidence, "reason": found.reason}, step.timeline)


def _smallest_change(job: Job, step: Step) -> dict[str, Any] | None:
    """The smallest change that makes a run fit, for stages dealt in turn; None where it is unknown."""
    chunks, rest = divmod(step.order.shape.num_stages, job.mesh.pipeline)
    if rest:
        return None
    try:
        change = smallest_change(replace(job, chunks=chunks, cut=()))
    except ValueError:  # an order that other sizes do not have
        return None
    return change.plain() if change else None


def _tokens(job: Job, step: Step) -> int:
    """Tokens behind one update, on all devices."""
    return job.sequences * job.seq_len * job.mesh.data * step.order.shape.num_microbatches


def _facts(job: Job, step: Step) -> Fields:
    return {
        "num_plans_evaluated": 0,
        "tokens_per_step": _tokens(job, step),
        "tokens_per_s": None,
        "weight_versions": step.versions.max_live,
        "staleness_steps": step.versions.max_staleness,
    }
