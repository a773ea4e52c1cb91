"""Config -> everything a run works on: model, cluster, costs, partition and the checked schedule."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rpbench import registry
from rpbench.cost.constant import constant_times, unit_times
from rpbench.cost.hardware import Cluster
from rpbench.cost.memory import DeviceMemory
from rpbench.cost.model import Model
from rpbench.cost.published import published_partition, published_times, published_tokens_per_microbatch
from rpbench.cost.table import CostTable, LayerTimes
from rpbench.harness.config import ConfigError, CostConfig, RunConfig, WorkloadConfig, typed
from rpbench.ir.check import check
from rpbench.ir.lower import add_steps
from rpbench.ir.schedule import Schedule, Shape, Weights, from_text
from rpbench.plan import Plan, Problem, make_plan
from rpbench.registry import Entry, unknown_name
from rpbench.sim.events import deal


@dataclass(frozen=True)
class Assembled:
    """A run, ready to be simulated or executed."""

    entry: Entry | None  # None for a schedule read from a file
    schedule: Schedule
    costs: CostTable
    plan: Plan
    model: Model | None
    cluster: Cluster
    memory: DeviceMemory | None
    tokens_per_microbatch: int | None


def assemble(config: RunConfig) -> Assembled:
    """Everything a run needs, checked.

    Raises:
        ValueError: for whatever in the request cannot be; nothing has been written by then.
    """
    cost = typed(CostConfig, config.cost)
    if config.schedule_file:
        return _from_file(config, cost)
    problem, model, cluster = pose(config)
    plan = make_plan(config.partition, problem)
    costs = problem.costs(plan.partition)
    return Assembled(
        problem.entry,
        build_schedule(problem, plan, costs, config.dispatch),
        costs,
        plan,
        model,
        cluster,
        problem.memory,
        _tokens_per_microbatch(config, cost, model),
    )


def pose(config: RunConfig) -> tuple[Problem, Model | None, Cluster]:
    """The planning problem of a configuration: what is to be cut, for which schedule, at which costs.

    Raises:
        ValueError: for a size, a name or a combination that cannot be.
    """
    entry = registry.entry(config.schedule["name"])
    cost = typed(CostConfig, config.cost)
    _check_sizes(config)
    cluster = Cluster(**config.cluster)
    if cluster.num_devices is not None and config.num_devices > cluster.num_devices:
        raise ConfigError(
            f"num_devices={config.num_devices}: cluster {cluster.name} has {cluster.num_devices}; "
            "ask for fewer, or use cluster=local"
        )
    model = None if config.model["name"] == "abstract" else Model(**config.model)
    chunks = _chunks(config, entry)
    published_name = (model.published_name if model else None) or ""
    published = None
    if config.partition == "published" or (config.partition == "search" and cost.name == "published"):
        published = published_partition(entry.name, published_name)
    problem = Problem(
        entry=entry,
        times=_layer_times(config, cost, model, chunks),
        num_ranks=config.num_devices,
        num_microbatches=config.num_microbatches,
        num_steps=config.num_steps,
        chunks_per_rank=config.chunks_per_device if published else chunks,
        options={key: value for key, value in config.schedule.items() if key != "name"},
        recompute_ahead=entry.recompute_ahead if cost.recompute_ahead is None else cost.recompute_ahead,
        fused_ahead=cost.fused_ahead,
        published=published,
        memory=_device_memory(config, model, cluster),
    )
    return problem, model, cluster


def build_schedule(problem: Problem, plan: Plan, costs: CostTable, dispatch: str = "round_robin") -> Schedule:
    """The checked schedule of a plan, dealt as asked, with optimizer steps where several follow each other."""
    shape = problem.shape(plan.partition)
    schedule = problem.entry.build(shape, **problem.options).with_partition(plan.partition)
    schedule = deal(schedule, costs, dispatch)
    if shape.num_steps > 1:
        schedule = add_steps(schedule, lane="host" if schedule.weights is Weights.STREAMED else "compute")
    check(schedule)
    return schedule


def _check_sizes(config: RunConfig) -> None:
    for name in ("num_devices", "num_microbatches", "num_steps", "chunks_per_device"):
        value = getattr(config, name)
        if value is not None and value < 1:
            raise ConfigError(f"{name}={value}: a whole number of at least 1")
    if config.backend["name"] != "sim":
        raise ConfigError(unknown_name("backend", config.backend["name"], ["sim", "roofline"]))


def _chunks(config: RunConfig, entry: Entry) -> int:
    return config.chunks_per_device or (2 if entry.looped else 1)


def _layer_times(config: RunConfig, cost: CostConfig, model: Model | None, chunks: int) -> LayerTimes:
    if cost.name == "published":
        return published_times((model.published_name if model else None) or "")
    num_layers = model.num_layers if model else config.model.get("num_layers") or config.num_devices * chunks
    if num_layers < 1:
        raise ConfigError(f"model.num_layers={num_layers}: a whole number of at least 1")
    if cost.name == "unit":
        return unit_times(num_layers)
    return constant_times(
        num_layers,
        config.num_devices,
        forward_ms=cost.forward_ms,
        input_grad_ms=cost.input_grad_ms,
        weight_grad_ms=cost.weight_grad_ms,
        recompute_ms=cost.recompute_ms,
        hop_ms=cost.hop_ms,
    )


def _tokens_per_microbatch(config: RunConfig, cost: CostConfig, model: Model | None) -> int | None:
    if model is None:
        return None
    workload = typed(WorkloadConfig, config.workload)
    if workload.microbatch_sequences < 1:
        raise ConfigError(f"workload.microbatch_sequences={workload.microbatch_sequences}: at least 1")
    tokens = workload.microbatch_sequences * model.seq_len
    if cost.name == "published" and tokens != published_tokens_per_microbatch(model.published_name or ""):
        raise ConfigError(
            f"workload.microbatch_sequences={workload.microbatch_sequences} of {model.seq_len} tokens: the published "
            "timings are of 4 sequences of 2048 tokens; leave both alone, or use cost=constant"
        )
    return tokens


def _device_memory(config: RunConfig, model: Model | None, cluster: Cluster) -> DeviceMemory | None:
    if model is None:
        return None
    workload = typed(WorkloadConfig, config.workload)
    return DeviceMemory(model, workload.microbatch_sequences * model.seq_len, cluster.device_memory_bytes)


def _from_file(config: RunConfig, cost: CostConfig) -> Assembled:
    path = Path(config.schedule_file or "")
    try:
        schedule = from_text(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"schedule_file={path}: cannot be read ({error.__class__.__name__}); give a text file") from None
    check(schedule)
    raise NotImplementedError


def summary(assembled: Assembled) -> dict[str, Any]:
    """What the plan decided, for the record."""
    return {"partition_layers": str(assembled.plan.partition), "num_plans_evaluated": assembled.plan.num_evaluated}
