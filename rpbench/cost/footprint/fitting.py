"""Fitting: activations on each device at its peak, and as little recomputation as the memory allows, layer by layer.

From the last stage up, for it has the fewest microbatches in flight, a stage keeps the activations of as many of its
layers as every device that runs it has room for: of its last layers, so that one run from the stage's input makes the
others again. Stages that share no device are decided at once. Megatron-Core does the same with
`--recompute-method block` (Korthikanti et al., arXiv 2205.05198, section 5).
"""

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from rpbench.ir.action import Action, Kind
from rpbench.ir.analysis import Analysis
from rpbench.ir.checks.residency import moves_activations

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

# Size of a product that BLAS adds up on one thread; beyond it, threads wait for each other longer than it takes.
ON_ONE_THREAD = 200_000


class Moments:
    """The microbatches on each device at its moments; asked for thousands of cuts, so for all devices at once.

    Args:
        of_devices: for each device, microbatches of each stage, (moments, stages); every device has a moment.
    """

    def __init__(self, of_devices: Sequence[npt.NDArray[Any]]) -> None:
        self._levels = np.concatenate(of_devices).T.astype(np.float64)  # (stages, moments of all devices)
        self._first = np.cumsum([0, *map(len, of_devices[:-1])])
        self.hold_anything = bool(self._levels.any())

    def peaks(self, each: Ints) -> Ints:
        """The most bytes on each device, (plans, devices), from bytes a microbatch of each stage, (plans, stages)."""
        held = np.empty((len(each), self._levels.shape[1]))
        step = max(1, ON_ONE_THREAD // self._levels.size)
        for at in range(0, len(each), step):  # exact below 2^53 bytes, and many times as fast as integers
            held[at : at + step] = each[at : at + step].astype(np.float64) @ self._levels
        found: Ints = np.maximum.reduceat(held, self._first, axis=1).astype(each.dtype)
        return found


def undominated(levels: Ints) -> Ints:
    """The rows that have more of some stage than every other row, once each; a row of zeros if there are none."""
    kept, others = [], np.concatenate([np.zeros((1, levels.shape[1]), np.int64), levels])
    others = others[np.lexsort(others.T[::-1])[::-1]]  # from the most of the first stage down
    others = others[np.concatenate([[True], (others[1:] != others[:-1]).any(axis=1)])]
    while len(others):  # a row is dropped if the first one has at least as much of every stage
        kept.append(others[0])
        others = others[(others > others[0]).any(axis=1)]
    return np.array(kept)


def levels_of(
    analysis: Analysis, each: Sequence[float] = (), until_weights: float = 1.0, of_logits: float | None = None
) -> list[Ints]:
    """Microbatches of each stage on each device at its peaks, (moments, stages) for each device.

    A microbatch counts `each` (1 where that is empty), or 1 where activations move; between I and W it counts the
    fraction `until_weights`. With `of_logits` one more column counts the logits, between I and W at that fraction.
    """
    schedule = analysis.schedule
    if moves_activations(schedule):
        found = [np.array(sorted(levels), np.int64) for levels in analysis.resident_levels]
        return found if of_logits is None else [np.hstack([levels, levels[:, -1:]]) for levels in found]
    stages, devices = schedule.shape.num_stages, range(schedule.shape.num_ranks)
    parts = (until_weights,) if of_logits is None else (until_weights, of_logits)
    rows = [columns_of(schedule.compute(device), each) for device in devices]
    keys = [tuple(column.tobytes() for column in row) for row in rows]
    known = {key: _moments(row, stages, parts) for key, row in dict(zip(keys, rows, strict=True)).items()}
    return [known[key] for key in keys]  # devices with the same model do the same


def _moments(row: tuple[Ints, Ints, Any], num_stages: int, parts: Sequence[float]) -> Ints:
    """Microbatches in flight of each stage at forwards, at the peaks, (moments, stages); `row` is of `columns_of`."""
    kind, stage, counts = row
    columns = [*range(num_stages), num_stages - 1][: num_stages + len(parts) - 1]

    def changes(signs: Ints) -> Any:
        return _changes(signs, stage, num_stages, counts)[:, columns]

    makes, ends = kind == Kind.F, (kind == Kind.B) | (kind == Kind.W)
    change = changes(makes.astype(np.int64) - ends)
    if min(parts) < 1:
        rest = 1 - np.repeat(parts, (num_stages, 1)[: len(parts)])
        change = change - rest * changes((kind == Kind.I).astype(np.int64) - (kind == Kind.W))
    return undominated(np.cumsum(change, axis=0)[makes])  # no moment between forwards holds more


def waiting_halves(row: Sequence[Action], num_stages: int, each: Sequence[float] = ()) -> Ints:
    """Microbatches of each stage between I and W, at the peaks, (moments, stages)."""
    kind, stage, counts = columns_of(row, each)
    begun = kind == Kind.I
    changes = _changes(begun.astype(np.int64) - (kind == Kind.W), stage, num_stages, counts)
    return undominated(np.cumsum(changes, axis=0)[begun])


def columns_of(row: Sequence[Action], each: Sequence[float] = ()) -> tuple[Ints, Ints, Any]:
    """Kind and stage of every plain action of a row, and the count of its microbatch; 1 where all are alike."""
    kinds = bytes(map(itemgetter(0), row))
    if Kind.OVERLAP in kinds:
        row = [part for action in row for part in action.sub or (action,)]
        kinds = bytes(map(itemgetter(0), row))
    kind = np.frombuffer(kinds, np.uint8).astype(np.int64)  # many times as fast as a look at every member of `Kind`
    stage = np.fromiter(map(itemgetter(1), row), np.int64, len(row))
    counts = np.array([each[(part.microbatch or 0) % len(each)] for part in row] if each else 1)
    return kind, stage, np.broadcast_to(counts, kind.shape)


def _changes(signs: Ints, stage: Ints, num_stages: int, counts: Any) -> Ints:
    """The count of each action's microbatch, with its sign, in the column of its stage, (actions, stages)."""
    found, chosen = np.zeros((len(stage), num_stages), counts.dtype), np.flatnonzero(signs)
    found[chosen, stage[chosen]] = signs[chosen] * counts[chosen]
    return found


def fitting_layers(peak_bytes: Callable[[Ints], Ints], layers: Ints, holds: Ints, limit_bytes: int | None) -> Ints:
    """The layers of each backward stage that keep their activations, (plans, stages).

    Args:
        peak_bytes: of the devices of each plan, (plans, devices), by these numbers.
        layers: of each backward stage, (plans, stages).
        holds: 1 where a stage runs on a device, (stages, devices).
        limit_bytes: of a device; None: no limit, and every layer keeps its activations.
    """
    if limit_bytes is None:
        return layers

    def room(kept: Ints) -> Bools:
        found: Bools = peak_bytes(kept) <= limit_bytes
        return found

    all_fit: Bools = np.asarray(room(layers).all(axis=1))
    chosen = np.where(all_fit[:, None], layers, 0)
    open_ = np.zeros(0, np.int64) if all_fit.all() else np.flatnonzero(~all_fit & room(chosen).all(axis=1))
    turns = _turns(holds)
    for turn in range(turns.max() + 1) if len(open_) else ():
        stages = np.flatnonzero(turns == turn)
        least, most = chosen[:, stages], chosen[:, stages]
        most[open_] = layers[np.ix_(open_, stages)]
        tried = most  # whole stages first: they make nothing again
        while (most > least).any():
            chosen[:, stages] = tried
            fits = ~((~room(chosen)).astype(np.int64) @ holds[stages].T).astype(bool)
            least, most = np.where(fits, tried, least), np.where(fits, most, np.maximum(least, tried - 1))
            tried = (least + most + 1) // 2
        chosen[:, stages] = least
    return chosen


def _turns(holds: Ints) -> Ints:
    """The turn of each stage, (stages,): after all higher stages that share a device with it."""
    found = np.zeros(len(holds), np.int64)
    shares = (holds @ holds.T) > 0
    for stage in reversed(range(len(holds))):
        found[stage] = (found[stage + 1 :][shares[stage, stage + 1 :]] + 1).max(initial=0)
    return found
