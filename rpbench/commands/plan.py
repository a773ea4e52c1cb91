"""`plan`: partitions of one model for one schedule, side by side."""

from typing import Any

from rpbench.config.request import Request
from rpbench.plan import METHODS, Choice, choose
from rpbench.plan.problem import Problem
from rpbench.records.clock import clock
from rpbench.run.assemble import build_schedule, pose
from rpbench.sim.checked import checked_graph
from rpbench.sim.metrics import measure
from rpbench.sim.shared_links.links import simulate_charged


def compare_plans(request: Request) -> dict[str, Any]:
    """The plans of every method, the best first; a method that cannot be used says why.

    Raises:
        ValueError: if the request is wrong whatever the method.
    """
    problem = pose(request)
    plans: list[dict[str, Any]] = []
    refused: dict[str, str] = {}
    for method in METHODS:
        try:
            plans.append(_facts(problem, choose(method, problem)))
        except ValueError as error:
            refused[method] = str(error)
    if not plans:
        raise ValueError("; ".join(refused.values()))
    plans.sort(key=lambda plan: float(plan["makespan_s"]))
    return {
        "schedule": problem.entry.name,
        "model": request.model_name,
        "cluster": request.cluster.name,
        "num_devices": problem.num_ranks,
        "num_microbatches": request.asked_microbatches,
        "clock": clock({"cost": request.cost.name, "evidence": "simulated"}),
        "best": plans[0]["method"],
        "plans": plans,
        "refused": refused,
    }


def _facts(problem: Problem, choice: Choice) -> dict[str, Any]:
    schedule = build_schedule(problem, choice, problem.costs(choice.partition))
    graph, _ = checked_graph(schedule)
    costs = problem.charged(schedule)
    after_last = problem.entry.switch_after_last_forward
    metrics = measure(graph, simulate_charged(graph, costs), costs, switch_after_last_forward=after_last)
    return {
        "method": choice.method,
        "partition": str(choice.partition),
        "num_stages": len(choice.partition.forward),
        "num_backward_stages": len(choice.partition.backward),
        "makespan_s": metrics["makespan_s"],
        "bubble_makespan": metrics["bubble_makespan"],
        "num_plans_evaluated": choice.num_evaluated,
        **({} if choice.proven is None else {"proven": choice.proven}),
        **schedule.told,
    }
