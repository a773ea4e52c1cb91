"""Config -> everything a run works on: model, cluster, costs, partition and the checked schedule."""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from rpbench import registry
from rpbench.cost.activations import UNKNOWN, layer_activations
from rpbench.cost.analytic import analytic_times
from rpbench.cost.basis import make_basis
from rpbench.cost.constant import constant_times, unit_times
from rpbench.cost.engine_times import engine_times
from rpbench.cost.halves import with_halves
from rpbench.cost.hardware import Cluster
from rpbench.cost.measured import has_engine
from rpbench.cost.model import Model
from rpbench.cost.published import published_partition, published_times, published_tokens_per_microbatch
from rpbench.cost.sizes import DeviceMemory, ModelBytes, model_bytes
from rpbench.cost.table import CostTable, LayerTimes
from rpbench.cost.traffic import Traffic
from rpbench.cost.transfers import TransferTimes
from rpbench.harness.charging import check_charge, traffic_of, with_charges
from rpbench.harness.config import ConfigError, CostConfig, RunConfig, WorkloadConfig, typed
from rpbench.harness.offloading import check_sizes, with_offload
from rpbench.ir.moves import has_transfers
from rpbench.ir.partition import Partition, symmetric
from rpbench.ir.schedule import Schedule, from_text
from rpbench.ir.versions import Versions
from rpbench.passes.lower import add_steps
from rpbench.passes.recomputation import RECOMPUTES, check_recompute
from rpbench.plan import Choice, choose
from rpbench.plan.problem import Problem
from rpbench.registry import Entry
from rpbench.sim.checked import checked_graph
from rpbench.sim.events import deal
from rpbench.sim.graph import Graph


@dataclass(frozen=True)
class Assembled:
    """A run, ready to be simulated or executed."""

    entry: Entry | None  # None for a schedule read from a file
    schedule: Schedule
    graph: Graph
    versions: Versions
    costs: CostTable
    choice: Choice
    model: Model | None
    cluster: Cluster
    sizes: ModelBytes | None  # bytes of the model's layers, when it has a shape
    tokens_per_microbatch: int | None
    transfers: TransferTimes | None = None  # of a schedule with LOADs and the like
    profile: LayerTimes | None = None  # measured layer times, to be kept beside the record
    evidence: str = "simulated"  # predicted, where the costs themselves are from a model of the machine

    @property
    def switch_after_last_forward(self) -> bool:
        """How the artifact's switch time is counted for this schedule; see `registry.Entry`."""
        return self.entry is not None and self.entry.switch_after_last_forward

    @property
    def tokens_per_step(self) -> int | None:
        """Tokens behind one optimizer step, for a model with sequences."""
        tokens = self.tokens_per_microbatch
        return None if tokens is None else tokens * self.schedule.shape.num_microbatches


def assemble(config: RunConfig) -> Assembled:
    """Everything a run needs, checked.

    Raises:
        ValueError: for whatever in the request cannot be; nothing has been written by then.
    """
    cost = typed(CostConfig, config.cost)
    if config.schedule_file:
        return _from_file(config, cost)
    problem, model, cluster = pose(config)
    choice = choose(config.partition, problem)
    costs = problem.costs(choice.partition)
    schedule = build_schedule(problem, choice, costs, config.dispatch)
    sizes = _model_bytes(config, model)
    if config.offload != "none":
        check_sizes(schedule, sizes)
    check_recompute(schedule, config.recompute)  # type: ignore[arg-type]  # one of them, or pose() had refused
    costs = problem.charged(schedule)
    graph, versions = checked_graph(schedule)
    return Assembled(
        problem.entry,
        schedule,
        graph,
        versions,
        costs,
        choice,
        model,
        cluster,
        sizes,
        _tokens_per_microbatch(config, model),
        transfers_of(costs),
        profile=problem.times if cost.name == "profiled" else None,
        evidence=_evidence(cost),
    )


def transfers_of(costs: CostTable) -> TransferTimes | None:
    """The times of transfers that costs have been charged with."""
    return costs.transfer_time if isinstance(costs.transfer_time, TransferTimes) else None


