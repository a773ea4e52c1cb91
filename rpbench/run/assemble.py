"""Assembling a run from its request: model, cluster, costs, partition and the checked schedule."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from rpbench import registry
from rpbench.config.errors import ConfigError
from rpbench.config.files import SourceFile
from rpbench.config.keys import MOVES, check_figures
from rpbench.config.request import CONSTANTS, Request, check_charge
from rpbench.cost.charges import check_ssd, with_charges
from rpbench.cost.footprint.memory import Footprint
from rpbench.cost.footprint.sizes import UNKNOWN, DeviceMemory, ModelBytes, model_bytes
from rpbench.cost.hardware.machine import Machine
from rpbench.cost.published import published_partition, published_tokens_per_microbatch
from rpbench.cost.table import CostTable, LayerTimes, Number
from rpbench.cost.transfers import OptimizerTraffic, Traffic, TransferTimes, moved_bytes
from rpbench.ir.action import RECV, SEND, STEPPING
from rpbench.ir.analysis import Analysis
from rpbench.ir.checks.versions import Versions
from rpbench.ir.moved_objects import LINKS, carries
from rpbench.ir.partition import Partition, split_evenly, symmetric
from rpbench.ir.schedule import Schedule, ScheduleError, Weights
from rpbench.ir.timeline import Timeline
from rpbench.ir.waits.moves import has_transfers
from rpbench.mesh.layer_bytes import sizes_of
from rpbench.mesh.layers.layer_times import optimizer_traffic
from rpbench.mesh.layout import check_shards
from rpbench.mesh.placement import with_collectives
from rpbench.passes.lower import add_steps
from rpbench.passes.offload import stream
from rpbench.passes.recomputation import check_nothing_leaves, check_recompute, kept_layers
from rpbench.plan import Choice, choose
from rpbench.plan.contest.plans import Tuned
from rpbench.plan.problem import Problem
from rpbench.registry import Entry
from rpbench.run.layer_times import layer_times, microbatch_times, setting_of
from rpbench.run.order_file import check_typed, cut_of, in_segments, leaves_boundaries, read_order, times_of_order
from rpbench.sim.checked import checked_graph
from rpbench.sim.events import deal
from rpbench.sim.graph import Graph
from rpbench.sim.longest_path import simulate_graph
from rpbench.sim.memory import peak_in_flight
from rpbench.sim.metrics import measure
from rpbench.workload.architecture import Architecture

OFFLOADS = ("none", "weights", "all", "auto")


def with_offload(offload: str, prefetch: int, schedule: Schedule) -> Schedule:
    """The schedule with the requested transfers; ConfigError for an unknown word or a schedule that cannot move."""
    if offload not in OFFLOADS:
        raise ConfigError(f"offload={offload}: one of {', '.join(OFFLOADS)}")
    if prefetch < 0:
        raise ConfigError(f"prefetch={prefetch}: stages whose weights come ahead, 0 for none")
    if offload == "auto":
        offload = "all" if schedule.weights is Weights.STREAMED and not has_transfers(schedule) else "none"
    if offload == "none":
        return schedule
    if has_transfers(schedule):
        raise ConfigError(f"offload={offload}: {schedule.name} says by itself what it moves; leave offload=none")
    if schedule.weights is not Weights.STREAMED:
        raise ConfigError(
            f"offload={offload}: the weights of {schedule.name} stay on their devices; use offload=none, or a schedule "
            "whose weights follow the work, such as schedule=roundpipe"
        )
    return stream(schedule, prefetch=prefetch, activations=offload == "all")


def exposed_s(timeline: Timeline, graph: Graph, costs: CostTable, less: Sequence[Number] = ()) -> float:
    """Seconds by which the last computation would end sooner if no transfer and no charged optimizer took time."""
    free = simulate_graph(graph, replace(costs, transfer_time=None), less)
    return float(timeline.last_compute - free.last_compute) / timeline.units_per_second


def transfer_bytes(
    analysis: Analysis, sizes: ModelBytes | None, costs: CostTable, keeps: Sequence[int] | None
) -> dict[str, Any]:
    """Record fields: bytes over each kind of link, per device; empty without transfers."""
    if sizes is None or not (carries(analysis.schedule) or costs.carry):
        return {}
    moved = moved_bytes(analysis, sizes, keeps, costs.carry)
    return {
        f"{link}_bytes": [sum(number for what, number in device.items() if what.startswith(link)) for device in moved]
        for link in LINKS
    }


@dataclass(frozen=True)
class Assembled:
    """A run, ready to be simulated or executed."""

    entry: Entry | None  # None for a schedule read from a file
    schedule: Schedule
    graph: Graph
    versions: Versions
    costs: CostTable
    choice: Choice
    model: Architecture | None
    cluster: Machine
    sizes: ModelBytes | None  # bytes of the model's layers, when it has a shape
    tokens_per_microbatch: int | None
    profile: LayerTimes | None = None  # measured layer times, to be kept beside the record
    evidence: str = "simulated"  # predicted, where the costs themselves are from a model of the machine
    plan: Tuned | None = None  # found by a search of all options
    step_terms_s: Mapping[str, float] | None = None  # of `plan`: seconds of a step by cause
    order_sha256: str | None = None  # of `plan`: equal where devices compute the same in the same order
    keeps: tuple[int, ...] | None = None  # layers of each stage that recompute nothing, where they were chosen
    microbatch_tokens: tuple[int, ...] = ()  # of every microbatch of a step, where they differ

    @property
    def transfers(self) -> TransferTimes | None:
        """The times of transfers that the costs are charged with."""
        return self.costs.transfer_time if isinstance(self.costs.transfer_time, TransferTimes) else None

    def metrics(self, timeline: Timeline, costs: CostTable, graph: Graph) -> dict[str, Any]:
        after_last = self.entry is not None and self.entry.switch_after_last_forward
        return measure(graph, timeline, costs, switch_after_last_forward=after_last)

    @property
    def tokens_per_step(self) -> int | None:
        """Tokens of one optimizer step, for a model with sequences."""
        tokens, microbatches = self.tokens_per_microbatch, self.schedule.shape.num_microbatches
        if self.microbatch_tokens:  # a schedule may update after a part of those that were asked for
            return round(sum(self.microbatch_tokens) / len(self.microbatch_tokens) * microbatches)
        return None if tokens is None else tokens * microbatches


def assemble(request: Request) -> Assembled:
    """Everything a run needs, checked; raises ValueError for an impossible request. Nothing is written."""
    if request.schedule.file is not None:
        try:
            return _from_file(request, request.schedule.file)
        except ScheduleError as error:
            raise ScheduleError(f"schedule_file={request.schedule.file.path}: {error}") from None
    problem = pose(request)
    choice, profile = choose(request.partition, problem), None
    if request.cost.name == "profiled":  # of full-length sequences, even where shorter ones run: others can use them
        whole = replace(request, workload=replace(request.workload, lengths=None))
        profile = layer_times(whole, problem.times.num_layers)
    graph, versions, keeps = built(problem, choice, request.dispatch, partial(check_built, request))
    costs = replace(problem, keeps=keeps or ()).charged(graph.schedule)
    if request.recompute == "except_last":
        keeps = kept_layers(choice.partition, "except_last")
    return Assembled(
        problem.entry,
        graph.schedule,
        graph,
        versions,
        costs,
        choice,
        request.model,
        request.cluster,
        _model_bytes(request),
        request.tokens_per_microbatch,
        profile=profile,
        evidence="predicted" if request.cost.name == "analytic" else "simulated",
        keeps=keeps,
        microbatch_tokens=request.workload.microbatch_tokens,
    )


def built(
    problem: Problem, choice: Choice, dispatch: str, check: Callable[[Schedule], None] | None = None
) -> tuple[Graph, Versions, tuple[int, ...] | None]:
    """The checked schedule of a cut, and the layers of each stage that stay if as few as possible recompute.

    An order that follows from times is made for recomputed layers, and again if none recomputes and that still fits.
    """
    schedule = build_schedule(problem, choice, problem.costs(choice.partition), dispatch)
    if check is not None:
        check(schedule)
    graph, versions = checked_graph(schedule)
    keeps = _fitting(problem, schedule, graph) if problem.fitting else None
    if problem.entry.needs_costs and not problem.keeps and keeps == choice.partition.backward:
        again = built(replace(problem, keeps=keeps), choice, dispatch, check)
        if again[-1] == keeps:
            return again
    return graph, versions, keeps


def check_built(request: Request, schedule: Schedule) -> None:
    """Refuse a schedule whose transfers, recomputation, SSDs or shards do not go with the request."""
    if request.offload != "none" and has_transfers(schedule) and _model_bytes(request) is None:
        raise ConfigError(
            "the bytes of a transfer follow from the model: take one with a shape, such as model=qwen3_1p7b, "
            "or offload=none"
        )
    _check_schedule(request, schedule)
    if request.backend is not None and request.recompute != "all":
        check_nothing_leaves(schedule, request.recompute, {"P", "G"})


def _check_schedule(request: Request, schedule: Schedule) -> None:
    """Refuse recomputation, SSDs and a sequence length that do not fit the schedule or the machine."""
    check_recompute(schedule, request.recompute)  # type: ignore[arg-type]  # one of them, or the request was refused
    check_ssd(schedule, request.cluster)
    if schedule.on_ssd and request.backend is not None:
        raise ConfigError(
            f"backend={request.backend.name} keeps in the host's memory what {schedule.name} has on SSDs: "
            "take schedule.ssd=none, or simulate it"
        )
    if request.model is not None:
        check_shards(schedule.shape, request.model)


def _fitting(problem: Problem, schedule: Schedule, graph: Graph) -> tuple[int, ...]:
    """The layers of each stage that keep their activations instead of recomputing: as many as fit."""
    memory = problem.memory
    if memory is None:
        return schedule.cut.backward
    footprint = Footprint(schedule, memory.sizes, peak_in_flight(graph), keeps=())
    cut = np.array([schedule.cut.forward]), np.array([schedule.cut.backward])
    return tuple(footprint.fitting(*cut, memory.limit_bytes)[0].tolist())


def pose(request: Request) -> Problem:
    """The planning problem of a request; ValueError if it has none."""
    entry, cost, cluster = request.entry, request.cost, request.cluster
    if (mesh := request.meshed) is not None:
        raise ConfigError(
            "mesh: only runs and rpbench plan mesh=search take one; for the schedule alone leave it out and set "
            f"num_devices={mesh.mesh.pipeline}"
        )
    check_charge(request.charge, request.offload, entry, request.mode)
    _check_sizes(request, "num_devices")
    num_layers = request.num_layers
    if request.model is not None:
        num_layers = request.model.num_layers
    elif not num_layers:  # one for every stage
        num_layers = request.num_devices * (request.chunks_per_device or entry.chunks or (2 if entry.looped else 1))
    sizes, tokens = _model_bytes(request), request.workload.microbatch_tokens
    traffic = _traffic(request, sizes)
    return Problem(
        entry=entry,
        times=layer_times(request, num_layers),
        num_ranks=request.num_devices,
        num_microbatches=request.num_microbatches,
        num_steps=request.num_steps,
        chunks_per_rank=request.chunks_per_device,
        options=dict(request.schedule.options),
        keeps_last=request.recompute == "except_last",
        fitting=request.recompute == "fitting",
        recompute_ahead=entry.recompute_ahead if cost.recompute_ahead is None else cost.recompute_ahead,
        fused_ahead=cost.fused_ahead,
        published=_published(request),
        memory=None if sizes is None or (limit := cluster.usable_memory_bytes) is None else DeviceMemory(sizes, limit),
        activations=UNKNOWN if sizes is None else sizes.of_a_layer,
        finish=partial(_finished, request, traffic),
        traffic=traffic,
        each=microbatch_times(request, num_layers),
        sizes=tuple(own / max(tokens) for own in tokens),
    )


def _published(request: Request) -> Partition | None:
    """The published partition: required by `partition=published`, otherwise only a start for other methods."""
    if "published" not in (request.partition, request.cost.name):
        return None
    try:
        return published_partition(request.entry.name, (request.model and request.model.published_name) or "")
    except ValueError:
        if request.partition == "published":
            raise
        return None


def _traffic(request: Request, sizes: ModelBytes | None) -> Traffic | None:
    """The charge for transfers; None without transfers or with unknown bytes."""
    cost, cluster = request.cost, request.cluster
    if request.charge == "hops":  # a schedule that moves something pays for it, whoever put it there
        return None if sizes is None else Traffic(sizes, cluster, False if request.offload == "weights" else None)
    if sizes is None:
        raise ConfigError("charge=bytes: bytes follow from the model; take one with a shape, such as model=qwen3_1p7b")
    check_figures(cluster, MOVES, "charge=bytes")
    if cost.name == "analytic":
        setting = setting_of(request)
        return Traffic(sizes, with_collectives(cluster, setting.software), optimizer=optimizer_traffic(setting))
    for name in CONSTANTS:
        if name not in cost.constants:
            raise ConfigError(
                f"charge=bytes: cost={cost.name} has no constants.{name}, the optimizer's traffic for one parameter; "
                f"use cost=published or analytic, or add +cost.constants.{name}=NUMBER"
            )
    pace = (cluster.memory_bytes_per_s or 0) * (cluster.memory_efficiency or 0)
    optimizer = OptimizerTraffic(cost.constants["optimizer_bytes"], cost.constants["adam_bytes"], pace)
    return Traffic(sizes, cluster, optimizer=optimizer)


def _finished(request: Request, traffic: Traffic | None, order: Schedule) -> Schedule:
    """The schedule that runs: the order with its optimizer steps, if there are several, and its transfers."""
    lower, charged = request.entry.lower, request.charge == "bytes"
    if lower is not None:  # the method adds its transfers itself
        schedule = lower(order, prefetch=request.prefetch, **request.schedule.options)
    else:
        schedule = add_steps(order) if order.shape.num_steps > 1 or charged else order
    schedule = with_offload(request.offload, request.prefetch, schedule)
    if not charged:
        return schedule
    try:
        return _with_tied_ends(with_charges(schedule, request.cluster), traffic)
    except ScheduleError as error:
        raise ConfigError(f"charge=bytes: {error}; use charge=hops, which leaves the optimizer out") from None


def _with_tied_ends(schedule: Schedule, traffic: Traffic | None) -> Schedule:
    return traffic.optimizer.with_tied_ends(schedule) if traffic and traffic.optimizer else schedule


def build_schedule(problem: Problem, choice: Choice, costs: CostTable, dispatch: str) -> Schedule:
    """The schedule of a partition, dispatched as requested, with its optimizer steps and transfers."""
    made = None if problem.keeps else choice.schedule  # for recomputed layers
    return problem.finished(deal(made or problem.order(choice.partition), costs, dispatch))


def _check_sizes(request: Request, who: str) -> None:
    """Refuse more devices than the cluster has, and microbatches of another size than the published timings have."""
    cluster = request.cluster
    if cluster.num_devices is not None and request.num_devices > cluster.num_devices:
        raise ConfigError(
            f"{who}={request.num_devices}: cluster {cluster.name} has {cluster.num_devices}; "
            "ask for fewer, or use cluster=local"
        )
    model, tokens = request.model, request.tokens_per_microbatch
    if model is None or model.published_name is None or request.cost.name != "published":
        return
    measured, asked = published_tokens_per_microbatch(model.published_name), request.workload.microbatch_sequences
    if tokens != measured:
        way = "leave both alone" if request.pieces == 1 else f"cut one of {request.pieces * measured} tokens"
        raise ConfigError(
            f"workload.microbatch_sequences={asked * request.pieces} of {model.seq_len} tokens: the "
            f"published timings are of {measured} tokens a microbatch; {way}, or use cost=constant"
        )


def _model_bytes(request: Request) -> ModelBytes | None:
    """Bytes of the model's layers; of the largest microbatch where microbatches differ."""
    if request.model is None or not request.tokens_per_microbatch:
        return None
    largest = max(request.workload.by_microbatch, key=sum, default=())
    tokens = sum(largest) or request.tokens_per_microbatch
    counted = request.cost.name == "analytic"
    sizes = sizes_of(setting_of(request, largest), tokens) if counted else model_bytes(request.model, tokens)
    each = tuple(own / tokens for own in request.workload.microbatch_tokens)
    return replace(sizes, keeps_activations=request.recompute == "none", each=each)


