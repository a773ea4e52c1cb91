"""mode=train: a schedule on the engine: tensors on a virtual clock, threads or accelerators, or emulated durations."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from rpbench.config.choices import BackendConfig
from rpbench.config.errors import ConfigError, config_errors
from rpbench.config.request import Request
from rpbench.engine.backends.device import DeviceBackend
from rpbench.engine.backends.emulated import EmulatedBackend
from rpbench.engine.backends.threads import CpuBackend, one_thread
from rpbench.engine.backends.virtual import VirtualBackend, known_clock, replay_clock
from rpbench.engine.executor import Handler
from rpbench.engine.executor import execute as run_program
from rpbench.engine.measure.profiles import measured_costs
from rpbench.engine.measure.stopwatch import ForeignLoad
from rpbench.engine.program import make_program
from rpbench.engine.shards.cut import DRAWS_APART
from rpbench.engine.state import checkpoint
from rpbench.engine.state.checkpoint import State
from rpbench.engine.state.device_memory import is_out_of_memory
from rpbench.engine.state.device_weights import copy_in_memory
from rpbench.engine.state.loss_scale import LossScaling
from rpbench.engine.state.updates.compensation import Compensation, check_compensation
from rpbench.engine.training import Settings, Training
from rpbench.engine.training_checks import check_momentum, check_untied
from rpbench.engine.transfers import PacedCopies
from rpbench.engine.verification import gated, rehearse, verified
from rpbench.engine.workload import Workload, synthetic
from rpbench.ir.action import Kind
from rpbench.ir.analysis import Analysis
from rpbench.ir.checks.residency import stays_on_devices
from rpbench.ir.moved_objects import LINKS
from rpbench.ir.policy import STEPS_BEHIND, Policy
from rpbench.ir.schedule import Schedule
from rpbench.ir.timeline import Timeline
from rpbench.ir.waits.moves import has_transfers
from rpbench.models.build import build_layer
from rpbench.models.data import Data, InPieces, Ragged, Regrouped, SyntheticTokens, TextTokens
from rpbench.models.layers import DecoderLayer
from rpbench.models.shards import check_shards
from rpbench.records.record import Record
from rpbench.registry import Entry
from rpbench.run.allocator import is_tuned
from rpbench.run.assemble import Assembled
from rpbench.run.recording import Fields, Outcome, Work, recorded
from rpbench.run.scheduled import assembled_of, scheduled
from rpbench.run.training.on_accelerators import HandlersOf, Ran, check_device, gated_on_device, run_on_accelerators
from rpbench.run.training.tensors import DTYPES, backend_of, check_host_memory, optimizer_settings, text_of
from rpbench.run.training.validation import (
    Validation,
    check_holds,
    check_save_to,
    checkpoint_subject,
    found_checkpoint,
    loss_curve,
)
from rpbench.tracking.metrics import StepFeed
from rpbench.tracking.steps import StepWatch
from rpbench.workload.architecture import Architecture


def records(request: Request) -> list[Record]:
    if backend_of(request).name == "torch":
        from rpbench.run.training.torch_backend import torch_records  # processes of its own; torch.distributed

        return torch_records(request)
    return [recorded(request, _prepare)]


def _prepare(request: Request) -> Work:
    assembled = assembled_of(request)
    check_request(request, assembled)
    backend, analysis = backend_of(request), Analysis(assembled.schedule)
    if backend.name == "emulated":  # so that the engine's errors come before the run
        make_program(analysis, assembled.costs)
    else:
        workload, settings = _workload(request, assembled, device="meta"), settings_of(request, assembled.entry)
        real_time = backend.name != "virtual"
        rehearse(workload, analysis, settings, assembled.costs, real_time=real_time, verify=request.verify)
    feed = StepFeed()
    work = scheduled(request, assembled, lambda: Outcome(*execute(request, assembled, feed)))
    return replace(work, steps=feed, is_out_of_memory=is_out_of_memory)


def settings_of(request: Request, entry: Entry | None) -> Settings:
    asked, backend = request.optimizer, backend_of(request)
    scaling = LossScaling(asked.loss_scale, asked.loss_scale_growth_steps)
    return Settings(
        optimizer_settings(asked, scaling if request.dtype == "float16" else None),
        backend.recompute_grain,  # type: ignore[arg-type]  # checked there
        keep_gradients=request.verify,
        compensation=_compensation(request, entry),
        keep_state=request.checkpoint.save_to is not None,
        device_memory_bytes=backend.device_memory_bytes,
        recompute=request.recompute,  # type: ignore[arg-type]  # checked there
    )


def _compensation(request: Request, entry: Entry | None) -> Compensation:
    """The method's compensation for late gradients; a schedule from a file has none."""
    if entry is None or request.schedule.file is not None or entry.compensation is None:
        return Compensation()
    return Compensation(**entry.compensation(**request.schedule.options))