def pose(config: RunConfig) -> tuple[Problem, Model | None, Cluster]:
    """The planning problem of a configuration: what is to be cut, for which schedule, at which costs.

    Raises:
        ValueError: for a size, a name or a combination that cannot be.
    """
    entry = registry.entry(config.schedule["name"])
    cost = typed(CostConfig, config.cost)
    _check_sizes(config)
    if config.recompute not in RECOMPUTES:
        raise ConfigError(f"recompute={config.recompute}: one of {', '.join(RECOMPUTES)}")
    if config.recompute != "all" and config.backend["name"] == "duel":
        raise ConfigError(
            f"recompute={config.recompute} with backend=duel: it has a key of its own; set backend.recompute"
        )
    check_charge(config.charge, config.offload, entry, config.backend["name"])
    cluster = Cluster(**config.cluster)
    if cluster.num_devices is not None and config.num_devices > cluster.num_devices:
        raise ConfigError(
            f"num_devices={config.num_devices}: cluster {cluster.name} has {cluster.num_devices}; "
            "ask for fewer, or use cluster=local"
        )
    model = None if config.model["name"] == "abstract" else Model(**config.model)
    _check_workload(config, cost, model)
    sizes = _model_bytes(config, model)
    problem = Problem(
        entry=entry,
        times=_layer_times(config, cost, model, entry, cluster),
        num_ranks=config.num_devices,
        num_microbatches=config.num_microbatches,
        num_steps=config.num_steps,
        chunks_per_rank=config.chunks_per_device,
        options={key: value for key, value in config.schedule.items() if key != "name"},
        keeps_last=config.recompute == "except_last",
        recompute_ahead=entry.recompute_ahead if cost.recompute_ahead is None else cost.recompute_ahead,
        fused_ahead=cost.fused_ahead,
        published=_published(config, cost, entry, model),
        memory=DeviceMemory(sizes, cluster.device_memory_bytes) if sizes and cluster.device_memory_bytes else None,
        activations=layer_activations(model, _tokens_per_microbatch(config, model) or 0) if model else UNKNOWN,
        finish=partial(_finished, config, entry, cluster),
        traffic=_traffic(config, cost, entry, cluster, sizes),
    )
    return problem, model, cluster


def _published(config: RunConfig, cost: CostConfig, entry: Entry, model: Model | None) -> Partition | None:
    """The published partition: an error without one if it is asked for, otherwise a start for other methods."""
    name = (model.published_name if model else None) or ""
    if config.partition == "published":
        return published_partition(entry.name, name)
    if cost.name != "published":
        return None
    try:
        return published_partition(entry.name, name)
    except ValueError:
        return None


def _traffic(
    config: RunConfig, cost: CostConfig, entry: Entry, cluster: Cluster, sizes: ModelBytes | None
) -> Traffic | None:
    """What is charged for transfers; None for a run without any, or whose bytes nobody knows."""
    if sizes is None and config.charge == "bytes":
        raise ConfigError("charge=bytes: bytes follow from the model; take one with a shape, such as model=qwen3_1p7b")
    if sizes is None or (config.charge == "hops" and config.offload == "none" and entry.lower is None):
        return None
    boundaries = config.offload in ("all", "auto") or entry.lower is not None
    return traffic_of(config.charge, cost, cluster, sizes, boundaries=boundaries)


def _finished(config: RunConfig, entry: Entry, cluster: Cluster, order: Schedule) -> Schedule:
    """What runs of an order: with steps where several follow each other, and the transfers that are asked for.

    Methods that move weights or gradients say themselves what they move.
    """
    if entry.lower is not None:
        options = {key: value for key, value in config.schedule.items() if key != "name"}
        schedule = entry.lower(order, prefetch=config.prefetch, **options)
    else:
        charged = config.charge == "bytes"
        schedule = add_steps(order) if order.shape.num_steps > 1 or charged else order
    schedule = with_offload(config.offload, config.prefetch, schedule)
    return with_charges(schedule, cluster) if config.charge == "bytes" else schedule


def build_schedule(problem: Problem, choice: Choice, costs: CostTable, dispatch: str = "round_robin") -> Schedule:
    """The schedule of a partition, dealt as asked, with its steps and transfers."""
    return problem.finished(deal(choice.schedule or problem.order(choice.partition), costs, dispatch))


def _check_sizes(config: RunConfig) -> None:
    for name in ("num_devices", "num_microbatches", "num_steps", "chunks_per_device"):
        value = getattr(config, name)
        if value is not None and value < 1:
            raise ConfigError(f"{name}={value}: a whole number of at least 1")


def _layer_times(
    config: RunConfig, cost: CostConfig, model: Model | None, entry: Entry, cluster: Cluster
) -> LayerTimes:
    """Times of the model's layers on the cluster's devices, which may differ in speed."""
    if not 0 <= cost.overlap_gain <= 1:
        raise ConfigError(f"cost.overlap_gain={cost.overlap_gain}: a share, from 0 (nothing is hidden) to 1 (all is)")
    times = _times_of_source(config, cost, model, entry, cluster)
    if config.recompute == "none":
        times = replace(times, recompute=[0] * times.num_layers)
    return replace(times, overlap_gain=cost.overlap_gain, speeds=cluster.speeds_of(config.num_devices))


