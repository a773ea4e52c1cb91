"""Ordered step: a step of any registered schedule under a mesh, simulated, with its seconds by cause.

The schedule's ranks are groups of devices. Collectives inside layers are a part of the seconds of actions. Exchanges of
data parallelism are actions on lane net, with partners outside the schedule. Causes are differences of simulations of
one order: without hops, with hops, with these exchanges.

    kernels, recompute, collectives, host    the busiest rank's work, by the parts of its layers' seconds
    bubble                                   waits of that rank if hops take no time
    hops                                     seconds that hops add
    data                                     seconds that data parallelism adds
    tied, optimizer, fixed, jitter           as in `rpbench.mesh.step`, where the layers' seconds are counted here
"""

from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np

from rpbench.cost.table import CostTable
from rpbench.cost.transfers import slowed_by_exchanges
from rpbench.ir.action import HEAD, Kind
from rpbench.ir.checks.versions import Versions
from rpbench.ir.partition import symmetric
from rpbench.ir.schedule import Schedule, Shape, Weights
from rpbench.ir.timeline import Timeline
from rpbench.mesh.data_parallel import LOWERED, Exchanges, beside_computation, exchanged, late_s, lowered, transfer_time
from rpbench.mesh.job import Job, stages_of
from rpbench.mesh.layers.collectives import reduce_s
from rpbench.mesh.layers.layer_times import as_times, lost_s
from rpbench.mesh.layout import Sharing
from rpbench.mesh.placement import pipeline_inside
from rpbench.mesh.step import Terms, step_terms
from rpbench.passes.offload import Per, shard
from rpbench.registry import entry
from rpbench.sim.checked import checked_graph
from rpbench.sim.graph import Graph, build_graph
from rpbench.sim.longest_path import simulate_graph
from rpbench.sim.memory import compute_lanes
from rpbench.sim.metrics import step_time

OUTSIDE = ("tied", "optimizer", "fixed")  # terms of a step that follow its schedule


@dataclass(frozen=True)
class Step:
    """A simulated step."""

    order: Schedule  # the computations of the ranks; `graph` is its graph
    graph: Graph
    versions: Versions
    sharded: Graph  # the graph with the exchanges of data parallelism; `graph` if there are none
    costs: CostTable
    timeline: Timeline  # of the sharded graph
    step_time_s: float
    terms: Terms  # the step's seconds by cause


def simulate_step(job: Job, order: Schedule, costs: CostTable, *, counts_layers: bool) -> Step:
    """A step of an order whose partition is known, at costs in seconds; the job's own cut does not matter.

    The order has the computations of the ranks, with steps if several follow each other; `counts_layers` says whether
    the seconds of layers are those of the job. ScheduleError if the order cannot run, or replicas cannot share the
    states that the mesh says.
    """
    graph, versions = checked_graph(order)
    if counts_layers and order.shape.num_head_shards:
        costs = _with_exchanges_of_head(job, costs)
    if counts_layers and scatter_layers(job):
        found = layered(job)
        terms = with_rest(job, _of_replicas(job, order, found.terms), ends_together=True)
        return Step(order, graph, versions, found.graph, found.costs, found.timeline, sum(terms.values()), terms)
    plain = simulate_graph(graph, costs)
    at_once = _step_s(graph, simulate_graph(graph, replace(costs, hop=0)))
    busiest = _busiest_s(graph, plain) / order.shape.num_steps
    terms = _work(job, order, busiest) if counts_layers else {"work": busiest}
    pipeline = _step_s(graph, plain)
    terms |= {"bubble": at_once - busiest, "hops": pipeline - at_once}
    sharded, charged, late = _with_replicas(job, order, graph, costs, counts_layers)
    timeline = plain if sharded is graph else simulate_graph(sharded, charged)
    step_s = _step_s(sharded, timeline) + late
    terms["data"] = step_s - pipeline
    if counts_layers:
        if exchange_alone(job):  # exchanges go bucket by bucket beside computation, but an action covers a whole stage
            terms = _of_replicas(job, order, step_terms(job))
        else:
            terms = with_rest(job, terms, ends_together=order.ends_together)
        step_s = sum(terms.values())
    return Step(order, graph, versions, sharded, charged, timeline, step_s, terms)


