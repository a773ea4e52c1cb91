"""Verification: compares a run with the same training as one plain loop, and checks whether both can be run."""

from dataclasses import replace
from itertools import starmap
from typing import Any

import torch

from rpbench.cost.table import CostTable
from rpbench.engine.executor import check_kinds
from rpbench.engine.reference import (
    Reads,
    Trajectory,
    largest_difference,
    largest_relative_difference,
    reads_of,
    train_reference,
)
from rpbench.engine.shards.cut import joined
from rpbench.engine.shards.tensor_parallel import TeamGradients
from rpbench.engine.state.checkpoint import State
from rpbench.engine.state.gradients import Tensors
from rpbench.engine.state.weights import master_dtype
from rpbench.engine.training import Settings, Training
from rpbench.engine.workload import Workload
from rpbench.ir.action import COMPUTE, parts_of
from rpbench.ir.analysis import Analysis, analysed
from rpbench.ir.checks.versions import lane_reads
from rpbench.ir.policy import Policy
from rpbench.ir.schedule import Schedule, ScheduleError


def verified(training: Training) -> dict[str, Any]:
    """The run against a plain loop on the same weights: 0.0 means that every bit agrees.

    Where layers are cut over devices, the loop has the same shards, and copies of parameters must be equal on all
    devices. `whole_grad_max_rel_diff` is the largest difference of a step's gradient, or of its norm, from that of the
    whole layers, as a fraction of the largest value of a parameter's gradient: sums of parts round differently. Both
    gradients are made from the weights that the step began with, because two trainings drift apart by more than
    rounding: AdamW divides by a gradient's own size, and near its epsilon a rounding error becomes up to rate / epsilon
    as large in the weights. It is left out with loss scaling, whose overflows may differ.
    """
    schedule, window = training.schedule, training.workload.num_microbatches
    goes_on = training.reads.num_stale > 0  # its first steps read weights from before it began

    def by_step(place: int, microbatch: int) -> int:
        return training.reads.fixed(microbatch) or 0  # never None where it goes on: there would be no checkpoint

    reference = train_reference(
        training.workload,
        training.layout,
        training.groups,
        training.settings.optimizer,
        num_steps=schedule.shape.num_steps,
        num_parts=schedule.shape.num_segments,
        updates=training.reads.has_steps,
        reads=Reads(by_step, by_step)
        if goes_on
        else reads_of(schedule, training.layout, training.settings.recompute_grain),
        compensation=training.settings.compensation,
        start=training.start,
        trials=schedule.policy is Policy.TRIAL,
        late_rest=schedule.late_rest,
        keep_weights=training.team is not None,
    )
    found = training.gradients.by_step()
    expected = lane_reads(schedule)
    whole = not schedule.shape.tensor_parallel  # a share of an action is a whole one to its device
    expected_reads = {
        (number, part if whole else part._replace(part=0)): by_step(part.stage, part.microbatch or 0)
        if goes_on
        else expected.of(part)
        for number, action in enumerate(training.analysis.index.actions)
        for part in parts_of(action)
        if part.kind in COMPUTE
    }
    differences = map(largest_difference, found, reference.gradients)
    copies = training.gradients.copies() if isinstance(training.gradients, TeamGradients) else ()
    return {
        "grad_max_abs_diff": max(*differences, *starmap(largest_difference, copies), 0.0),
        "weight_max_abs_diff": largest_difference(training.optimizer.masters, reference.masters),
        "versions_as_reference": training.passes.read == expected_reads,
        "num_microbatches_verified": schedule.shape.num_steps * window,
        **(_beside_the_whole(training, found, reference) if training.team and not training.scaler else {}),
    }