def _evidence(cost: CostConfig) -> str:
    return "predicted" if cost.name == "analytic" else "simulated"


def _times_of_source(
    config: RunConfig, cost: CostConfig, model: Model | None, entry: Entry, cluster: Cluster
) -> LayerTimes:
    if cost.name == "analytic":
        if model is None:
            raise ConfigError("cost=analytic follows from a model's shape; choose one, as in model=qwen3_1p7b")
        tokens = _tokens_per_microbatch(config, model) or 0
        basis = make_basis(cluster, cost.constants, cost.declared)
        return (engine_times if has_engine(cluster.measured) else analytic_times)(model, tokens, basis)
    if cost.name == "published":
        times = published_times((model.published_name if model else None) or "")
        return with_halves(times, model) if cost.split_backward and model else times
    if cost.name == "profiled":
        from rpbench.harness.layer_times import profiled_times  # torch, where a profile is not read from a file

        return profiled_times(config, cost, model)
    chunks = config.chunks_per_device or entry.chunks or (2 if entry.looped else 1)
    num_layers = model.num_layers if model else config.model.get("num_layers") or config.num_devices * chunks
    if not isinstance(num_layers, int) or num_layers < 1:
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
        head_share=cost.head_share,
    )


def _tokens_per_microbatch(config: RunConfig, model: Model | None) -> int | None:
    return typed(WorkloadConfig, config.workload).microbatch_sequences * model.seq_len if model else None


def _check_workload(config: RunConfig, cost: CostConfig, model: Model | None) -> None:
    sequences = typed(WorkloadConfig, config.workload).microbatch_sequences
    if sequences < 1:
        raise ConfigError(f"workload.microbatch_sequences={sequences}: a whole number of at least 1")
    tokens = _tokens_per_microbatch(config, model)
    if model and model.published_name and cost.name == "published":
        measured = published_tokens_per_microbatch(model.published_name)
        if tokens != measured:
            raise ConfigError(
                f"workload.microbatch_sequences={sequences} of {model.seq_len} tokens: the published timings are "
                f"of {measured} tokens a microbatch; leave both alone, or use cost=constant"
            )


def _model_bytes(config: RunConfig, model: Model | None) -> ModelBytes | None:
    tokens = _tokens_per_microbatch(config, model)
    if model is None or not tokens:
        return None
    return replace(model_bytes(model, tokens), keeps_activations=config.recompute == "none")


# --- a schedule from a file ----------------------------------------------------------------------------------


def _from_file(config: RunConfig, cost: CostConfig) -> Assembled:
    """A schedule in text form, checked; without a partition of its own every stage holds one layer."""
    path = Path(config.schedule_file or "")
    try:
        schedule = from_text(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"schedule_file={path}: cannot be read ({error.__class__.__name__}); give a text file"
        ) from None
    except ValueError as error:
        raise ConfigError(f"schedule_file={path}: {error}") from None
    graph, versions = checked_graph(schedule)
    if schedule.partition is None:
        if schedule.shape.separate_cuts:
            raise ConfigError(
                f"schedule_file={path}: forward and backward are cut apart; its header must name a partition"
            )
        schedule = schedule.with_partition(symmetric((1,) * schedule.shape.num_stages))
    assert schedule.partition is not None
    entry = registry.entries().get(schedule.name)
    config = replace(config, num_devices=schedule.shape.num_ranks, model={"name": "abstract"} | config.model)
    if config.model["name"] == "abstract":
        config.model["num_layers"] = schedule.partition.num_layers
    model = None if config.model["name"] == "abstract" else Model(**config.model)
    _check_workload(config, cost, model)
    cluster = Cluster(**config.cluster)
    times = _layer_times(config, cost, model, entry or registry.entry("1f1b"), cluster)
    ahead = bool(entry and entry.recompute_ahead) if cost.recompute_ahead is None else cost.recompute_ahead
    costs = times.table(
        schedule.partition,
        recompute_ahead=ahead,
        fused_ahead=cost.fused_ahead,
        num_head_shards=schedule.shape.num_head_shards,
    )
    choice = Choice(schedule.partition, "given")
    sizes = _model_bytes(config, model)
    tokens = _tokens_per_microbatch(config, model)
    check_sizes(schedule, sizes)
    if sizes is not None and has_transfers(schedule):
        costs = Traffic(sizes, cluster).charged(schedule, costs)
    transfers = transfers_of(costs)
    profile = times if cost.name == "profiled" else None
    graph = replace(graph, schedule=schedule)
    return Assembled(entry, schedule, graph, versions, costs, choice, model, cluster, sizes, tokens, transfers, profile)
