"""Fitting: what devices hold when they are fullest, and as little recomputation as the memory allows, stage by stage.

Stages keep their activations from the last one up, for it has fewest microbatches in flight, as long as every device
that holds them has room. Stages that share no device are decided at once.
"""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

# Products that BLAS adds up on one thread: beyond that several wait for each other, longer than such a product takes.
ON_ONE_THREAD = 200_000


class Moments:
    """What each device holds at its moments; asked for thousands of cuts, so that all devices are looked up together.

    Args:
        of_devices: for each device, microbatches of each stage, (moments, stages); every device has a moment.
    """

    def __init__(self, of_devices: Sequence[Ints]) -> None:
        self._levels = np.concatenate(of_devices).T.astype(np.float64)  # (stages, moments of all devices)
        self._first = np.cumsum([0, *map(len, of_devices[:-1])])
        self.hold_anything = bool(self._levels.any())

    def peaks(self, each: Ints) -> Ints:
        """The most bytes on each device, (plans, devices), at so many a microbatch of a stage, (plans, stages)."""
        held = np.empty((len(each), self._levels.shape[1]))
        step = max(1, ON_ONE_THREAD // self._levels.size)
        for at in range(0, len(each), step):  # exact below 2^53 bytes, and many times as fast as of integers
            held[at : at + step] = each[at : at + step].astype(np.float64) @ self._levels
        found: Ints = np.maximum.reduceat(held, self._first, axis=1).astype(each.dtype)
        return found


def undominated(levels: Ints) -> Ints:
    """The rows that have more of some stage than every other one, once; the row of nothing where there is none."""
    kept, others = [], np.concatenate([np.zeros((1, levels.shape[1]), np.int64), levels])
    others = others[np.lexsort(others.T[::-1])[::-1]]  # from the most of the first stage down
    others = others[np.concatenate([[True], (others[1:] != others[:-1]).any(axis=1)])]
    while len(others):  # those of which a row has as much of everything stand behind it
        kept.append(others[0])
        others = others[(others > others[0]).any(axis=1)]
    return np.array(kept)


def fitting_stages(peak_bytes: Callable[[Bools], Ints], num_plans: int, holds: Ints, limit_bytes: int | None) -> Bools:
    """Which backward stages of each plan recompute nothing, (plans, stages).

    Args:
        peak_bytes: of the devices of each plan, (plans, devices), by the stages that keep their activations.
        holds: 1 where a stage runs on a device, (stages, devices).
        limit_bytes: of a device; None: no limit, and every stage keeps them.
    """
    num_stages = len(holds)
    everyone, chosen = np.ones((num_plans, num_stages), bool), np.zeros((num_plans, num_stages), bool)
    if limit_bytes is None:
        return everyone

    def room(keeps: Bools) -> Bools:
        found: Bools = peak_bytes(keeps) <= limit_bytes
        return found

    all_fit: Bools = np.asarray(room(everyone).all(axis=1))
    open_: Bools = np.zeros(num_plans, bool) if all_fit.all() else ~all_fit & np.asarray(room(chosen).all(axis=1))
    turns = _turns(holds)
    for turn in range(turns.max() + 1) if open_.any() else ():
        stages = np.flatnonzero(turns == turn)
        chosen[:, stages] = open_[:, None]
        full = ~room(chosen)
        chosen[:, stages] &= ~(full.astype(np.int64) @ holds[stages].T).astype(bool)
    return np.where(all_fit[:, None], everyone, chosen)


def _turns(holds: Ints) -> Ints:
    """When each stage has its turn, (stages,): behind all higher ones that share a device with it."""
    found = np.zeros(len(holds), np.int64)
    shares = (holds @ holds.T) > 0
    for stage in reversed(range(len(holds))):
        found[stage] = (found[stage + 1 :][shares[stage, stage + 1 :]] + 1).max(initial=0)
    return found
