"""Activations on each device at its peak, and as little recomputation as the memory allows (recompute=fitting).

From the last stage down to the first, because later stages have fewer microbatches in flight, a stage saves the
activations of as many of its layers as fit on every device that runs it: of its last layers, so that one forward from
the stage's input recomputes the others. Stages without a common device are decided together. Megatron-Core does the
same with `--recompute-method block` (Korthikanti et al., arXiv 2205.05198, section 5).
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from operator import itemgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from rpbench.cost.arrays import Ints
from rpbench.ir.action import Action, Kind
from rpbench.ir.analysis import Analysis
from rpbench.ir.checks.residency import moves_activations
from rpbench.ir.schedule import Schedule

# Largest size of a product for BLAS on one thread; on several, threads would wait longer than the product takes.
ON_ONE_THREAD = 200_000
AT_ONCE = 400  # most choices, of all plans together, that are counted in one call: more take longer than bisection


class Moments:
    """Microbatches in flight on each device at its peaks; one product for all devices, as there are thousands of cuts.

    Args:
        of_devices: for each device, microbatches of each stage, (moments, stages), of at least one moment.
    """

    def __init__(self, of_devices: Sequence[npt.NDArray[Any]]) -> None:
        self._levels = np.concatenate(of_devices).T.astype(np.float64)  # (stages, moments of all devices)
        self._first = np.cumsum([0, *map(len, of_devices[:-1])])
        self.hold_anything = bool(self._levels.any())

    def peaks(self, each: Ints) -> Ints:
        """The most bytes on each device, (..., devices), for bytes per microbatch of each stage, (..., stages)."""
        plans = each.reshape(-1, each.shape[-1]).astype(np.float64)  # exact below 2^53, many times as fast as integers
        found = np.empty((len(plans), len(self._first)), each.dtype)
        step = max(1, ON_ONE_THREAD // self._levels.size)
        for at in range(0, len(plans), step):
            found[at : at + step] = np.maximum.reduceat(plans[at : at + step] @ self._levels, self._first, axis=1)
        return found.reshape(*each.shape[:-1], len(self._first))


def undominated(levels: Ints) -> Ints:
    """The rows that no other row equals or exceeds in every stage, once each; a row of zeros if there are none."""
    kept, others = [], np.concatenate([np.zeros((1, levels.shape[1]), np.int64), levels])
    others = others[np.lexsort(others.T[::-1])[::-1]]  # from the most of the first stage down
    others = others[np.concatenate([[True], (others[1:] != others[:-1]).any(axis=1)])]
    while len(others):  # a row is dropped if the first one has at least as much of every stage
        kept.append(others[0])
        others = others[(others > others[0]).any(axis=1)]
    return np.array(kept)


def levels_of(analysis: Analysis, each: Sequence[float] = (), parts: Sequence[float] = (1.0,)) -> list[Ints]:
    """Microbatches in flight of each stage at the peaks, for each device, (moments, columns).

    A microbatch counts `each` (1 if empty, or if activations move), and between I and W a part of that. `parts`:
    between I and W, of activations, of logits and of stage inputs. The first has a column for each stage; the second,
    if given, one more; the third, if given, one more for each stage.
    """
    schedule = analysis.schedule
    stages = schedule.shape.num_stages
    columns = [*range(stages), stages - 1, *range(stages)][: sum(_widths(stages, parts))]
    if moves_activations(schedule):
        return [np.array(sorted(levels), np.int64)[:, columns] for levels in analysis.resident_levels]

    def changes(kind: Ints, stage: Ints, counts: Any) -> tuple[Ints, Any]:
        begins, ends = kind == Kind.F, (kind == Kind.B) | (kind == Kind.W)
        change: Any = _changes(begins.astype(np.int64) - ends, stage, stages, counts)[:, columns]
        if min(parts) < 1 and Kind.I in kind:
            halves = _changes((kind == Kind.I).astype(np.int64) - (kind == Kind.W), stage, stages, counts)
            change = change - (1 - np.repeat(parts, _widths(stages, parts))) * halves[:, columns]
        return begins, change

    return _at_peaks(schedule, each, changes)


def _widths(num_stages: int, parts: Sequence[float]) -> tuple[int, ...]:
    return (num_stages, 1, num_stages)[: len(parts)]


def waiting_halves(schedule: Schedule, each: Sequence[float] = ()) -> list[Ints]:
    """Microbatches of each stage between I and W, at the peaks, for each device, (moments, stages)."""

    def changes(kind: Ints, stage: Ints, counts: Any) -> tuple[Ints, Any]:
        begins = kind == Kind.I
        return begins, _changes(begins.astype(np.int64) - (kind == Kind.W), stage, schedule.shape.num_stages, counts)

    return _at_peaks(schedule, each, changes)


def _at_peaks(
    schedule: Schedule, each: Sequence[float], of: Callable[[Ints, Ints, Any], tuple[Ints, Any]]
) -> list[Ints]:
    """Microbatches at the peaks of each device, (moments, columns).

    `of` tells of actions, as of `columns_of`, which of them take room and what each adds to every column.
    """
    rows = [columns_of(schedule.compute(device), each) for device in range(schedule.shape.num_ranks)]
    keys = [tuple(column.tobytes() for column in row) for row in rows]
    known = dict(zip(keys, rows, strict=True))  # computed once for devices with equal rows
    begins, change = of(*map(np.concatenate, zip(*known.values(), strict=True)))
    ends = np.cumsum([len(kind) for kind, _, _ in known.values()])
    parts = (slice(first, end) for first, end in pairwise([0, *ends.tolist()]))
    found = [undominated(np.cumsum(change[own], axis=0)[begins[own]]) for own in parts]
    of_rows = dict(zip(known, found, strict=True))
    return [of_rows[key] for key in keys]


def columns_of(row: Sequence[Action], each: Sequence[float] = ()) -> tuple[Ints, Ints, Any]:
    """Kind and stage of every plain action of a row, and what its microbatch counts: 1, or its part of `each`."""
    kinds = bytes(map(itemgetter(0), row))
    if Kind.OVERLAP in kinds:
        row = [part for action in row for part in action.sub or (action,)]
        kinds = bytes(map(itemgetter(0), row))
    kind = np.frombuffer(kinds, np.uint8).astype(np.int64)  # many times as fast as from members of `Kind`
    stage = np.fromiter(map(itemgetter(1), row), np.int64, len(row))
    counts = np.array([each[(part.microbatch or 0) % len(each)] for part in row] if each else 1)
    return kind, stage, np.broadcast_to(counts, kind.shape)


def _changes(signs: Ints, stage: Ints, num_stages: int, counts: Any) -> Ints:
    """What each action adds to its stage's microbatches in flight, (actions, stages)."""
    found, chosen = np.zeros((len(stage), num_stages), counts.dtype), np.flatnonzero(signs)
    found[chosen, stage[chosen]] = signs[chosen] * counts[chosen]
    return found


