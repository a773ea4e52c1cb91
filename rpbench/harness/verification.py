"""Verification: what a run computed, beside the same training as one plain loop."""

from typing import Any

from rpbench.engine.compensation import Delays
from rpbench.engine.gradients import Tensors
from rpbench.engine.reference import Reads, ReadVersion, largest_difference, reads_of, train_reference
from rpbench.engine.training import Training
from rpbench.ir.action import Kind
from rpbench.ir.lane_reads import lane_reads


def verified(training: Training) -> dict[str, Any]:
    """The run against a plain loop on the same weights: 0.0 means that every bit agrees."""
    schedule, window = training.schedule, training.workload.num_microbatches
    compensation = training.settings.compensation
    reads = reads_of(schedule, training.layout, training.settings.recompute_grain)
    if training.reads.num_stale:
        reads = Reads(_going_on(training), _going_on(training))
    reference = train_reference(
        training.workload,
        training.layout,
        training.groups,
        training.settings.optimizer,
        num_steps=schedule.shape.num_steps,
        num_parts=schedule.shape.num_segments,
        updates=training.reads.has_steps,
        reads=reads,
        compensation=compensation,
        delays=Delays(schedule) if compensation.is_needed else None,
        start=training.start,
    )
    found: list[Tensors] = [{} for _ in reference.gradients]
    for version, gradients in training.gradients.totals():
        found[version - 1] |= gradients
    expected = lane_reads(schedule)
    numbered = enumerate(action for _, _, row in schedule.items() for action in row)
    going_on = _going_on(training) if training.reads.num_stale else None
    expected_reads = {
        number: going_on(action.stage, action.microbatch or 0)
        if going_on
        else (expected.forward if action.kind is Kind.F else expected.backward)[action.stage, action.microbatch or 0]
        for number, action in numbered
        if number in training.passes.read
    }
    return {
        "grad_max_abs_diff": max(map(largest_difference, found, reference.gradients)),
        "weight_max_abs_diff": largest_difference(training.optimizer.masters, reference.masters),
        "versions_as_reference": training.passes.read == expected_reads,
        "num_microbatches_verified": schedule.shape.num_steps * window,
    }


def _going_on(training: Training) -> ReadVersion:
    """The versions of a run whose first steps read weights from before it began; they follow from the step alone."""

    def read(place: int, microbatch: int) -> int:
        found = training.reads.fixed(microbatch)
        assert found is not None  # or there would have been no checkpoint
        return found

    return read
