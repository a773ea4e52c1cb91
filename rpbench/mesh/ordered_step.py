"""Ordered step: a step of any registered schedule under a mesh, simulated, with its seconds by cause.

The schedule's ranks are groups of devices. Collectives inside layers are a part of the seconds of actions; what data
parallelism moves stands on lane net, over partners outside the schedule. Causes are differences of simulations of one
order: without hops, with hops, with what data parallelism moves.

    kernels, recompute, collectives, host    the busiest rank's work, by what its layers' seconds are made of
    bubble                                   what that rank waits where hops take no time
    hops                                     what hops add
    data                                     what data parallelism adds
    tied, optimizer, fixed, jitter           as in `rpbench.mesh.step`, where the layers' seconds are counted here
"""

from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from rpbench.cost.table import CostTable
from rpbench.ir.action import Kind, parts_of
from rpbench.ir.moved_objects import Cargo
from rpbench.ir.schedule import Schedule
from rpbench.ir.timeline import Timeline
from rpbench.ir.versions import Versions
from rpbench.mesh.architecture import Layer
from rpbench.mesh.data_parallel import Reduced, reduced
from rpbench.mesh.exact import LOWERED
from rpbench.mesh.job import Job
from rpbench.mesh.parameters import held_layers
from rpbench.mesh.step import Terms, step_terms
from rpbench.passes.offload import Per, shard
from rpbench.sim.checked import checked_graph
from rpbench.sim.graph import Graph, build_graph
from rpbench.sim.longest_path import simulate_graph
from rpbench.sim.metrics import step_time

OUTSIDE = ("tied", "optimizer", "fixed")  # of a step, beside its schedule


@dataclass(frozen=True)
class Step:
    """A simulated step.

    Args:
        order: what the ranks compute; `graph` is of it.
        sharded: the graph with what data parallelism moves; that of the order where nothing moves.
        timeline: of the sharded graph.
        terms: seconds of one step by cause; they add up to the step.
    """

    order: Schedule
    graph: Graph
    versions: Versions
    sharded: Graph
    costs: CostTable
    timeline: Timeline
    terms: Terms

    @property
    def step_time_s(self) -> float:
        """Seconds of a step."""
        return sum(self.terms.values())


def simulate_step(job: Job, order: Schedule, costs: CostTable, *, counts_layers: bool) -> Step:
    """A step of an order whose partition is known.

    Args:
        job: the run; its own cut does not matter.
        order: what the ranks compute, with steps where several follow each other.
        costs: of its actions, in seconds.
        counts_layers: whether the seconds of layers are those of the job.

    Raises:
        ScheduleError: if the order cannot run, or replicas cannot share what the mesh says.
    """
    graph, versions = checked_graph(order)
    second = costs.units_per_second
    plain = simulate_graph(graph, costs)
    at_once = step_time(graph, simulate_graph(graph, replace(costs, hop=0))) / second
    busiest = _busiest_s(graph, plain) / order.shape.num_steps
    terms = _work(job, order, busiest) if counts_layers else {"work": busiest}
    pipeline = step_time(graph, plain) / second
    terms |= {"bubble": at_once - busiest, "hops": pipeline - at_once}
    sharded, charged, late_s = _with_replicas(job, order, graph, costs)
    timeline = plain if sharded is graph else simulate_graph(sharded, charged)
    terms["data"] = step_time(sharded, timeline) / second - pipeline + late_s
    if counts_layers:
        _add_rest(job, terms)
    return Step(order, graph, versions, sharded, charged, timeline, terms)


def _busiest_s(graph: Graph, timeline: Timeline) -> float:
    """Seconds of work of the busiest rank."""
    duration = (np.asarray(timeline.end, float) - np.asarray(timeline.start, float)) / timeline.units_per_second
    starts = graph.columns.lane_start.tolist()
    lanes = zip(graph.schedule.items(), starts, starts[1:], strict=False)
    return float(max(duration[first:last].sum() for (_, lane, _), first, last in lanes if lane == "compute"))


