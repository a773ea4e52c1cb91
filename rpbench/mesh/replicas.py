"""Replicas: a simulated step of devices that exchange states and nothing else.

Gradients are scattered after every backward, layer by layer: every layer is a stage, with the order and the actions of
`zero_2` and `zero_3`. Reductions once a step go in buckets that are no layers, so `rpbench.mesh.step` has closed forms
for them. With 2 layers and 2 microbatches under ZeRO-2:

    compute   0F0 1F0 1B0 0B0                                0F1 1F1 1B1 0B1
    net       0UNSHARD 1UNSHARD | 1REDUCE_GRAD 0REDUCE_GRAD | 1REDUCE_GRAD 0REDUCE_GRAD
"""

from dataclasses import replace
from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np

from rpbench.cost.table import CostTable
from rpbench.cost.transfers import slowed_by_exchanges
from rpbench.ir.partition import symmetric
from rpbench.ir.schedule import Shape
from rpbench.ir.timeline import Timeline
from rpbench.mesh.data_parallel import LOWERED, exchanged, late_s, lowered, transfer_time
from rpbench.mesh.job import Job
from rpbench.mesh.layers.layer_times import as_times, lost_s
from rpbench.mesh.step import Terms
from rpbench.passes.offload import Per, shard
from rpbench.registry import entry
from rpbench.sim.graph import Graph, build_graph
from rpbench.sim.longest_path import simulate_graph


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