def fitting_layers(peak_bytes: Callable[[Ints], Ints], layers: Ints, holds: Ints, limit_bytes: int | None) -> Ints:
    """The layers of each backward stage whose activations are saved, (plans, stages); none where a plan never fits.

    Args:
        peak_bytes: bytes on the devices of each plan, (choices, plans, devices), for choices of such numbers of layers.
        layers: of each backward stage, (plans, stages).
        holds: 1 where a stage runs on a device, (stages, devices).
        limit_bytes: of a device; None: no limit, and nothing is recomputed.
    """
    if limit_bytes is None:
        return layers
    ends: Any = (peak_bytes(np.stack([layers, 0 * layers])) <= limit_bytes).all(axis=-1)
    all_fit, none_fit = ends
    chosen, is_open = np.where(all_fit[:, None], layers, 0), none_fit & ~all_fit
    turns = _turns(holds)
    for turn in range(turns.max() + 1) if is_open.any() else ():
        stages = np.flatnonzero(turns == turn)
        least = chosen[:, stages]
        most = np.where(is_open[:, None], layers[:, stages], least)
        num = int(most[is_open].max(initial=0))
        at_once = num * len(layers) <= AT_ONCE
        if at_once:
            choices = np.repeat(chosen[None], num, axis=0)  # 1, 2, ... layers
            choices[:, :, stages] = np.minimum(np.arange(1, num + 1)[:, None, None], most)
            of_choices = _stages_that_fit(peak_bytes(choices), holds[stages], limit_bytes)
        tried = most  # whole stages first: they recompute nothing
        while (most > least).any():
            if at_once:
                fits = np.take_along_axis(of_choices, tried.clip(1, num)[None] - 1, axis=0)[0]
            else:
                chosen[:, stages] = tried
                fits = _stages_that_fit(peak_bytes(chosen[None])[0], holds[stages], limit_bytes)
            least, most = np.where(fits, tried, least), np.where(fits, most, np.maximum(least, tried - 1))
            tried = (least + most + 1) // 2
        chosen[:, stages] = least
    return chosen


def _stages_that_fit(peaks: Ints, holds: Ints, limit_bytes: int) -> Any:
    """Whether all devices of a stage keep to the limit, (..., stages), by their bytes, (..., devices)."""
    return ((peaks > limit_bytes).astype(np.int64) @ holds.T) == 0


def _turns(holds: Ints) -> Ints:
    """The turn in which each stage is decided, (stages,): after all later stages on the same devices."""
    found = np.zeros(len(holds), np.int64)
    shares = (holds @ holds.T) > 0
    for stage in reversed(range(len(holds))):
        found[stage] = (found[stage + 1 :][shares[stage, stage + 1 :]] + 1).max(initial=0)
    return found
