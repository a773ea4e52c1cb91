"""Limits of time and bytes that are linear in the layers of each stage, and the least step that keeps to all limits."""

from dataclasses import dataclass
from math import inf

import numpy as np
import numpy.typing as npt

from rpbench.plan.linear import Floats, prices

MOST_ROUNDS, SETTLED = 8, 1e-6
MOST_TIMES = 1e3  # a step longer than this multiple of the first bound counts as infeasible


@dataclass(frozen=True)
class Limit:
    """A limit on a device's time in a step, or on its bytes."""

    # of_layers, of_kept: use per layer of each stage, and per layer that is not recomputed, (stages,)
    of_layers: Floats
    of_kept: Floats
    fixed: float  # use that does not depend on the cut
    room: float | None = None  # limit in bytes; None: the limit is the length of the step
    device: int = 0


def least_limit(rows: list[Limit], start: float, num_layers: int) -> float:
    """The shortest step (the limit of rows without `room`) at which all layers find room; infinite if none does.

    Prices at one limit bound the layers at every other limit, and so give a lower bound on the limit needed.
    """
    stages = len(rows[0].of_layers)
    table = np.array([np.concatenate((row.of_layers, row.of_kept)) for row in rows])
    scale = np.array([start if row.room is None else row.room for row in rows])
    at_nothing = np.array([(row.room or 0.0) - row.fixed for row in rows]) / scale
    is_open = np.array([row.room is None for row in rows]) / scale
    table /= scale[:, None]
    kept = np.concatenate((-np.eye(stages), np.eye(stages)), axis=1)  # k <= x
    table = np.concatenate((table, kept))
    at_nothing, is_open = (np.concatenate((each, np.zeros(stages))) for each in (at_nothing, is_open))
    value = np.concatenate((np.ones(stages), np.zeros(stages)))
    for _ in range(MOST_ROUNDS):
        price = prices(table, at_nothing + start * is_open, value)
        if not np.isfinite(price).all():
            return start
        at_zero, each = float(price @ at_nothing), float(price @ is_open)
        if each * start <= 1e-9 * num_layers:
            return inf if at_zero < num_layers * (1 - SETTLED) else start
        needed = (num_layers - at_zero) / each
        if needed <= start * (1 + SETTLED):
            return max(start, needed)
        start = needed
    return start


def least_of_whole_layers(
    rows: list[Limit], device_of: list[int], keeps: Floats, start: float, num_layers: int
) -> float:
    """The shortest step if every device has one stage of whole layers, recomputed entirely or not at all.

    Stages are filled one after the other: a device's start time depends on the number of layers below it.
    """
    before, choices = np.arange(num_layers + 1), list[list[tuple[Floats, list[tuple[float, float, Floats]]]]]()
    for stage, device in enumerate(device_of):
        limits = [row for row in rows if row.device == device]
        choices.append([_room_of(limits, stage, kept, before) for kept in (0, 1)[: 1 + int(keeps[stage] > 0)]])

    def holds(step: float) -> bool:
        reached = before == 0
        for of_stage in choices:
            most = np.zeros(num_layers + 1)
            for room, timed in of_stage:
                for fixed, each, gone in timed:
                    room = np.minimum(room, _fitting(step - fixed - gone, each, num_layers))
                most = np.maximum(most, np.floor(room + 1e-9))
            upto = np.where(reached, np.minimum(before + most, num_layers), -1)
            furthest = np.maximum.accumulate(upto)  # from the layers below, any number up to the most
            reached = (furthest >= before) & np.logical_or.accumulate(reached)
        return bool(reached[num_layers])

    low, high = start, start
    while not holds(high):
        low, high = high, high * 1.25
        if high > MOST_TIMES * start:
            return inf
    while high - low > SETTLED * high:
        middle = (low + high) / 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return low


def _room_of(
    limits: list[Limit], stage: int, kept: int, before: npt.NDArray[np.int64]
) -> tuple[Floats, list[tuple[float, float, Floats]]]:
    """Most layers of a stage by its byte limits, per number of layers below it, and its limits of time.

    A limit of time is the fixed use, the use per layer, and the use of the layers below.
    """
    room, timed = np.full(len(before), float(len(before) - 1)), list[tuple[float, float, Floats]]()
    for row in limits:
        if row.room is not None and not kept and row.of_kept.any():  # a limit on activations that stay in flight
            continue
        each = float(row.of_layers[stage] + kept * row.of_kept[stage])
        gone: Floats = np.asarray(before * (float(row.of_layers[:stage].min()) if stage else 0.0), np.float64)
        if row.room is None:
            timed.append((row.fixed, each, gone))
        else:
            room = np.minimum(room, _fitting(row.room - row.fixed - gone, each, len(before) - 1))
    return room, timed


def _fitting(left: Floats, each: float, num_layers: int) -> Floats:
    """The number of layers that fit into what is left, each using `each`."""
    return left / each if each > 0 else np.where(left < 0, -1.0, num_layers)
