"""Runs on the accelerators of this machine, or dry runs on made-up ones, which check the order of streams."""

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import NamedTuple

import torch

from rpbench.config.choices import BackendConfig, ConfigError
from rpbench.cost.footprint.memory import classes_of
from rpbench.cost.footprint.sizes import ModelBytes
from rpbench.engine.backends import accelerator
from rpbench.engine.backends.device import DeviceBackend, OnCurrentDevice, brought_here, failing
from rpbench.engine.executor import Handler, execute
from rpbench.engine.program import Program
from rpbench.engine.reference import largest_difference, largest_relative_difference, train_reference
from rpbench.engine.stream_order.happens_before import findings
from rpbench.engine.stream_order.machine import Machine
from rpbench.engine.stream_order.trace import Trace
from rpbench.engine.training import Training
from rpbench.engine.verification import WHOLE_BOUNDS
from rpbench.engine.workload import Workload
from rpbench.ir.action import COMPUTE, HEAD, SEND, Kind, parts_of
from rpbench.ir.analysis import Analysis
from rpbench.ir.checks.residency import stays_on_devices
from rpbench.ir.communication import hops
from rpbench.ir.index import Index
from rpbench.ir.schedule import Schedule
from rpbench.ir.timeline import Timeline
from rpbench.ir.waits.moves import has_transfers
from rpbench.run.assemble import Assembled
from rpbench.run.recording import Fields
from rpbench.sim.memory import peak_in_flight
from rpbench.workload.architecture import Architecture


def check_device(schedule: Schedule, backend: BackendConfig, model: Architecture | None = None) -> None:
    """Raise ConfigError without an accelerator, real or made up; for options of the CPU alone; and for a schedule that
    does not say how all its tensors get to the devices.
    """
    is_dry = backend.dry_accelerators is not None
    if not is_dry and not torch.accelerator.is_available():
        raise ConfigError(
            "backend=device: torch finds no accelerator on this machine; use backend=cpu for real tensors, "
            "backend.dry_accelerators=1 to check the order of its streams, or backend=emulated for the engine's timing "
            "with modelled durations"
        )
    if backend.recompute_grain != "stage":
        raise ConfigError(f"backend.recompute_grain={backend.recompute_grain}: on accelerators it is stage")
    index = Index(schedule)
    kinds = {action.kind for action in index.actions}
    if Kind.ROLLBACK in kinds:
        raise ConfigError(
            f"backend=device: {schedule.name} takes steps back, and what has been loaded of them is not brought again "
            "on accelerators; use schedule.speculate=false, or backend=cpu"
        )
    if Kind.STEP_REST in kinds:
        raise ConfigError(
            f"backend=device: {schedule.name} steps columns on the devices, where the optimizer is not; use "
            "schedule=zero_offload, or backend=cpu"
        )
    if has_transfers(schedule) and Analysis(schedule).moves.handovers.homes:
        raise ConfigError(
            f"backend=device: {schedule.name} keeps its stages on devices and hands them from one to another, and the "
            "optimizer is on the host; use schedule=roundpipe offload=all, or backend=cpu"
        )
    if stays_on_devices(schedule):
        _check_resident(schedule, index, model)
        return
    loaded, stepped = (
        {action.stage for action in index.actions if action.kind is kind and action.object == what}
        for kind, what in ((Kind.LOAD, "P"), (Kind.STEP, None))
    )
    if not loaded or not stepped <= loaded or (not kinds & SEND and next(hops(index), None) is not None):
        raise ConfigError(
            f"backend=device: {schedule.name} brings weights or boundary tensors of some stages to the devices and not "
            "of all; use schedule=roundpipe offload=all, or the schedule as it is, without offload="
        )


def _check_resident(schedule: Schedule, index: Index, model: Architecture | None) -> None:
    """Refuse stages on several devices whose gradients are not summed, and shards of weights that stages share."""
    devices: dict[int, set[int]] = {}
    for number, action in enumerate(index.actions):
        for part in parts_of(action):
            if part.kind in COMPUTE - set(HEAD):
                devices.setdefault(part.stage, set()).add(index.device(number))
    shared = next((stage for stage, found in devices.items() if len(found) > 1), None)
    if shared is None:
        return
    if Kind.REDUCE_GRAD not in schedule.kinds:
        raise ConfigError(
            f"backend=device: {schedule.name} runs stage {shared} on devices {sorted(devices[shared])} and has no "
            "action that sums their gradients, so that each would keep weights of its own; use backend=cpu"
        )
    if model is not None and model.lora_rank:
        raise ConfigError(
            f"backend=device: model.lora_rank freezes weights, and the replicas of {schedule.name} keep those that "
            "train alone on accelerators of their own; leave it out, or use schedule=1f1b or backend=cpu"
        )
    if model is not None and model.tied and Kind.UNSHARD in schedule.kinds:
        raise ConfigError(
            f"backend=device: model.tied=true is one matrix of two stages, which {schedule.name} cuts into "
            "other shards in each; use model.tied=false, or schedule=data_parallel"
        )


HandlersOf = Callable[[Training], Mapping[Kind, Handler]]


class Ran(NamedTuple):
    training: Training  # with its data on the host again
    program: Program
    timeline: Timeline
    fields: Fields  # evidence, memory by the accelerators' own statistics, and predicted memory
    wall_s: float  # on the host's clock, until the accelerators have ended
    trace: Trace | None  # of a dry run: everything it issued