def _with_exchanges_of_head(job: Job, costs: CostTable) -> CostTable:
    """The costs with what ranks exchange at the end of each half of a head that they share, an all-reduce a pair.

    Orders are made without them, as on one host.
    """
    mesh, own = job.mesh, job.architecture
    group = job.group(mesh.pipeline, 1 if pipeline_inside(mesh, job.machine) else mesh.stride("pipeline"))
    each_s = reduce_s(own.boundary_bytes(job.microbatch_tokens) / mesh.tensor, group)
    shards = {kind: tuple(work._replace(main=work.main + each_s) for work in costs.work[kind]) for kind in HEAD}
    return replace(costs, work={**costs.work, **shards})


def _step_s(graph: Graph, timeline: Timeline) -> float:
    """Seconds of a step; of a single one to the end of its last exchange."""
    if graph.schedule.shape.num_steps > 1:
        return step_time(graph, timeline) / timeline.units_per_second
    return float(np.max(np.asarray(timeline.end, float))) / timeline.units_per_second


def _of_replicas(job: Job, order: Schedule, terms: Terms) -> Terms:
    """The terms of replicas alone, with their work divided into its parts."""
    more = {name: value for name, value in terms.items() if name != "work"}
    return _work(job, order, terms["work"]) | {"bubble": 0.0, "hops": 0.0} | more


def _busiest_s(graph: Graph, timeline: Timeline) -> float:
    duration = (np.asarray(timeline.end, float) - np.asarray(timeline.start, float)) / timeline.units_per_second
    return float(max(duration[first:last].sum() for _, first, last in compute_lanes(graph)))


def _work(job: Job, order: Schedule, busiest_s: float) -> Terms:
    return parts_of_work(job, busiest_s, splits=not order.kinds.isdisjoint((Kind.I, Kind.W)))


def parts_of_work(job: Job, busiest_s: float, *, splits: bool) -> Terms:
    """The seconds of the busiest rank by part, in the proportions of the model's layers and head."""
    layers = [*job.layers_s, job.head]
    penalty = job.software.split_penalty if splits else 1.0
    found = {
        "kernels": sum(each.forward + penalty * (each.input_grad + each.weight_grad) for each in layers),
        "recompute": sum(each.recompute for each in layers),
        "collectives": sum(each.forward_exposed + each.backward_exposed for each in layers),
        "host": sum(each.waits for each in layers) + job.software.constants["microbatch_s"] * job.mesh.pipeline,
    }
    whole = sum(found.values())
    return {name: busiest_s * value / whole for name, value in found.items()}


def with_rest(job: Job, terms: Terms, *, ends_together: bool) -> Terms:
    """The terms with those that follow the schedule; if one rank has both ends, no tied matrix is reduced."""
    closed = step_terms(job)
    before = sum(closed.values()) - closed.get("jitter", 0.0)
    closed["tied"] *= not ends_together
    found = terms | {name: closed[name] for name in OUTSIDE}
    return found | ({"jitter": sum(found.values()) * closed["jitter"] / before} if "jitter" in closed else {})


# --- data parallelism as actions --------------------------------------------------------------------------------