def check_reference(training: Training) -> None:
    """Refuse (ValueError) a run that has no reference: whose versions depend on timing, or whose backward reads other
    weights than forward while sequences are in segments, the head in shards or inputs recomputed (no paper has both).
    """
    schedule, workload = training.schedule, training.workload
    try:
        reads = reads_of(schedule, training.layout)
    except ScheduleError as error:
        raise ValueError(f"verify=true: {error}, or verify=false") from None
    parts = {
        f"{schedule.shape.num_segments} segments": schedule.shape.num_segments > 1,
        "a head in shards": workload.num_head_shards > 0,
        f"keeps_every={schedule.shape.keeps_every}": schedule.shape.keeps_every > 1,
    }
    what = next((name for name, there in parts.items() if there), None)
    modules, microbatches = range(len(workload.modules)), range(schedule.shape.total_microbatches)
    if what is not None and (
        training.settings.compensation.is_needed
        or any(reads.forward(each, mb) != reads.backward(each, mb) for each in modules for mb in microbatches)
    ):
        raise ValueError(
            f"verify=true: policy {schedule.policy.value} with {what}: backward reads other weights than forward, and "
            "there is no reference for both; use policy flush, or verify=false"
        )


# The largest difference that rounding makes between layers in shards and whole layers on the same weights, as a
# fraction of the largest value.
WHOLE_BOUNDS = {torch.float64: 1e-12, torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.1}


def gated(found: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """`verified`, with status `failed` and a reason unless all bits and all versions that were read agree."""
    faults = [
        f"{name} is {found[name]:g}, expected 0"
        for name in ("grad_max_abs_diff", "weight_max_abs_diff")
        if found[name] != 0
    ]
    if not found["versions_as_reference"]:
        faults.append("actions read other versions of the weights than the reference")
    whole = found.get("whole_grad_max_rel_diff", 0.0)
    if not whole <= WHOLE_BOUNDS[dtype]:
        faults.append(f"whole_grad_max_rel_diff is {whole:g}, at most {WHOLE_BOUNDS[dtype]:g} is rounding")
    return found if not faults else found | {"status": "failed", "reason": f"verification: {'; '.join(faults)}"}


def _beside_the_whole(training: Training, found: list[Tensors], reference: Trajectory) -> dict[str, Any]:
    """The largest difference of sharded layers' gradients from those of whole layers."""
    differences, norms = [0.0], training.optimizer.gradient_norms
    for step, (own, begun_with) in enumerate(zip(found, reference.begun_with, strict=True)):
        whole = _whole_gradient(training, step, begun_with)
        differences.append(largest_relative_difference(joined(own), whole))
        if step + 1 in norms:
            norm = _norm(training.uncut, whole)
            differences.append(float(abs(norms[step + 1] - norm) / norm) if norm else float(norms[step + 1]))
    return {"whole_grad_max_rel_diff": max(differences)}


def _whole_gradient(training: Training, step: int, begun_with: Tensors) -> Tensors:
    """The gradient of a step, from 0, by the whole layers on the masters that it began with."""
    first, window = training.workload.first_step + step, training.workload.num_microbatches
    groups = {
        (stage, 1): tuple(tuple(microbatch - step * window for microbatch in group) for group in found)
        for (stage, version), found in training.groups.items()
        if version == step + 1
    }
    begun = State(first, begun_with, {}).changed(joined)
    workload = replace(training.uncut, first_step=first)
    optimizer = training.settings.optimizer
    return train_reference(workload, training.layout, groups, optimizer, updates=False, start=begun).gradients[0]


def _norm(workload: Workload, gradients: Tensors) -> torch.Tensor:
    """The norm of all gradients; those of a tied parameter are added up first."""
    sums: Tensors = {}
    for place, owner in workload.owner_of.items():
        if place in gradients:
            gradient = gradients[place].to(master_dtype(gradients[place].dtype))
            sums[owner] = sums[owner] + gradient if owner in sums else gradient
    return torch.nn.utils.get_total_norm(list(sums.values()))


def rehearse(
    workload: Workload,
    schedule: Schedule | Analysis,
    settings: Settings,
    costs: CostTable,
    *,
    real_time: bool = False,
    verify: bool = False,
) -> None:
    """Refuse (ValueError) what `Training`, `execute` or, with `verify`, `check_reference` would; memory is not checked.

    Modules may be on the device `meta`: nothing is computed.
    """
    analysis = analysed(schedule)
    training = Training(workload, analysis, replace(settings, device_memory_bytes=None))
    program = training.program(costs, real_time=real_time)
    check_kinds(program, training.handlers)
    if verify:
        check_reference(training)
