"""Fitting: as little recomputation as the memory allows, stage by stage.

Stages keep their activations from the last one up, for it has fewest microbatches in flight, as long as every device
that holds them has room. Stages that share no device are decided at once.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


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