def check_request(request: Request, assembled: Assembled) -> None:
    """Raise ConfigError, before any work, for a backend, model, precision or option that does not fit."""
    backend = backend_of(request)
    if backend.name == "emulated":
        return
    settings = settings_of(request, assembled.entry)
    if request.recompute != "all" and settings.compensation.is_needed:
        raise ConfigError(
            f"recompute={request.recompute}: what {assembled.schedule.name} does about late gradients changes weights; "
            "use recompute=all"
        )
    if backend.name == "device":
        check_device(assembled.schedule, backend, assembled.model)
    if backend.paced_links and assembled.cluster.host_to_device_bytes_per_s is None:
        raise ConfigError(
            f"backend.paced_links=true: the links of cluster {assembled.cluster.name} have no pace; set "
            "cluster.host_to_device_bytes_per_s, or take a cluster that has it, such as cluster=8x_rtx4090"
        )
    if assembled.model is None:
        raise ConfigError(
            f"backend={backend.name} trains tensors, which model=abstract does not have; "
            "take one with a shape, such as model=tiny_gpt"
        )
    if assembled.schedule.shape.tensor_parallel:
        _check_shards(assembled.model, assembled.schedule, backend.name)
    if request.workload.held_out and backend.name != "virtual":
        raise ConfigError(f"workload.held_out: backend={backend.name} validates nothing; use backend=virtual")
    _data(request, assembled)
    _check_checkpoint(request, assembled)
    check_compensation(assembled.schedule, settings.compensation, has_tied=assembled.model.tied)
    check_untied(assembled.schedule, has_tied=assembled.model.tied)
    check_momentum(settings.compensation, settings.optimizer)
    shape, kinds = assembled.schedule.shape, assembled.schedule.kinds
    are_replicas = Kind.REDUCE_GRAD in kinds and Kind.UNSHARD not in kinds  # which all keep and step the weights
    check_host_memory(assembled.model, DTYPES[request.dtype], shape.num_ranks if are_replicas else 1)


def _check_shards(model: Architecture, schedule: Schedule, backend: str) -> None:
    """Refuse layers without equal shards, and a backend without collectives inside a layer."""
    if backend == "device":
        raise ConfigError(
            f"schedule={schedule.name}: devices that have shards of a matrix meet on threads, not on accelerators; "
            "use backend=cpu, virtual or emulated"
        )
    if schedule.shape.sequence_parallel and model.dropout:
        raise ConfigError(f"model.dropout={model.dropout}: {DRAWS_APART}")
    layer = build_layer(model, 1, device="meta")
    assert isinstance(layer, DecoderLayer)
    with config_errors(f"schedule={schedule.name}, model={model.name}: "):
        check_shards(layer, schedule.shape.num_ranks)


def execute(request: Request, assembled: Assembled, feed: StepFeed | None = None) -> tuple[Fields, Timeline]:
    """Run an assembled and checked request (`check_request`); ActionFailed if an action raised.

    Returns the record's fields (evidence, times, loss, metrics of the timeline) and the timeline. `feed` gets each
    batch when it is done, if somebody listens.
    """
    backend = backend_of(request)
    if backend.name == "emulated":
        return _emulate(backend, assembled)
    settings, start = settings_of(request, assembled.entry), _start(request, assembled)
    run = _Run(request, assembled, settings, start, feed or StepFeed())
    with one_thread():
        fields, timeline, training = _ON[backend.name](run)
        if training.scaler is not None:
            scales = training.scaler.scales
            fields |= {"loss_scale": scales[max(scales)].value, "num_skipped_steps": len(training.scaler.skipped)}
        fields |= _copied(training)
        if training.team:  # devices with shards of matrices
            fields["sums_sent_bytes"] = [rank.sent_bytes for rank in training.team.ranks]
        if training.memory is not None:
            fields["held_memory_bytes"] = training.memory.peak_bytes
        fields["loss"] = training.mean_loss(training.schedule.shape.num_steps - 1)
        fields |= loss_curve(training, timeline, request.num_microbatches)
        if request.checkpoint.save_to is not None:
            checkpoint.save(Path(request.checkpoint.save_to), training.state(), _subject(request, assembled))
        if request.verify:
            fields |= _verified(fields, training, DTYPES[request.dtype])
    return fields, timeline


