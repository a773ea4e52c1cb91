"""Fitting: as little recomputation as the memory allows, stage by stage.

Stages keep their activations from the last one up, for it has fewest microbatches in flight, as long as every device
that holds them has room.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


def fitting_stages(
    peak_bytes: Callable[[Bools], Ints], num_plans: int, num_stages: int, limit_bytes: int | None
) -> Bools:
    """Which backward stages of each plan recompute nothing, (plans, stages).

    Args:
        peak_bytes: of the fullest device of each plan, (plans,), by the stages that keep their activations.
        limit_bytes: of a device; None: no limit, and every stage keeps them.
    """
    everyone, chosen = np.ones((num_plans, num_stages), bool), np.zeros((num_plans, num_stages), bool)
    if limit_bytes is None:
        return everyone
    all_fit = peak_bytes(everyone) <= limit_bytes
    open_ = ~all_fit & (peak_bytes(chosen) <= limit_bytes)
    for stage in reversed(range(num_stages)) if open_.any() else ():
        chosen[:, stage] = open_
        chosen[:, stage] &= peak_bytes(chosen) <= limit_bytes
    return np.where(all_fit[:, None], everyone, chosen)
