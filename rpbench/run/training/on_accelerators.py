"""Runs on the accelerators of this machine, or dry: on made-up ones, where the order of streams is checked."""

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import NamedTuple

import torch

from rpbench.config.choices import BackendConfig
from rpbench.cost.footprint.memory import classes_of
from rpbench.cost.footprint.sizes import ModelBytes
from rpbench.engine.backends import accelerator
from rpbench.engine.backends.device import DeviceBackend, OnCurrentDevice, brought_here, failing
from rpbench.engine.executor import Handler, execute
from rpbench.engine.program import Program
from rpbench.engine.reference import largest_difference, largest_relative_difference, train_reference
from rpbench.engine.state.gradient_sums.gradients import Tensors
from rpbench.engine.stream_order.happens_before import findings
from rpbench.engine.stream_order.machine import Machine
from rpbench.engine.stream_order.trace import Trace
from rpbench.engine.training import Training
from rpbench.engine.verification import WHOLE_BOUNDS
from rpbench.engine.workload import Workload
from rpbench.ir.action import Kind
from rpbench.ir.timeline import Timeline
from rpbench.run.assemble import Assembled
from rpbench.run.recording import Fields
from rpbench.sim.memory import peak_in_flight

HandlersOf = Callable[[Training], Mapping[Kind, Handler]]


class Ran(NamedTuple):
    """A run on accelerators.

    Args:
        training: after it, with its data on the host again.
        fields: of its record: evidence, memory by the accelerators' own statistics, and what was predicted.
        wall_s: all of it by the clock of the processor, until the accelerators have ended.
        trace: what was issued, of a dry run.
    """

    training: Training
    program: Program
    timeline: Timeline
    fields: Fields
    wall_s: float
    trace: Trace | None


def run_on_accelerators(
    make: Callable[[Workload, DeviceBackend], Training],
    workload: Workload,
    assembled: Assembled,
    asked: BackendConfig,
    handlers_of: HandlersOf,
    *,
    verify: bool,
) -> Ran:
    """Run a schedule on every accelerator there is; a dry run has no warm-up.

    Args:
        make: the training of a workload on a backend.
        handlers_of: of the run that counts.
        verify: compare the gradients of the first step with plain training on the first accelerator.
    """
    num_warmup_runs = asked.num_warmup_runs if asked.dry_accelerators is None else 0
    with ExitStack() as stack:
        machine = asked.dry_accelerators and stack.enter_context(Machine(asked.dry_accelerators))
        if not machine:
            accelerator.make_repeatable()
        backend = stack.enter_context(DeviceBackend())
        num, on_device = torch.accelerator.device_count(), replace(workload, data=OnCurrentDevice(workload.data))
        for number in range(num_warmup_runs + 1):
            for each in range(num):
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
            **_predicted_by_class(assembled, training, num),
            **(_beside_plain_training(training, workload) if verify else {}),
        }
    training.workload = replace(training.workload, data=workload.data)
    fields |= order_found(machine.trace) if machine else {"evidence": "measured"}
    return Ran(training, program, timeline, fields, wall_s, machine.trace if machine else None)


def _beside_plain_training(training: Training, workload: Workload) -> Fields:
    """How far the gradients of the first step are from those of plain training on the first accelerator.

    Both run the same kernels on the same shapes; `gated_on_device` says how far they may be apart.
    """
    groups = {place: found for place, found in training.groups.items() if place[1] == 1}
    parts, optimizer = training.schedule.shape.num_segments, training.settings.optimizer
    with torch.accelerator.device_index(0):
        plain = brought_here(workload)
        reference = train_reference(plain, training.layout, groups, optimizer, num_parts=parts, updates=False)
    expected = {place: gradient.cpu() for place, gradient in reference.gradients[0].items()}
    found: Tensors = {}
    for version, gradients in training.gradients.totals():
        if version == 1:
            found |= {place: gradient.cpu() for place, gradient in gradients.items()}
    return {
        "device_grad_max_abs_diff": largest_difference(found, expected),
        "device_grad_max_rel_diff": largest_relative_difference(found, expected),
    }


def gated_on_device(fields: Fields, dtype: torch.dtype) -> Fields:
    """The status `failed` and a reason where gradients are further apart than rounding; nothing else."""
    far, bound = fields["device_grad_max_rel_diff"], WHOLE_BOUNDS[dtype]
    if far <= bound:
        return {}
    return {"status": "failed", "reason": f"verification: device_grad_max_rel_diff is {far:g}, at most {bound:g}"}


def _predicted_by_class(assembled: Assembled, training: Training, num_accelerators: int) -> Fields:
    """What the memory of each accelerator was predicted to hold, a list for each class of tensors.

    Several devices of a schedule may share one.
    """
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
    """The sizes with the state of the optimizer that runs, for the cost model counts that of AdamW."""
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
    """What may go wrong in the order that a dry run has issued."""
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
