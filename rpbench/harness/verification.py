"""Verification: what a run computed, beside the same training as one plain loop."""

from typing import Any

from rpbench.engine.gradients import Tensors
from rpbench.engine.reference import largest_difference, train_reference
from rpbench.engine.training import Training
from rpbench.harness.config import ConfigError


def verified(training: Training) -> dict[str, Any]:
    """The run against a plain loop on the same weights: 0.0 means that every bit agrees."""
    schedule, window = training.schedule, training.workload.num_microbatches

    def read_version(module: int, microbatch: int) -> int:
        fixed = training.reads.fixed(microbatch)
        if fixed is None:
            raise ConfigError(f"verify=true: policy {schedule.policy.value} has no reference; use verify=false")
        return fixed

    reference = train_reference(
        training.workload,
        training.layout,
        training.groups,
        training.settings.optimizer,
        num_steps=schedule.shape.num_steps,
        num_parts=schedule.shape.num_parts,
        updates=training.reads.has_steps,
        read_version=read_version,
        start=training.start,
    )
    found: list[Tensors] = [{} for _ in reference.gradients]
    for version, gradients in training.gradients.totals():
        found[version - 1] |= gradients
    expected_reads = {
        number: read_version(0, action.microbatch or 0)
        for number, action in enumerate(action for _, _, row in schedule.items() for action in row)
        if number in training.passes.read
    }
    return {
        "grad_max_abs_diff": max(map(largest_difference, found, reference.gradients)),
        "weight_max_abs_diff": largest_difference(training.optimizer.masters, reference.masters),
        "versions_as_reference": training.passes.read == expected_reads,
        "num_microbatches_verified": schedule.shape.num_steps * window,
    }