def _work(job: Job, order: Schedule, busiest_s: float) -> Terms:
    """The seconds of the busiest rank by what they are made of: as its kinds of layers say, in proportion."""
    layers = [*(job.kinds[kind] for kind in job.architecture.layers), job.head]
    split = {Kind.I, Kind.W} & order.kinds
    penalty = job.software.split_penalty if split else 1.0
    found = {
        "kernels": sum(each.forward + penalty * (each.input_grad + each.weight_grad) for each in layers),
        "recompute": sum(each.recompute for each in layers),
        "collectives": sum(each.forward_exposed + each.backward_exposed for each in layers),
        "host": sum(2 * each.host for each in layers) + job.software.constants["microbatch_s"] * job.mesh.pipeline,
    }
    whole = sum(found.values())
    return {name: busiest_s * value / whole for name, value in found.items()}


def _add_rest(job: Job, terms: Terms) -> None:
    """What a step takes beside its schedule, and the loss of many nodes on all of it."""
    closed = step_terms(job)
    before = sum(closed.values()) - closed.get("jitter", 0.0)
    terms |= {name: closed[name] for name in OUTSIDE}
    if "jitter" in closed:
        terms["jitter"] = sum(terms.values()) * closed["jitter"] / before


# --- data parallelism as actions --------------------------------------------------------------------------------


def _with_replicas(job: Job, order: Schedule, graph: Graph, costs: CostTable) -> tuple[Graph, CostTable, float]:
    """The graph with what replicas outside the schedule exchange, its costs, and seconds that follow the step.

    What does not run beside computation, and gathers that an order has no place for, follow the step.
    """
    if job.mesh.replicas == 1 and job.mesh.expert_replicas == 1:
        return graph, costs, 0.0
    partition = order.partition
    assert partition is not None
    up = _exchanged(job, partition.forward)
    down = _exchanged(job, partition.backward)
    parameters, gradients = _lowered(job, order)
    late = _late_s(job, order, up, down, has_place=parameters is not None)
    if not job.software.gradients_beside:
        gradients = None
    if parameters is None and gradients is None:
        return graph, costs, late
    outside = replace(order, shape=replace(order.shape, outer_replicas=max(2, job.mesh.replicas)))
    sharded = build_graph(shard(outside, parameters=parameters, gradients=gradients))
    times = partial(_transfer_time, up, down, costs.units_per_second)
    return sharded, replace(costs, transfer_time=times), late


def _lowered(job: Job, order: Schedule) -> tuple[Per | None, Per | None]:
    """When weights are gathered and gradients reduced; weights None where that follows the step."""
    parameters, gradients = LOWERED[job.mesh.sharing.what]
    if parameters == "visit" and not job.mesh.sharing.reshard:
        parameters = "step"
    has_no_place = order.shape.separate_cuts or order.shape.num_head_shards or not job.software.parameters_beside
    if parameters == "step" and has_no_place:
        parameters = None
    return parameters, gradients


def _late_s(job: Job, order: Schedule, up: tuple[Reduced, ...], down: tuple[Reduced, ...], *, has_place: bool) -> float:
    """Seconds of the rank that waits longest for exchanges which nothing hides."""
    gathers = LOWERED[job.mesh.sharing.what][0] is not None and not has_place
    found = 0.0
    for rank in range(order.shape.num_ranks):
        parts = [part for action in order.compute(rank) for part in parts_of(action)]
        gathered = {part.stage for part in parts if part.kind is Kind.F} if gathers else set()
        backward = {part.stage for part in parts if part.kind in (Kind.B, Kind.W, Kind.FB)}
        summed = set() if job.software.gradients_beside else backward
        seconds = sum(up[stage].parameters for stage in gathered) + sum(down[stage].gradients for stage in summed)
        found = max(found, seconds)
    return found


def _transfer_time(up: tuple[Reduced, ...], down: tuple[Reduced, ...], units: int, cargo: Cargo) -> float | None:
    """Time of a gather or a sum of a stage."""
    found = (down if cargo.backward else up)[cargo.stage]
    seconds = {"P": found.parameters, "G": found.gradients}.get(cargo.object)
    return None if seconds is None else seconds * units


def _exchanged(job: Job, counts: tuple[int, ...]) -> tuple[Reduced, ...]:
    """Seconds of what data parallelism moves of each stage of a cut."""
    last = len(counts) - 1
    found, begin = [], 0
    for stage, count in enumerate(counts):
        layers = job.architecture.layers[begin : begin + count]
        kinds: list[tuple[Layer, int]] = [(kind, layers.count(kind)) for kind in dict.fromkeys(layers)]
        found.append(reduced(job, held_layers(job, kinds, first=stage == 0, last=stage == last)))
        begin += count
    return tuple(found)
