"""Partitions that the tests of plans compare: each with its simulated makespan and its fit into memory."""

from dataclasses import dataclass

from rpbench.cost.footprint.memory import classes_of, why_infeasible
from rpbench.ir.partition import Partition
from rpbench.passes.recomputation import kept_layers
from rpbench.plan import BUDGET, Problem, choose
from rpbench.plan.contest.frame import makespan
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


def plan(method: str, problem: Problem, *, budget: int = BUDGET) -> Plan:
    """The partition of a method with its simulated makespan; arguments and errors as of `choose`."""
    chosen = choose(method, problem, budget=budget)
    return evaluate(problem, chosen.partition, method=chosen.method, num_evaluated=max(1, chosen.num_evaluated))
