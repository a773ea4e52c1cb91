"""The program of a rotation: the cut with the shortest modelled step, by branch and bound.

Stages are added one by one; partial cuts that no completion makes shorter than the best cut known are dropped
(`rpbench.plan.of_mobius.rotation_bound`). The best cut known begins as that of a descent which moves one layer at a
time. Partial cuts are extended in batches, the deepest first, so that memory stays bounded. What is found is proven to
be the best under the model, unless `LIMIT` partial cuts were not enough: then it is the best cut seen, and says so.
"""

from collections.abc import Iterable, Sequence
from itertools import permutations
from typing import NamedTuple

import numpy as np

from rpbench.ir.partition import split_evenly
from rpbench.plan.of_mobius.rotation import Ints, Rotation
from rpbench.plan.of_mobius.rotation_bound import TOLERANCE, Bounds, Partials, extend, nothing, whole_steps

BATCH = 20_000  # partial cuts that are extended together
LIMIT = 3_000_000  # partial cuts in all: less than a minute


class Program(NamedTuple):
    """What the program found.

    Args:
        counts: layers of each stage; empty where nothing fits.
        step: modelled, in the rotation's unit; infinite where nothing fits.
        proven: whether no cut is shorter under the model.
    """

    counts: tuple[int, ...]
    step: float
    proven: bool


def solve(rotation: Rotation, numbers: Iterable[int], limit: int = LIMIT) -> Program:
    """The best cut into any of these numbers of stages, each at least that of the devices.

    Every stage has a layer, but the last may hold the head alone.
    """
    starts = [found for num_stages in numbers if (found := _descend(rotation, num_stages)) is not None]
    starts.sort(key=lambda found: found[1])
    best, step = starts[0] if starts and starts[0][1] < np.inf else ((), np.inf)
    looked = 0
    for start, _ in starts:
        counts, step, seen = _branch(rotation, len(start), step, limit - looked)
        looked += seen
        best = counts or best
    return Program(best, step, looked < limit)


def _descend(rotation: Rotation, num_stages: int) -> tuple[tuple[int, ...], float] | None:
    """A cut that no move of one layer between two stages makes shorter, and its step; None for too few layers."""
    starts = _plain(rotation.num_layers, num_stages)
    if not starts:
        return None
    table = np.array(starts)
    steps = rotation.step_times(table)
    counts, step = table[steps.argmin()], steps.min()
    while True:
        table = _moves(counts)
        steps = rotation.step_times(table) if len(table) else np.array([np.inf])
        if not steps.min() < step * (1 - TOLERANCE):
            return tuple(counts.tolist()), float(step)
        counts, step = table[steps.argmin()], steps.min()


def _plain(num_layers: int, num_stages: int) -> list[tuple[int, ...]]:
    """Even cuts, with the head in a stage of its own as well."""
    found = []
    if num_layers >= num_stages:
        found.append(split_evenly(num_layers, num_stages))
    if num_stages > 1 and num_layers >= num_stages - 1:
        found.append((*split_evenly(num_layers, num_stages - 1), 0))
    return found


def _moves(counts: Ints) -> Ints:
    """All cuts one layer away."""
    last = len(counts) - 1
    found = []
    for giver, taker in permutations(range(len(counts)), 2):
        if counts[giver] > (giver < last):
            moved = counts.copy()
            moved[giver] -= 1
            moved[taker] += 1
            found.append(moved)
    return np.array(found, np.int64).reshape(-1, len(counts))


def _branch(rotation: Rotation, num_stages: int, target: float, limit: int) -> tuple[tuple[int, ...], float, int]:
    """The best cut shorter than the target, empty if there is none; its step; and how many partial cuts were seen."""
    bounds, looked = Bounds(rotation, num_stages), 0
    best: tuple[int, ...] = ()
    stack = [nothing()]
    while stack and looked < limit:
        grown = _grow(rotation, num_stages, stack.pop())
        looked += len(grown)
        if not len(grown):
            continue
        if grown.counts.shape[1] == num_stages:
            steps = whole_steps(rotation, num_stages, grown)
            if steps.min() < target * (1 - TOLERANCE):
                best, target = tuple(grown.counts[steps.argmin()].tolist()), float(steps.min())
            continue
        grown = grown.take(bounds.may_beat(grown, target))
        promise = np.argsort(-(grown.end[:, -1] + grown.from_start[:, -1]), kind="stable")
        stack += [grown.take(promise[first : first + BATCH]) for first in range(0, len(grown), BATCH)]
    return best, target, looked


def _grow(rotation: Rotation, num_stages: int, partials: Partials) -> Partials:
    """Every partial cut with every size of the next stage that leaves a layer for each stage behind it but the last."""
    number = partials.counts.shape[1]
    left = rotation.num_layers - partials.counts.sum(axis=1)
    if number == num_stages - 1:
        return extend(rotation, num_stages, partials, np.arange(len(partials)), left)
    most = left - (num_stages - 2 - number)
    chosen = np.repeat(np.arange(len(partials)), np.maximum(most, 0))
    sizes: Sequence[Ints] = [np.arange(1, each + 1) for each in most.tolist()]
    return extend(rotation, num_stages, partials, chosen, np.concatenate([np.zeros(0, np.int64), *sizes]))
