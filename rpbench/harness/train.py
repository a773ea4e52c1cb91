"""Runs on the engine: tensors on a virtual clock or on threads, or threads that sleep; record fields and timeline."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from rpbench.cost.model import Model
from rpbench.cost.table import CostTable
from rpbench.engine.backends.cpu import CpuBackend
from rpbench.engine.backends.emulated import EmulatedBackend
from rpbench.engine.backends.virtual import VirtualBackend, replay_clock
from rpbench.engine.compensation import Compensation, check_compensation
from rpbench.engine.executor import execute as run_program
from rpbench.engine.foreign import ForeignLoad
from rpbench.engine.optimizer import OptimizerSettings
from rpbench.engine.profile import measured_costs
from rpbench.engine.program import Program, make_program
from rpbench.engine.training import Settings, Training
from rpbench.engine.weights import master_dtype
from rpbench.engine.workload import Workload
from rpbench.harness.assemble import Assembled
from rpbench.harness.config import ConfigError, RunConfig, WorkloadConfig, typed
from rpbench.harness.verification import verified
from rpbench.ir.lane_reads import lane_reads
from rpbench.ir.schedule import Schedule, ScheduleError
from rpbench.ir.timeline import Timeline
from rpbench.models.build import build_model
from rpbench.models.data import Data, Regrouped, SyntheticTokens
from rpbench.registry import Entry
from rpbench.sim.metrics import measure

BACKENDS = ("virtual", "cpu", "emulated")
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}

Fields = dict[str, Any]


@dataclass
class EngineConfig:
    """The keys of `conf/backend/` for backends that execute; each file has those it reads."""

    name: str
    learning_rate: float = 1e-3
    weight_decay: float = 0.01
    num_warmup_steps: int = 0
    clip_norm: float | None = None
    recompute_grain: str = "stage"
    num_warmup_runs: int = 0
    time_scale: float = 1.0
    optimizer: str = "adamw"
    momentum: float = 0.0

    def settings(self, config: RunConfig, entry: Entry | None) -> Settings:
        optimizer = OptimizerSettings(
            self.learning_rate, self.weight_decay, self.num_warmup_steps, self.clip_norm, self.optimizer, self.momentum
        )
        return Settings(
            optimizer,
            self.recompute_grain,  # type: ignore[arg-type]  # checked there
            keep_gradients=config.verify,
            compensation=_compensation(config, entry),
        )


def _compensation(config: RunConfig, entry: Entry | None) -> Compensation:
    """What the schedule's method does about late gradients, by its options; a schedule from a file has none."""
    if entry is None or config.schedule_file or not entry.compensation:
        return Compensation()
    if entry.compensation != "pipemare":
        return Compensation(entry.compensation)  # type: ignore[arg-type]  # checked there
    return Compensation(**{key: value for key, value in config.schedule.items() if key != "name"})


def check_request(config: RunConfig, assembled: Assembled) -> None:
    """Refuse what cannot be run, before any work begins.

    Raises:
        ConfigError: for a backend, model, precision or option that does not fit.
    """
    engine = typed(EngineConfig, config.backend)
    if engine.name == "emulated":
        if not engine.time_scale > 0:
            raise ConfigError(f"backend.time_scale={engine.time_scale}: a factor above 0; 1 is real time")
        return
    if assembled.schedule.shape.num_head_shards:
        raise ConfigError(
            f"schedule={assembled.schedule.name} cuts the head over the devices, and backend={engine.name} runs it "
            "whole; use backend=sim or emulated"
        )
    settings = engine.settings(config, assembled.entry)
    if assembled.model is None:
        raise ConfigError(
            f"backend={engine.name} trains tensors, which model={config.model['name']} does not have; "
            "take one with a shape, such as model=tiny_gpt"
        )
    if config.dtype not in DTYPES:
        raise ConfigError(f"dtype={config.dtype}: one of {', '.join(DTYPES)}")
    check_compensation(assembled.schedule, settings.compensation, has_tied=assembled.model.tied_embedding)
    check_host_memory(assembled.model, DTYPES[config.dtype])
    if config.verify:
        _check_reads_are_known(assembled.schedule)


def _check_reads_are_known(schedule: Schedule) -> None:
    """Refuse to verify what reads versions that only the run itself could tell."""
    try:
        lane_reads(schedule)
    except ScheduleError as error:
        raise ConfigError(f"verify=true: {error}, or verify=false") from None


def execute(config: RunConfig, assembled: Assembled) -> tuple[Fields, Timeline]:
    """Run what is assembled on the configured backend.

    Returns:
        Record fields (evidence, times, loss, every metric of the timeline) and the timeline.

    Raises:
        ConfigError: if the request cannot be; nothing has run by then.
        ActionFailed: if an action raised.
    """
    engine = typed(EngineConfig, config.backend)
    if engine.name == "emulated":
        return _emulate(engine, assembled)
    settings, workload = engine.settings(config, assembled.entry), _workload(config, assembled)
    with one_thread():
        if engine.name == "virtual":
            fields, timeline, training = _on_virtual_clock(workload, settings, assembled)
        else:
            fields, timeline, training = _on_cpu(workload, settings, assembled, engine.num_warmup_runs)
        fields["loss"] = training.mean_loss(training.schedule.shape.num_steps - 1)
        if config.verify:
            fields |= verified(training)
    return fields, timeline