def run_on_accelerators(
    make: Callable[[Workload, DeviceBackend], Training],
    workload: Workload,
    assembled: Assembled,
    asked: BackendConfig,
    handlers_of: HandlersOf,
    *,
    verify: bool,
) -> Ran:
    """Run a schedule on all accelerators; `handlers_of` are for the run after the warm-up, which a dry run leaves out.

    If `verify`, the gradients of the first step are compared with plain training on the first accelerator, by kernels
    that give the same bits every time; otherwise torch chooses the kernels.
    """
    num_warmup_runs = asked.num_warmup_runs if asked.dry_accelerators is None else 0
    with ExitStack() as stack:
        machine = asked.dry_accelerators and stack.enter_context(Machine(asked.dry_accelerators))
        if not machine:
            accelerator.choose_kernels(repeatable=verify)
        backend = stack.enter_context(DeviceBackend())
        num, on_device = torch.accelerator.device_count(), replace(workload, data=OnCurrentDevice(workload.data))
        for number in range(num_warmup_runs + 1):
            for each in range(num):
                accelerator.workspace_bytes(each)  # of runs before this one
                torch.accelerator.reset_peak_memory_stats(each)
            with failing("while weights were brought: "):
                training = make(on_device, backend)
            program = training.program(assembled.costs, real_time=True)
            handlers = handlers_of(training) if number == num_warmup_runs else training.handlers
            began = time.perf_counter()
            timeline = execute(program, handlers, backend)
            wall_s = time.perf_counter() - began
        fields: Fields = {
            "accelerators": [accelerator.name(each) for each in range(num)],
            "accelerator_peak_memory_bytes": [torch.accelerator.max_memory_allocated(each) for each in range(num)],
            "accelerator_workspace_bytes": [accelerator.workspace_bytes(each) for each in range(num)],
            **_predicted_by_class(assembled, training, num),
            **(_beside_plain_training(training, workload) if verify else {}),
        }
    training.workload = replace(training.workload, data=workload.data)
    fields |= order_found(machine.trace) if machine else {"evidence": "measured"}
    return Ran(training, program, timeline, fields, wall_s, machine.trace if machine else None)


def _beside_plain_training(training: Training, workload: Workload) -> Fields:
    """How far the first step's gradients are from those of plain training by the same kernels on accelerator 0."""
    groups = {place: found for place, found in training.groups.items() if place[1] == 1}
    parts, optimizer = training.schedule.shape.num_segments, training.settings.optimizer
    with torch.accelerator.device_index(0):
        plain = brought_here(workload)
        reference = train_reference(plain, training.layout, groups, optimizer, num_parts=parts, updates=False)
    expected = {place: gradient.cpu() for place, gradient in reference.gradients[0].items()}
    found = {place: gradient.cpu() for place, gradient in training.gradients.by_step()[0].items()}
    return {
        "device_grad_max_abs_diff": largest_difference(found, expected),
        "device_grad_max_rel_diff": largest_relative_difference(found, expected),
    }


def gated_on_device(fields: Fields, dtype: torch.dtype) -> Fields:
    """The status `failed` and a reason if gradients differ by more than rounding, else nothing."""
    far, bound = fields["device_grad_max_rel_diff"], WHOLE_BOUNDS[dtype]
    if far <= bound:
        return {}
    return {"status": "failed", "reason": f"verification: device_grad_max_rel_diff is {far:g}, at most {bound:g}"}


def _predicted_by_class(assembled: Assembled, training: Training, num_accelerators: int) -> Fields:
    """Predicted bytes by class of tensors, a value for each accelerator, which several devices may share."""
    if assembled.sizes is None:
        return {}
    sizes = _with_state(assembled.sizes, training)
    classes = classes_of(assembled.schedule, sizes, peak_in_flight(assembled.graph), assembled.keeps)
    return {
        f"predicted_{name.replace(' ', '_')}_bytes": [
            sum(int(device.get(name, 0)) for device in classes[number::num_accelerators])
            for number in range(num_accelerators)
        ]
        for name in sorted({name for device in classes for name in device})
    }


def _with_state(sizes: ModelBytes, training: Training) -> ModelBytes:
    """The sizes with the state of the optimizer that runs; the cost model counts that of AdamW."""
    settings = training.settings.optimizer
    embedding, *rest = (
        sum(settings.state_bytes(each.shape) for each in module.parameters() if each.requires_grad)
        for module in training.workload.modules
    )
    return replace(
        sizes,
        embedding=sizes.embedding._replace(optimizer=embedding),
        layers=tuple(layer._replace(optimizer=state) for layer, state in zip(sizes.layers, rest, strict=False)),
        head=sizes.head._replace(optimizer=sum(rest[sizes.num_layers :])),  # one module, or its shares
    )


def order_found(trace: Trace) -> Fields:
    """Record fields: possible faults in the order of a dry run."""
    found = findings(trace)
    fields: Fields = {
        "evidence": "dry",
        "order_num_entries": len(trace.entries),
        "order_findings": [f"{each.kind}: {each.what}" for each in found],
    }
    if found:
        reason = f"{len(found)} findings in the order of streams; the first: {found[0].kind}: {found[0].what}"
        fields |= {"status": "failed", "reason": reason}
    return fields
