"""Plan: a partition with its simulated makespan."""

from dataclasses import dataclass

import numpy as np

from rpbench.cost.footprint.memory import classes_of, why_infeasible
from rpbench.ir.partition import Partition
from rpbench.ir.timeline import Timeline
from rpbench.passes.recomputation import kept_layers
from rpbench.plan.problem import Problem
from rpbench.sim.graph import Graph, build_graph
from rpbench.sim.memory import peak_in_flight
from rpbench.sim.shared_links import simulate_charged


@dataclass(frozen=True)
class Plan:
    """A partition with its simulated makespan and its fit into memory."""

    partition: Partition
    makespan: float  # in the unit of the problem's layer times
    num_evaluated: int  # partitions simulated to find it
    method: str
    infeasible: str = ""  # why it does not fit into a device's memory; empty if it does, or if no memory is known


def graph_of(problem: Problem, partition: Partition) -> Graph:
    """The action graph of the schedule that would run; ValueError if the partition does not suit the problem."""
    return build_graph(problem.finished(problem.order(partition)))


def evaluate(problem: Problem, partition: Partition, *, method: str, num_evaluated: int = 1) -> Plan:
    """The partition with its simulated makespan and its fit into memory; ValueError as `graph_of`."""
    graph = graph_of(problem, partition)
    found = makespan(simulate_charged(graph, problem.charged(graph.schedule)))
    infeasible, memory = "", problem.memory
    if memory is not None:
        keeps = kept_layers(partition, "except_last") if problem.keeps_last else None
        classes = classes_of(graph.schedule, memory.sizes, peak_in_flight(graph), keeps)
        infeasible = why_infeasible(graph.schedule, classes, memory.limit_bytes)
    return Plan(partition, found, num_evaluated, method, infeasible)


def makespan(timeline: Timeline) -> float:
    """The last end, in the unit of the costs, without actions that take no time."""
    start, end = np.asarray(timeline.start, float), np.asarray(timeline.end, float)
    return float(end[end > start].max(initial=0.0))
