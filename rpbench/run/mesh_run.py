"""Mesh run: a request under a mesh, whose schedule is simulated with groups of devices as its ranks."""

from dataclasses import replace
from typing import Any

from rpbench.config.mesh import RECOMPUTED, MeshChoice
from rpbench.config.request import Request
from rpbench.cost.table import CostTable
from rpbench.ir.schedule import Schedule
from rpbench.ir.waits.moves import has_transfers
from rpbench.mesh.exact import as_fitted, mesh_times, under_mesh, with_cut
from rpbench.mesh.job import Job
from rpbench.mesh.memory import bytes_of_order, device_memory, fullest, mesh_sizes
from rpbench.mesh.ordered_step import Step, simulate_step
from rpbench.mesh.plan_search.smallest_change import Change, smallest_change
from rpbench.passes.recomputation import check_recompute
from rpbench.plan import Choice, choose
from rpbench.plan.problem import Problem
from rpbench.run.assemble import build_schedule
from rpbench.run.layer_times import layer_times
from rpbench.run.recording import Fields, Outcome, Work
from rpbench.run.scheduled import collection_paused
from rpbench.sim.metrics import measure


def prepare(request: Request) -> Work:
    with collection_paused():
        job, choice, step = simulated(request)
    opening = _opening(request, choice, step)
    if job.recompute == "fitting":
        opening["kept_layers"] = list(job.kept_by_stage(choice.partition))
    return Work(opening, lambda: _outcome(request, job, step))


def simulated(request: Request) -> tuple[Job, Choice, Step]:
    """The run of a request, its cut and its simulated step."""
    job, choice, order, costs = planned(request)
    return job, choice, simulate_step(job, order, costs, counts_layers=_chosen(request).counts_layers)


def planned(request: Request) -> tuple[Job, Choice, Schedule, CostTable]:
    """The run of a request, its cut, its order and the times of its actions."""
    entry, cost, job = request.entry, request.cost, job_of(request)
    of_rank = replace(request, num_devices=job.mesh.pipeline)
    problem = Problem(  # without the transfers that methods add themselves
        entry=entry,
        times=mesh_times(job, request.schedule.options)
        if _chosen(request).counts_layers
        else under_mesh(layer_times(of_rank, len(job.architecture.layers)), job),
        num_ranks=job.mesh.pipeline,
        num_microbatches=request.num_microbatches,
        num_steps=request.num_steps,
        chunks_per_rank=request.chunks_per_device,
        options=dict(request.schedule.options),
        fitting=request.recompute == "fitting",
        recompute_ahead=entry.recompute_ahead if cost.recompute_ahead is None else cost.recompute_ahead,
        fused_ahead=cost.fused_ahead,
        memory=None if entry.separate_cuts or entry.lower is not None else device_memory(job),
        activations=mesh_sizes(job, streamed=False).of_a_layer,
    )
    choice = choose(request.partition, problem)

    def build(problem: Problem, costs: CostTable) -> Schedule:
        order = build_schedule(problem, choice, costs, request.dispatch)
        check_recompute(order, request.recompute)  # type: ignore[arg-type]  # one of them, or the request was refused
        return order

    job, order, costs = as_fitted(job, problem, choice.partition, build)
    return with_cut(job, order), choice, order, costs


def _chosen(request: Request) -> MeshChoice:
    assert request.meshed is not None
    return request.meshed


def job_of(request: Request) -> Job:
    """The run as `rpbench.mesh` takes it; ValueError, naming sizes that fit, if model and mesh do not."""
    chosen = _chosen(request)
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


def tokens_of(job: Job, order: Schedule) -> int:
    """Tokens of a step on all devices."""
    return job.sequences * job.seq_len * job.mesh.data * order.shape.num_microbatches


def _opening(request: Request, choice: Choice, step: Step) -> Fields:
    shape, entry, notes = step.order.shape, request.entry, list(request.notes)
    if entry.lower is not None or entry.separate_cuts:
        notes.append(
            f"what {entry.name} moves between host and device, and what it shares over its ranks, is neither timed nor "
            "in the memory here: a mesh shares over replicas, as mesh.shard says"
        )
    elif has_transfers(step.order):
        notes.append(f"activations that {entry.name} moves to make room take no time here; a run without a mesh has it")
    return {
        "partition_layers": str(choice.partition),
        "num_devices": request.num_devices,
        "num_ranks": shape.num_ranks,
        "num_stages": shape.num_stages,
        "num_backward_stages": shape.num_backward_stages,
        "num_updates": shape.num_steps,
        "notes": notes,
    }


def _outcome(request: Request, job: Job, step: Step) -> Outcome:
    evidence = "predicted" if _chosen(request).counts_layers else "simulated"
    tokens = tokens_of(job, step.order)
    memory = bytes_of_order(job, step.order, step.graph.analysis)
    most = fullest(job, memory)
    found = most.verdict()
    facts: Fields = {
        "num_plans_evaluated": 0,
        "tokens_per_step": tokens,
        "tokens_per_s": None,
        "weight_versions": step.versions.max_live,
        "staleness_steps": step.versions.max_staleness,
        "peak_memory_bytes": [sum(map(round, classes.values())) for classes in memory],
        "fullest_rank": most.rank,
        "memory_bytes": {name: round(value) for name, value in most.classes.items()},
        "verdict": found.answer,
    }
    if most.lacks:  # as on one host; the verdict says whether by more than the error of the count
        change = _smallest_change(job, step, most.lacks)
        reason = found.reason if change is None else f"{found.reason}; it {change}"
        facts |= {"status": "infeasible", "reason": reason, "smallest_change": change and change.plain()}
        return Outcome({**facts, "evidence": evidence})
    fields = measure(
        step.sharded, step.timeline, step.costs, switch_after_last_forward=request.entry.switch_after_last_forward
    )
    tokens_per_s = tokens / step.step_time_s
    more: dict[str, Any] = {
        "step_time_s": step.step_time_s,
        "tokens_per_s": tokens_per_s,
        "tokens_per_s_per_device": tokens_per_s / request.num_devices,
        "terms_s": dict(step.terms),
    }
    return Outcome({**facts, **fields, **more, "evidence": evidence, "reason": found.reason}, step.timeline)


def _smallest_change(job: Job, step: Step, lacks_bytes: float) -> Change | None:
    """The smallest change that makes a run fit, for stages dealt round-robin; None where it is unknown.

    It is judged by orders without costs; `lacks_bytes` are those of the order that runs.
    """
    chunks, rest = divmod(step.order.shape.num_stages, job.mesh.pipeline)
    if rest:
        return None
    try:
        change = smallest_change(replace(job, chunks=chunks, cut=()))
    except ValueError:  # an order that other sizes do not have
        return None
    return change and replace(change, lacks_bytes=lacks_bytes)