def _verified(fields: Fields, training: Training, dtype: torch.dtype) -> Fields:
    """Comparison with plain training: on the processor bit for bit, on accelerators within rounding."""
    on_device = gated_on_device(fields, dtype) if "device_grad_max_rel_diff" in fields else None
    is_real = on_device is not None and fields["evidence"] == "measured"  # real accelerators round differently
    return ({} if is_real else gated(verified(training), dtype)) | (on_device or {})


def _copied(training: Training) -> Fields:
    """Bytes really copied over each kind of link, per device, beside the bytes that actions declare."""
    moved, devices = training.traffic.moved_bytes, range(training.schedule.shape.num_ranks)
    if not has_transfers(training.schedule):
        return {}
    return {f"{lane}_copied_bytes": [moved[device, lane] for device in devices] for lane in LINKS}


# --- the backends -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Run:
    """A run with tensors: its settings, the state to resume from, and the feed of a tracker."""

    request: Request
    assembled: Assembled
    settings: Settings
    start: State | None
    feed: StepFeed

    def handlers(self, training: Training, known: Callable[[], Timeline] | None = None) -> Mapping[Kind, Handler]:
        """The handlers of a training, watched if a tracker listens; `known` gives the timeline of a virtual clock."""
        if self.feed.listener is None:
            return training.handlers
        batch, tokens = self.request.num_microbatches, self.request.tokens_per_step
        watch = StepWatch(training, self.feed, batch, tokens, known() if known else None)
        return watch.watched(training.handlers)

    def validation(self, training: Training) -> Validation | None:
        data, shape = _data(self.request, self.assembled), self.assembled.schedule.shape
        if not isinstance(data, TextTokens) or not self.request.workload.held_out:
            return None
        updates_per_batch = max(1, self.request.num_microbatches // shape.num_microbatches)
        return Validation(training, data.held_out(), self.request.workload.validate_every * updates_per_batch)


def _on_virtual_clock(run: _Run) -> tuple[Fields, Timeline, Training]:
    costs, workload = run.assembled.costs, _workload(run.request, run.assembled)
    training = Training(workload, run.assembled.schedule, run.settings, run.start)
    program = training.program(costs)
    validation = run.validation(training)
    handlers = run.handlers(training, lambda: known_clock(program, costs))
    if validation:
        handlers = validation.watching(handlers)
    timeline = run_program(program, handlers, VirtualBackend(costs))
    fields = {"evidence": "simulated", **run.assembled.metrics(timeline, costs, program.graph)}
    return fields | (validation.fields() if validation else {}), timeline, training


def _on_cpu(run: _Run) -> tuple[Fields, Timeline, Training]:
    asked, assembled = backend_of(run.request), run.assembled
    workload = _workload(run.request, assembled)
    with CpuBackend() as backend:
        copy = PacedCopies(assembled.cluster) if asked.paced_links else copy_in_memory
        for number in range(asked.num_warmup_runs + 1):
            training = Training(workload, assembled.schedule, run.settings, run.start, copy)
            program = training.program(assembled.costs, real_time=True)
            counts = number == asked.num_warmup_runs
            handlers = run.handlers(training) if counts else training.handlers
            with ForeignLoad() as foreign:
                timeline = run_program(program, handlers, backend)
        replayed = replay_clock(program, backend.pre_cpu_s, backend.main_cpu_s)
    costs = measured_costs(timeline, recompute_ahead=assembled.costs.recompute_ahead)
    replay = assembled.metrics(replayed, costs, program.graph)
    fields = {
        "evidence": "measured",
        **assembled.metrics(timeline, costs, program.graph),
        **{f"replay_{name}": replay[name] for name in ("makespan_s", "busy_s", "bubble_makespan")},
        "foreign_cpu_share": foreign.cores,
        "malloc_tuned": is_tuned(),
    }
    if training.team:  # part of the time of the actions
        fields["sums_wait_s"] = training.team.meeting.wait_s
    return fields, timeline, training


def run_accelerated(
    request: Request,
    assembled: Assembled,
    handlers_of: HandlersOf = lambda training: training.handlers,
    workload: Workload | None = None,
) -> Ran:
    """Run on accelerators, without a record; `workload` is that of an earlier run, if there was one."""
    settings, start = settings_of(request, assembled.entry), _start(request, assembled)
    stays = stays_on_devices(assembled.schedule)

    def make(own: Workload, backend: DeviceBackend) -> Training:
        place_of = backend.accelerator_of if stays else None
        return Training(own, assembled.schedule, settings, start, backend.copy, pin_memory=not stays, place_of=place_of)

    whole = workload or _workload(request, assembled)
    return run_on_accelerators(make, whole, assembled, backend_of(request), handlers_of, verify=request.verify)


def _on_accelerators(run: _Run) -> tuple[Fields, Timeline, Training]:
    ran = run_accelerated(run.request, run.assembled, run.handlers)
    ran.fields["malloc_tuned"] = is_tuned()
    costs = measured_costs(ran.timeline, recompute_ahead=run.assembled.costs.recompute_ahead)
    return run.assembled.metrics(ran.timeline, costs, ran.program.graph) | ran.fields, ran.timeline, ran.training


_ON = {"virtual": _on_virtual_clock, "cpu": _on_cpu, "device": _on_accelerators}


def _emulate(asked: BackendConfig, assembled: Assembled) -> tuple[Fields, Timeline]:
    program = make_program(assembled.schedule, assembled.costs)
    with EmulatedBackend(assembled.costs, asked.time_scale) as backend, ForeignLoad() as foreign:
        timeline = run_program(program, backend.handlers, backend)
    hop_s = float(assembled.costs.hop) * asked.time_scale / assembled.costs.units_per_second
    costs = measured_costs(timeline, recompute_ahead=assembled.costs.recompute_ahead, hop_s=hop_s)
    fields = {"evidence": "emulated", **assembled.metrics(timeline, costs, program.graph)}
    return fields | {"foreign_cpu_share": foreign.cores}, timeline


# --- the workload -------------------------------------------------------------------------------------------


def _workload(request: Request, assembled: Assembled, device: str = "cpu") -> Workload:
    assert assembled.model is not None  # as checked
    sequences = request.workload.microbatch_sequences
    num_microbatches = assembled.schedule.shape.num_microbatches
    workload = synthetic(assembled.model, sequences, request.dtype, request.seed, num_microbatches, device)
    data = _data(request, assembled)
    if request.workload.by_microbatch:
        data = Ragged(data, request.workload.by_microbatch)
    if request.schedule.file is None:  # the same microbatches for every schedule, however many make a step here
        data = Regrouped(data, request.num_microbatches, num_microbatches)
    return replace(workload, data=data, lengths=request.workload.by_microbatch)


def _data(request: Request, assembled: Assembled, done: int = 0) -> Data:
    """The source of microbatches; ValueError if held-out text leaves too few for these steps and those `done`."""
    workload, model = request.workload, assembled.model
    window = assembled.schedule.shape.num_microbatches
    assert model is not None  # as checked
    path = text_of(request)
    if path is None:
        whole = workload.microbatch_sequences * request.pieces
        data = SyntheticTokens(model.vocab, model.seq_len, whole, request.seed)
        return data if request.pieces == 1 else InPieces(data, request.pieces)
    with config_errors(f"workload.{'path' if workload.text is None else 'text'}: "):
        return TextTokens(
            path,
            vocab=model.vocab,
            seq_len=model.seq_len,
            microbatch_sequences=workload.microbatch_sequences,
            num_microbatches=window if request.schedule.file is not None else request.num_microbatches,
            seed=request.seed,
            held_out=workload.held_out,
            num_steps=done + request.num_steps if workload.held_out else None,
        )


def _subject(request: Request, assembled: Assembled) -> Fields:
    return checkpoint_subject(request, assembled.schedule.shape.num_microbatches)


def _start(request: Request, assembled: Assembled) -> State | None:
    found = found_checkpoint(request, _subject(request, assembled))
    return None if found is None else found.state()


def _check_checkpoint(request: Request, assembled: Assembled) -> None:
    if (found := found_checkpoint(request, _subject(request, assembled))) is not None:
        check_holds(found, request, _workload(request, assembled, device="meta"))
        _data(request, assembled, found.num_steps)
    if request.checkpoint.save_to is None:
        return
    policy, num_steps = assembled.schedule.policy, assembled.schedule.shape.num_steps
    if policy not in STEPS_BEHIND or policy is Policy.SELECTIVE or num_steps < 2:
        raise ConfigError(
            f"checkpoint.save_to: policy {policy.value} over {num_steps} steps leaves no state to go on from; use "
            "num_steps=2 or more, and a schedule that flushes or is one step stale"
        )
    check_save_to(request)
