"""Limits of time and bytes that are linear in the layers of each stage, and the least step that keeps to all limits."""

from dataclasses import dataclass
from math import inf

import numpy as np

from rpbench.cost.arrays import Floats, Ints
from rpbench.plan.linear import prices

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
    """The shortest step if every device has one stage of whole layers, each recomputed or not.

    Stages are filled one after the other: a device's start time depends on the number of layers below it.
    """
    before = np.arange(num_layers + 1)
    stages = [
        _times_of([row for row in rows if row.device == device], stage, keeps[stage] > 0, before)
        for stage, device in enumerate(device_of)
    ]

    def holds(step: float) -> bool:
        reached = before == 0
        for timed in stages:
            most = np.full(num_layers + 1, num_layers)
            for of_own, of_below in timed:
                most = np.minimum(most, np.searchsorted(of_own, step * (1 + 1e-9) - of_below, side="right") - 1)
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


def _times_of(limits: list[Limit], stage: int, may_keep: bool, layers: Ints) -> list[tuple[Floats, Floats]]:
    """Limits of time of a stage: use by its number of layers, infinite where these do not fit, and by those below it.

    As many layers are not recomputed as the stage's limits of bytes allow: that only saves time.
    """
    kept = np.where(may_keep, layers, 0).astype(float)
    for row in limits:
        if row.room is not None:
            left, each = row.room - row.fixed - row.of_layers[stage] * layers, float(row.of_kept[stage])
            kept = np.minimum(kept, np.floor(left / each + 1e-9) if each > 0 else np.where(left < 0, -1.0, inf))

    def own(row: Limit) -> Floats:
        used: Floats = row.fixed + row.of_layers[stage] * layers + row.of_kept[stage] * kept
        return np.where(kept < 0, inf, used)

    def below(row: Limit) -> Floats:
        return np.asarray(layers * (float(row.of_layers[:stage].min()) if stage else 0.0), np.float64)

    return [(own(row), below(row)) for row in limits if row.room is None]