@contextmanager
def one_thread() -> Iterator[None]:
    """Operations on one core each: with more, sums are split and the last bits depend on the machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


# --- the three backends -------------------------------------------------------------------------------------


def _on_virtual_clock(
    workload: Workload, settings: Settings, assembled: Assembled
) -> tuple[Fields, Timeline, Training]:
    training = Training(workload, assembled.schedule, settings)
    program = training.program(assembled.costs)
    timeline = run_program(program, training.handlers, VirtualBackend(assembled.costs))
    return {"evidence": "simulated", **_metrics(program, timeline, assembled.costs, assembled)}, timeline, training


def _on_cpu(
    workload: Workload, settings: Settings, assembled: Assembled, num_warmup_runs: int
) -> tuple[Fields, Timeline, Training]:
    with CpuBackend() as backend:
        for _ in range(num_warmup_runs):
            training = Training(workload, assembled.schedule, settings)
            run_program(training.program(assembled.costs, real_time=True), training.handlers, backend)
        training = Training(workload, assembled.schedule, settings)
        program = training.program(assembled.costs, real_time=True)
        with ForeignLoad() as foreign:
            timeline = run_program(program, training.handlers, backend)
        replayed = replay_clock(program, backend.pre_cpu_s, backend.main_cpu_s)
    costs = measured_costs(timeline, recompute_ahead=assembled.costs.recompute_ahead)
    fields = {
        "evidence": "measured",
        **_metrics(program, timeline, costs, assembled),
        "replay_makespan_s": _metrics(program, replayed, costs, assembled)["makespan_s"],
        "foreign_cpu_share": foreign.cores,
    }
    return fields, timeline, training


def _emulate(engine: EngineConfig, assembled: Assembled) -> tuple[Fields, Timeline]:
    program = make_program(assembled.schedule, assembled.costs)
    with EmulatedBackend(assembled.costs, engine.time_scale) as backend, ForeignLoad() as foreign:
        timeline = run_program(program, backend.handlers, backend)
    hop_s = float(assembled.costs.hop) * engine.time_scale / assembled.costs.units_per_second
    costs = measured_costs(timeline, recompute_ahead=assembled.costs.recompute_ahead, hop_s=hop_s)
    fields = {"evidence": "emulated", **_metrics(program, timeline, costs, assembled)}
    return fields | {"foreign_cpu_share": foreign.cores}, timeline


def _metrics(program: Program, timeline: Timeline, costs: CostTable, assembled: Assembled) -> Fields:
    after_last = assembled.switch_after_last_forward
    return measure(program.graph, timeline, costs, switch_after_last_forward=after_last)


# --- what is trained ----------------------------------------------------------------------------------------


def _workload(config: RunConfig, assembled: Assembled) -> Workload:
    check_request(config, assembled)
    assert assembled.model is not None  # or the request had been refused
    sequences = typed(WorkloadConfig, config.workload).microbatch_sequences
    num_microbatches = assembled.schedule.shape.num_microbatches
    workload = workload_of(assembled.model, sequences, config.dtype, config.seed, num_microbatches)
    return replace(workload, data=_same_batches(config, assembled, workload.data))


def workload_of(model: Model, sequences: int, dtype: str, seed: int, num_microbatches: int) -> Workload:
    """What is trained: the same weights and batches for whoever asks for them."""
    return Workload(
        list(build_model(model, seed=seed, dtype=DTYPES[dtype])),
        SyntheticTokens(model.vocab, model.seq_len, sequences, seed),
        num_microbatches,
        seed,
        draws_random=model.dropout > 0,
    )


def _same_batches(config: RunConfig, assembled: Assembled, data: Data) -> Data:
    """The microbatches every other schedule gets, in their order, however many of them make a step here."""
    window = assembled.schedule.shape.num_microbatches
    return data if config.schedule_file else Regrouped(data, config.num_microbatches, window)


def check_host_memory(model: Model, dtype: torch.dtype) -> None:
    """Refuse a model whose weights and optimizer state do not fit; activations come on top."""
    size, master = dtype.itemsize, master_dtype(dtype).itemsize
    # The module's own weights; two versions, a gradient; a master and Adam's two moments.
    needed = model.total_parameters * size + model.trainable_parameters * (3 * size + 3 * master)
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    if needed > there:
        raise ConfigError(
            f"model={model.name} needs {needed / 1e9:.0f} GB of host memory for weights, gradients and optimizer "
            f"state in {str(dtype).removeprefix('torch.')}; {there / 1e9:.0f} GB are free. "
            "Take a smaller model, or backend=sim"
        )
