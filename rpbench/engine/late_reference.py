"""Late reference: what the papers do about late gradients, written down once more for the reference to compute with.

The engine has these rules in `rpbench.engine.state.updates.compensation`. Nothing is taken from there, so that a wrong
constant in either place shows in verification. What a user chooses (K, D, the synchronous steps, the predictor) comes
with the settings; what follows from it is here, and how late a gradient is follows from the versions that the lanes
read.

    T1   alpha_k = alpha tau^-p_k       p_k = 1 - min(k / K, 1)       k from the first step that is not flushed
    T2   delta <- gamma delta + (1 - gamma) (w_new - w_old)           gamma = D^(1 / tau)
         backward on w - (tau_forward - tau_backward) delta

T1 of the paper makes a stage that is less than a step late faster; no stage is here, nor in the engine.

Sources: Yang et al., "PipeMare", MLSys'21 (arXiv 1910.05124), section 3; the horizons of Guan et al., PipeOptim (arXiv
2312.00839) and XPipe (arXiv 1911.04610), and of Chen et al., SpecTrain (arXiv 1809.02839).
"""

from collections.abc import Callable
from functools import cache

import torch


class Lateness:
    """How many steps late the gradients of a module are: the step they belong to less the version forward read.

    Args:
        read: (module, microbatch) -> the version that forward reads.
        num_microbatches: of a step.
    """

    def __init__(self, read: Callable[[int, int], int], num_microbatches: int, num_steps: int) -> None:
        self._read, self._window = read, num_microbatches
        self._last = range((num_steps - 1) * num_microbatches, num_steps * num_microbatches)
        self.tau = cache(self._tau)

    def steps(self, module: int, microbatch: int) -> int:
        """Of one microbatch."""
        return microbatch // self._window - self._read(module, microbatch)

    def of_step(self, module: int, microbatch: int) -> int:
        """Of the first microbatch of the same step."""
        return self.steps(module, microbatch - microbatch % self._window)

    def _tau(self, module: int) -> float:
        """The mean over the last step, by when the pipeline is full."""
        return sum(self.steps(module, microbatch) for microbatch in self._last) / len(self._last)


def rate_factor(tau: float, step: int, num_steps_to_full: int, num_sync_steps: int) -> float:
    """T1: what the learning rate is multiplied by at a step, which counts from 0.

    Args:
        num_steps_to_full: K; 0: no rescheduling.
        num_sync_steps: steps before k = 0.
    """
    k = step - num_sync_steps
    if num_steps_to_full == 0 or k < 0 or tau <= 1:
        return 1.0
    p = 1.0 - min(k / num_steps_to_full, 1.0)
    return float(tau**-p)


def mean_move(mean: torch.Tensor, old: torch.Tensor, new: torch.Tensor, tau: float, decay: float) -> torch.Tensor:
    """T2: delta with the newest move in it; of a stage that is not late the newest alone."""
    gamma = decay ** (1.0 / tau) if tau > 0 else 0.0
    return gamma * mean + (1 - gamma) * (new - old)


def corrected(weight: torch.Tensor, steps_apart: int, mean: torch.Tensor) -> torch.Tensor:
    """T2: about what a weight was that many steps ago."""
    return weight - steps_apart * mean


def horizons(predictor: str, stage: int, late: int) -> tuple[int, int]:
    """Steps that forward and backward look ahead.

    All look to the step that adds the gradient. SpecTrain looks on, to when the microbatch is back at the first stage:
    floor(k / 2) further on stage k, both ways.

    Args:
        late: how late the gradients of the step's first microbatch are; all microbatches of the step look as far.
    """
    if not predictor:
        return 0, 0
    further = stage // 2 if predictor == "spectrain" else 0
    return late + further, further
