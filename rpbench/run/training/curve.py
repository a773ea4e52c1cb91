"""Curve: how the loss of a run went, over what it read and over time."""

import math
from typing import Any

import numpy as np

from rpbench.engine.training import Training
from rpbench.ir.index import GRADIENT
from rpbench.ir.timeline import Timeline


def loss_curve(training: Training, timeline: Timeline, batch: int) -> dict[str, Any]:
    """Mean loss of every `batch` microbatches, in the order they were read, and when the last of them was back.

    The same microbatches stand behind each point, however many of them a schedule takes for an optimizer step. Losses
    are those of the training forward, on the weights that it read.
    """
    losses = [share * training.workload.num_microbatches for _, share in sorted(training.passes.losses.items())]
    ends = np.zeros(len(losses))
    flat = (action for _, _, row in timeline.schedule.items() for action in row)
    for action, end in zip(flat, timeline.end, strict=True):
        if action.kind in GRADIENT and action.microbatch is not None:
            ends[action.microbatch] = max(ends[action.microbatch], float(end) / timeline.units_per_second)
    starts = range(0, len(losses), batch)
    return {
        "loss_curve": [math.fsum(part) / len(part) for part in (losses[start : start + batch] for start in starts)],
        "loss_curve_s": [float(ends[start : start + batch].max()) for start in starts],
    }