# --- a schedule from a file ----------------------------------------------------------------------------------


def _from_file(request: Request, file: SourceFile) -> Assembled:
    """A schedule in text form, checked, with its own cut, or else the typed one, or else a layer a stage."""
    read = read_order(file)
    has_cut = read.partition is not None
    schedule = read if has_cut else cut_of(request, read, file)
    check_typed(request, schedule, file, has_cut=has_cut)
    sizes, traffic = _model_bytes(request), None  # without them transfers take no time, as those of a named schedule
    if request.charge == "bytes":
        schedule, traffic = _completed(request, schedule, file), _traffic(request, sizes)
        schedule = _with_tied_ends(schedule, traffic)
    graph, versions = checked_graph(schedule)
    if schedule.partition is None:
        raise ConfigError(
            f"schedule_file={file.path}: forward and backward are cut apart; its header must name a partition, "
            "or partition= beside it"
        )
    entry, cost = registry.offered().get(schedule.name), request.cost
    request = in_segments(request, schedule)
    _check_sizes(request, f"schedule_file={file.path}: ranks")
    ahead = bool(entry and entry.recompute_ahead) if cost.recompute_ahead is None else cost.recompute_ahead
    asked = request.model.num_layers if request.model else request.num_layers
    times = layer_times(request, asked or schedule.partition.num_layers)
    if schedule.partition.num_layers != times.num_layers:
        even = symmetric(split_evenly(times.num_layers, schedule.shape.num_stages))
        typed = f"type a partition of as many, as partition={even}; without one every stage holds a layer"
        way_out = "name a partition of as many in its header" if has_cut else typed
        raise ConfigError(
            f"schedule_file={file.path}: its stages hold {schedule.partition.num_layers} layers, and there are times "
            f"of {times.num_layers}: {way_out}"
        )
    costs = times_of_order(times, schedule).table(
        schedule.partition,
        recompute_ahead=ahead,
        fused_ahead=cost.fused_ahead,
        keeps_last=request.recompute == "except_last",
        num_head_shards=schedule.shape.num_head_shards,
    )
    _check_schedule(request, schedule)
    if request.charge == "hops" and sizes is not None and has_transfers(schedule):
        traffic = Traffic(sizes, request.cluster, boundaries=False if leaves_boundaries(schedule) else None)
    costs = costs if traffic is None else traffic.charged(schedule, costs)
    return Assembled(
        entry,
        schedule,
        replace(graph, schedule=schedule),
        versions,
        costs,
        Choice(schedule.partition, "given"),
        request.model,
        request.cluster,
        sizes,
        request.tokens_per_microbatch,
        profile=times if cost.name == "profiled" else None,
        evidence="predicted" if cost.name == "analytic" else "simulated",
        keeps=kept_layers(schedule.partition, "except_last") if request.recompute == "except_last" else None,
    )


def _completed(request: Request, schedule: Schedule, file: SourceFile) -> Schedule:
    """A schedule of a file with the steps and transfers that it lacks; ConfigError if they are not known.

    What `show` writes of a charged run has all of them.
    """
    entry = registry.offered().get(schedule.name)
    check_charge(request.charge, "all", entry or request.entry, request.mode)
    try:
        if STEPPING.isdisjoint(schedule.kinds):
            if entry is not None and entry.lower is not None:
                raise ScheduleError(f"an order of {schedule.name} without its steps and transfers; show writes them")
            schedule = add_steps(schedule)
        if schedule.weights is Weights.STREAMED and not has_transfers(schedule):
            schedule = with_offload("all", request.prefetch, schedule)
        if leaves_boundaries(schedule):
            raise ScheduleError("it moves weights, and not the boundary tensors between them; show offload=all does")
        return schedule if schedule.kinds & (SEND | RECV) else with_charges(schedule, request.cluster)
    except ScheduleError as error:
        raise ConfigError(f"charge=bytes: schedule_file={file.path}: {error}; use charge=hops") from None
