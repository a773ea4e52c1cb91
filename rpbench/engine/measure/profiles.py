"""Profiles: the times of a run's actions as costs to simulate; the times and bytes of every module on one core.

Modules run as in the engine, one after another, the whole model several times, so that other load of the machine falls
on all of them. Times are CPU time of the one thread that computes: waiting for the processor is not counted.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from statistics import median
from typing import NamedTuple

import torch

from rpbench.cost.layer_graph import Layer, LayerGraph, chain
from rpbench.cost.table import CostTable, Work, members_of
from rpbench.engine.backends.threads import one_thread
from rpbench.engine.compute.stage import Shells, Stages, backward
from rpbench.engine.state.weights import Weights
from rpbench.engine.workload import Workload
from rpbench.ir.action import Kind
from rpbench.ir.timeline import Timeline
from rpbench.models.data import Batch


def measured_costs(timeline: Timeline, *, recompute_ahead: bool, hop_s: float = 0.0) -> CostTable:
    """The median time of every kind and stage over its microbatches, in seconds.

    An action that ran only together with another has the time of both less that of the other.
    """
    times: dict[tuple[Kind, int], list[tuple[float, float]]] = {}  # what runs ahead, and the main phase
    shape = timeline.schedule.shape
    unit = timeline.units_per_second / shape.num_parts  # costs are those of whole microbatches
    spans = list(timeline.spans())
    for span in (span for span in spans if not span.action.sub):
        phases = (span.main - span.start) / unit, (span.end - span.main) / unit
        times.setdefault((span.action.kind, span.action.stage), []).append(phases)
    alone = {place: sum(map(median, zip(*found, strict=True))) for place, found in times.items()}
    for span in (span for span in spans if span.action.sub):
        places = members_of(span.action)
        new = [place for place in places if place not in alone]
        if len(new) == 1:
            known = sum(alone[place] for place in places if place in alone)
            times.setdefault(new[0], []).append((0.0, max(0.0, (span.end - span.start) / unit - known)))
    num_stages = max(shape.num_stages, shape.num_backward_stages)
    work: dict[Kind, list[Work]] = {}
    for (kind, stage), found in sorted(times.items()):
        ahead, main = map(median, zip(*found, strict=True))
        work.setdefault(kind, [Work(0.0)] * num_stages)[stage] = Work(main, ahead, ahead)
    return CostTable({kind: tuple(works) for kind, works in work.items()}, hop_s, recompute_ahead)


Progress = Callable[[int], None]

DECIMALS = 6  # of a millisecond


class OneBatch(NamedTuple):
    """Data whose microbatches are all one batch in memory: making data is not part of a layer's time."""

    batch: Batch

    def microbatch(self, step: int, microbatch: int) -> Batch:
        return self.batch


def profile_layers(
    workload: Workload, *, num_warmups: int = 2, num_runs: int = 10, on_run: Progress | None = None
) -> LayerGraph:
    """The modules of a model as a chain of profiled layers: medians over runs of one microbatch, warm-ups apart.

    `parameter_bytes` are those of trainable parameters: frozen ones have no gradient to add up and no versions.
    `on_run` gets the number of runs that are over, warm-ups included. Raises ValueError if no run is to be counted.
    """
    if num_runs < 1 or num_warmups < 0:
        raise ValueError(f"num_runs={num_runs}, num_warmups={num_warmups}: at least 1 run is counted")
    workload = replace(workload, data=OneBatch(workload.batch(0)))
    stages = Stages(workload, Weights(workload, {}), Shells(workload.modules))
    runs = []
    with one_thread():  # as the engine has it: one core a device
        for number in range(num_warmups + num_runs):
            runs.append(_run(stages, workload))
            if on_run is not None:
                on_run(number + 1)
    return chain(
        [_layer(workload, index, visits) for index, visits in enumerate(zip(*runs[num_warmups:], strict=True))]
    )


class _Visit(NamedTuple):
    """One module's forward and backward, in seconds, and the bytes of its output."""

    forward_s: float
    backward_s: float
    output_bytes: int


def _run(stages: Stages, workload: Workload) -> list[_Visit]:
    """Every module forward and back once, each from the output of the one before."""
    x, visits = workload.batch(0).tokens, []
    for module in range(len(workload.modules)):
        began = time.thread_time()
        graph = stages.graph(range(module, module + 1), x, (0, 0), 0)
        forward_s = time.thread_time() - began
        x = graph.end.detach()
        grad = None if x.dim() == 0 else torch.ones_like(x)
        began = time.thread_time()
        backward(graph, grad)
        visits.append(_Visit(forward_s, time.thread_time() - began, x.nbytes))
    return visits


def _layer(workload: Workload, index: int, visits: tuple[_Visit, ...]) -> Layer:
    module = workload.modules[index]
    return Layer(
        f"node{index + 1}",
        type(module).__name__,
        round(1000 * median(visit.forward_s for visit in visits), DECIMALS),
        round(1000 * median(visit.backward_s for visit in visits), DECIMALS),
        visits[0].output_bytes,
        sum(parameter.nbytes for parameter in module.parameters() if parameter.requires_grad),
    )
