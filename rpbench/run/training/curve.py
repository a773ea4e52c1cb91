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
    losses, tokens = _losses(training)
    ends = np.zeros(len(losses))
    flat = (action for _, _, row in timeline.schedule.items() for action in row)
    for action, end in zip(flat, timeline.end, strict=True):
        if action.kind in GRADIENT and action.microbatch is not None:
            ends[action.microbatch] = max(ends[action.microbatch], float(end) / timeline.units_per_second)
    starts = range(0, len(losses), batch)
    return {
        "loss_curve": [
            math.fsum(losses[start : start + batch]) / math.fsum(tokens[start : start + batch]) for start in starts
        ],
        "loss_curve_s": [float(ends[start : start + batch].max()) for start in starts],
    }


def _losses(training: Training) -> tuple[list[float], list[int]]:
    """The loss of every microbatch, summed over its tokens, and how many there are; 1 where all are alike."""
    workload = training.workload
    window, found = workload.num_microbatches, sorted(training.passes.losses.items())
    tokens = [workload.tokens(microbatch) for microbatch, _ in found]
    steps = [sum(tokens[place - place % window :][:window]) for place in range(len(found))]
    return [share * step for (_, share), step in zip(found, steps, strict=True)], tokens
