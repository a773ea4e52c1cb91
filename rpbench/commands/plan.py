"""`plan`: partitions of one model side by side, or stages and replicas by PipeDream's partitioner."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

from omegaconf import MISSING

from rpbench.config.choices import ConfigError, typed
from rpbench.config.errors import config_errors
from rpbench.config.request import Request
from rpbench.config.without_effect import check_without_effect
from rpbench.cost.footprint.memory import classes_of, why_infeasible
from rpbench.cost.layer_graph import LayerGraph, from_csv
from rpbench.passes.recomputation import kept_layers
from rpbench.plan import METHODS, Choice, choose, pipedream
from rpbench.plan.graph_cuts import Cuts, cuts_of
from rpbench.plan.problem import Problem
from rpbench.records.describe import clock
from rpbench.registry import check_known, unknown_name
from rpbench.run.assemble import built, check_built, pose
from rpbench.run.scheduled import host_misfit
from rpbench.sim.graph import Graph
from rpbench.sim.memory import peak_in_flight
from rpbench.sim.metrics import measure
from rpbench.sim.shared_links import simulate_charged
from rpbench.whole_file import read_text


def compare_plans(request: Request) -> dict[str, Any]:
    """The plan of every method, the best that fits first, and why others cannot be used; ValueError if none can."""
    if (file := request.schedule.file) is not None:
        raise ConfigError(
            f"schedule_file={file.path}: nothing searches a cut for an order of a file; plan a schedule by its name, "
            "as in schedule=1f1b"
        )
    check_without_effect(request, "plan")
    problem = pose(request)
    given = () if request.partition in METHODS else (request.partition,)  # written out: one more beside the methods'
    plans = [_plan_facts(request, problem, choose(cut, problem)) for cut in given]
    refused: dict[str, str] = {}
    for method in METHODS:
        try:
            plans.append(_plan_facts(request, problem, choose(method, problem)))
        except ValueError as error:
            refused[method] = str(error)
    if not plans:
        raise ValueError("; ".join(dict.fromkeys(refused.values())))
    plans.sort(key=lambda plan: (plan["reason"] is not None, float(plan["makespan_s"])))
    return {
        "schedule": problem.entry.name,
        "model": request.model_name,
        "cluster": request.cluster.name,
        "num_devices": problem.num_ranks,
        "num_microbatches": request.asked_microbatches,
        "clock": clock({"cost": request.cost.name, "evidence": "simulated"}),
        "best": plans[0]["method"] if plans[0]["reason"] is None else None,
        "plans": plans,
        "refused": refused,
    }


def _plan_facts(request: Request, problem: Problem, choice: Choice) -> dict[str, Any]:
    graph, _, keeps = built(problem, choice, request.dispatch, partial(check_built, request))
    costs = replace(problem, keeps=keeps or ()).charged(graph.schedule)
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
        "reason": _why_not(request, problem, choice, graph, keeps),
        **({} if choice.proven is None else {"proven": choice.proven}),
        **graph.schedule.told,
    }


def _why_not(
    request: Request, problem: Problem, choice: Choice, graph: Graph, keeps: tuple[int, ...] | None
) -> str | None:
    """Why a run of the plan would be infeasible; None where it fits, or its bytes or the memory are unknown."""
    if problem.memory is None:
        return None
    if problem.keeps_last:
        keeps = kept_layers(choice.partition, "except_last")
    schedule, sizes = graph.schedule, problem.memory.sizes
    classes = classes_of(schedule, sizes, peak_in_flight(graph), keeps, graph.analysis)
    on_device = why_infeasible(schedule, classes, problem.memory.limit_bytes)
    return on_device or host_misfit(schedule, sizes, request.cluster, graph.analysis, keeps) or None


@dataclass
class PartitionRequest:
    """Keys of the verb; `num_machines` is short for one level of `machines_per_level`."""

    plan: str = MISSING
    profile: str = ""
    edges: str = ""
    num_machines: int | None = None
    machines_per_level: list[int] = field(default_factory=list)
    bandwidth_bytes_per_s: list[float] = field(default_factory=list)
    count_p2p: bool = False
    straight: bool = False
    use_fewer_machines: bool = False
    memory_bytes: float | None = None


LISTS = ("machines_per_level", "bandwidth_bytes_per_s")


def partition_profile(arguments: Sequence[str]) -> dict[str, Any]:
    """PipeDream's pipeline for a profile with its predictions, as JSON-ready data.

    Arguments are `key=value` with the fields of `PartitionRequest`; ValueError if they or the profile are wrong.
    """
    request = _request(arguments)
    network = _network(request)
    rules = pipedream.Rules(request.count_p2p, request.straight, request.use_fewer_machines, request.memory_bytes)
    cuts = cuts_of(_graph(request))
    if pipedream.one_machine_time_s(cuts) <= 0:
        raise ConfigError(f"profile={request.profile}: no layer takes any time, there is nothing to share out")
    pipeline = pipedream.plan_pipeline(cuts, network, rules)
    answer = {
        "plan": request.plan,
        "profile": request.profile,
        "edges": request.edges,
        "machines_per_level": list(network.machines_per_level),
        "bandwidth_bytes_per_s": list(network.bandwidth_bytes_per_s),
        **asdict(rules),
        "num_layers": len(cuts.graph.layers),
        "evidence": "predicted",
    }
    if pipeline is None:
        return answer | {"status": "infeasible", "reason": _why_none(cuts, network, rules)}
    return answer | _verdict(cuts, pipeline, rules) | _facts(cuts, network, pipeline)


def _request(arguments: Sequence[str]) -> PartitionRequest:
    given: dict[str, Any] = {}
    known = [key.name for key in fields(PartitionRequest)]
    for item in arguments:
        key, equals, value = item.partition("=")
        if not equals:
            raise ConfigError(f"cannot read {item!r}: write key=value; keys of a profile's plan: {', '.join(known)}")
        check_known("key", key, known)
        given[key] = [cell.strip() for cell in value.strip("[]").split(",")] if key in LISTS else value
    request = typed(PartitionRequest, given)
    if request.plan != "pipedream":
        raise ConfigError(unknown_name("plan", request.plan, ["pipedream"]))
    for key in ("profile", "edges", "bandwidth_bytes_per_s"):
        if not getattr(request, key):
            raise ConfigError(
                f"{key}= is missing, as in: plan plan=pipedream profile=nodes.csv edges=edges.csv num_machines=16 "
                "bandwidth_bytes_per_s=1.25e9"
            )
    return request


def _network(request: PartitionRequest) -> pipedream.Network:
    num, levels = request.num_machines, request.machines_per_level
    if num is None and not levels:
        raise ConfigError("num_machines= or machines_per_level= is missing, as in num_machines=16")
    if num is not None and num < 1:
        raise ConfigError(f"num_machines={num}: a whole number of at least 1")
    if num is not None and levels and prod(levels) != num:
        raise ConfigError(
            f"num_machines={num} and machines_per_level={levels}, which are {prod(levels)}: "
            "the levels multiply to the number of machines; give one of the two"
        )
    if not levels and len(request.bandwidth_bytes_per_s) > 1:
        raise ConfigError(
            f"num_machines={num} is one level, bandwidth_bytes_per_s has {len(request.bandwidth_bytes_per_s)}: "
            "give machines_per_level, as in machines_per_level=[4,4]"
        )
    return pipedream.Network(tuple(levels or [num or 1]), tuple(request.bandwidth_bytes_per_s))


def _graph(request: PartitionRequest) -> LayerGraph:
    nodes, edges = _text("profile", request.profile), _text("edges", request.edges)
    with config_errors(f"profile={request.profile} edges={request.edges}: "):
        return from_csv(nodes, edges).without_inputs()


def _text(key: str, path: str) -> str:
    try:
        return read_text(Path(path))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{key}={path} cannot be read: {reason}") from None


def _why_none(cuts: Cuts, network: pipedream.Network, rules: pipedream.Rules) -> str:
    if rules.straight and network.num_machines > len(cuts.graph.layers):
        return (
            f"a straight pipeline over {network.num_machines} machines needs as many layers, the profile has "
            f"{len(cuts.graph.layers)}; take fewer machines, or use_fewer_machines=true"
        )
    return (
        f"no pipeline fits into memory_bytes={rules.memory_bytes:.6g} a machine; take more machines"
        if rules.memory_bytes is not None
        else "no pipeline uses all machines; take fewer, or use_fewer_machines=true"
    )


def _verdict(cuts: Cuts, pipeline: pipedream.Pipeline, rules: pipedream.Rules) -> dict[str, Any]:
    """Whether the whole pipeline fits: the planner checks the memory of each level alone."""
    needed = pipedream.stage_bytes(cuts, pipeline)
    worst = max(range(len(needed)), key=lambda stage: needed[stage])
    if rules.memory_bytes is None or needed[worst] <= rules.memory_bytes:
        return {"status": "ok", "reason": None}
    return {
        "status": "infeasible",
        "reason": f"each level fits alone, but all together stage {worst} needs {needed[worst]:.6g} bytes "
        f"and has {rules.memory_bytes:.6g}",
    }


def _facts(cuts: Cuts, network: pipedream.Network, pipeline: pipedream.Pipeline) -> dict[str, Any]:
    one, all_reduced = pipedream.one_machine_time_s(cuts), pipedream.data_parallel_time_s(cuts, network)
    sent = pipedream.traffic(cuts, network, pipeline)
    return {
        "replicas": [stage.replicas for stage in pipeline.stages],
        "ranges": [[stage.first, stage.last] for stage in pipeline.stages],
        "stages": [
            {
                "range": [stage.first, stage.last],
                "layers": cuts.layers_between(stage.first, stage.last),
                "replicas": stage.replicas,
                "replicas_per_level": list(stage.replicas_per_level),
                "compute_s": float(cuts.time_s[stage.first, stage.last]),
                "parameter_bytes": float(cuts.parameter_bytes[stage.first, stage.last]),
                "output_bytes": float(cuts.output_bytes[stage.last]),
                "weight_versions": versions,
                "memory_bytes": needed,
            }
            for stage, versions, needed in zip(
                pipeline.stages, pipedream.weight_versions(pipeline), pipedream.stage_bytes(cuts, pipeline), strict=True
            )
        ],
        "num_machines_used": sum(stage.replicas for stage in pipeline.stages),
        "minibatch_time_s": pipeline.time_s,
        "one_machine_time_s": one,
        "data_parallel_time_s": all_reduced,
        "over_one_machine": one / pipeline.time_s,
        "over_data_parallel": all_reduced / pipeline.time_s,
        "boundary_bytes": sent.boundary,
        "all_reduce_bytes": sent.all_reduce,
        "data_parallel_bytes": sent.data_parallel,
        "communication_saved": sent.saved,
        "communication_saved_at_boundaries": sent.saved_at_boundaries,
        "communication_saved_at_most": sent.saved_at_most,
    }