def _with_replicas(
    job: Job, order: Schedule, graph: Graph, costs: CostTable, counts_layers: bool
) -> tuple[Graph, CostTable, float]:
    """The graph with the exchanges of replicas, its costs, and the seconds of exchanges after the step.

    Those are the exchanges that do not run beside computation, and gathers that an order has no place for.
    """
    copies = _copies(order) if counts_layers or job.mesh.data > 1 else 1
    job = _widened(job, copies)
    if job.mesh.replicas == 1 and job.mesh.expert_replicas == 1:
        return graph, costs, 0.0
    up, down = exchanged(job, order.cut.forward), exchanged(job, order.cut.backward)
    parameters, gradients = lowered(job, order)
    late = late_s(job, order, up, down, parameters, gradients)
    if parameters is None and gradients is None:
        return graph, costs, late
    outside = replace(order, shape=replace(order.shape, outer_replicas=max(2, job.mesh.replicas // copies)))
    sharded = build_graph(shard(outside, parameters=parameters, gradients=gradients))
    if parameters != "visit" and counts_layers:
        up = _bucketed(job, order.cut.forward, up)
    if gradients == "step" and counts_layers and copies == 1:  # copies of a stage sum it as a whole
        down = _bucketed(job, order.cut.backward, down)
    times = partial(transfer_time, up, down, costs.units_per_second)
    return sharded, replace(costs, transfer_time=times), late


def _copies(order: Schedule) -> int:
    """Ranks that hold each stage; 1 if stages differ in that number, or weights do not stay on their ranks."""
    if order.weights is Weights.STREAMED:
        return 1
    held = order.stages_of_ranks()
    counts = {sum(stage in own for own in held) for stage in range(order.shape.num_stages)}
    return counts.pop() if len(counts) == 1 and not order.shape.tensor_parallel else 1


def _widened(job: Job, copies: int) -> Job:
    """The job with a schedule's copies of stages counted as replicas; without other replicas they share no states."""
    if copies == 1 or job.mesh.pipeline % copies:
        return job
    sharing = job.mesh.sharing if job.mesh.replicas > 1 else Sharing("none")
    mesh = replace(job.mesh, data=job.mesh.data * copies, pipeline=job.mesh.pipeline // copies, sharing=sharing)
    return replace(job, mesh=mesh, cut=())


def _bucketed(job: Job, counts: tuple[int, ...], whole: Exchanges) -> Exchanges:
    """The exposed part of exchanges once a step: the first bucket goes during a stage's last backward, not after it."""
    found = []
    for stage, (own, all_of_it) in enumerate(zip(stages_of(job.layers_s, counts), whole, strict=True)):
        layers = [*own, *[job.head] * (stage == len(counts) - 1)]
        forward = sum(each.forward_all for each in layers)
        backward = sum(each.backward_all + each.recompute for each in layers)
        found.append(beside_computation(job, all_of_it, forward, backward))
    return tuple(found)


# --- replicas alone -----------------------------------------------------------------------------------------------
#
# Gradients are scattered after every backward, layer by layer: every layer is a stage, with the order and the actions
# of `zero_2` and `zero_3`. Reductions once a step go in buckets that are no layers, so `rpbench.mesh.step` has closed
# forms for them. With 2 layers and 2 microbatches under ZeRO-2:
#
#     compute   0F0 1F0 1B0 0B0                                0F1 1F1 1B1 0B1
#     net       0UNSHARD 1UNSHARD | 1REDUCE_GRAD 0REDUCE_GRAD | 1REDUCE_GRAD 0REDUCE_GRAD


class Layered(NamedTuple):
    """The simulated microbatches of replicas; `terms` are the seconds of computation, and those that exchanges add."""

    graph: Graph
    costs: CostTable
    timeline: Timeline
    terms: Terms


def exchange_alone(job: Job) -> bool:
    """Whether the replicas' exchanges are the only ones: there is no pipeline."""
    return job.mesh.pipeline == 1 and (job.mesh.replicas > 1 or job.mesh.expert_replicas > 1)


def scatter_layers(job: Job) -> bool:
    """Whether replicas without a pipeline scatter all gradients layer by layer, after every backward.

    Experts that are spread over devices have other groups, whose exchanges no layer waits for.
    """
    mesh = job.mesh
    by_visit = LOWERED[mesh.sharing.what][1] == "visit" and mesh.shard_group == mesh.replicas
    together = mesh.expert == 1 or mesh.expert_shard_group == 1
    return exchange_alone(job) and by_visit and together and not job.has_adapters


def layered(job: Job) -> Layered:
    """The simulated microbatches of a job with `scatter_layers`."""
    cut = (1,) * len(job.architecture.layers)
    parameters, gradients = lowered(job, entry("data_parallel").build(Shape(1, len(cut), job.num_microbatches)))
    graph = _graph(len(cut), job.num_microbatches, parameters, gradients)
    own = exchanged(job, cut, ends_together=True)
    late = late_s(job, graph.schedule, own, own, parameters, gradients)
    times = as_times(job.layers_s, job.head, 0.0, each=lost_s(job))
    beside = job.software.constants["beside"]
    run = replace(times, beside=beside).of_whole_microbatches(1, gathers=parameters == "visit")
    costs = replace(run.table(symmetric(cut)), transfer_time=partial(transfer_time, own, own, 1))
    slowed = slowed_by_exchanges(graph.schedule, costs.work, partial(transfer_time, own, own, 1), beside)
    costs = replace(costs, work={**costs.work, **slowed})
    timeline = simulate_graph(graph, costs)
    alone = sum(sum(each) for each in (times.forward, times.recompute, times.backward))
    work = job.num_microbatches * (alone + times.head_forward + times.head_backward)
    data = float(np.max(np.asarray(timeline.end, float))) + late - work
    return Layered(graph, costs, timeline, {"work": work, "data": data})


@lru_cache(maxsize=32)
def _graph(layers: int, microbatches: int, parameters: Per | None, gradients: Per | None) -> Graph:
    """The graph of any number of replicas, which all do the same, with their exchanges."""
    order = entry("data_parallel").build(Shape(1, layers, microbatches, outer_replicas=2))
    order = order.with_partition(symmetric((1,) * layers))
    if parameters is None and gradients is None:
        return build_graph(order)
    return build_graph(shard(order, parameters=parameters, gradients=gradients))
