"""Adjustments: weights that are no version but made for one microbatch, on their way through a run.

Everything here happens on the lane of its stage, between two of its steps, so what it reads of the optimizer is the
state of the newest version. Sets of weights are lent to the stages under numbers below zero.
"""

from collections.abc import Sequence

import torch

from rpbench.engine.state.gradient_sums.gradients import Tensors
from rpbench.engine.state.updates.compensation import Compensation, Delays, correction_share
from rpbench.engine.state.updates.optimizer import HostOptimizer
from rpbench.engine.state.weights import Weights


class Adjustments:
    """The weights that forward and backward run on, where they differ from the version they read."""

    def __init__(
        self,
        settings: Compensation,
        delays: Delays,
        weights: Weights,
        optimizer: HostOptimizer,
        stages: Sequence[range],
        num_microbatches: int,
    ) -> None:
        self._settings, self._delays, self._weights, self._optimizer = settings, delays, weights, optimizer
        self._stages, self._window = stages, num_microbatches
        self._moves: dict[int, Tensors] = {stage: {} for stage in range(len(stages))}  # delta of T2
        self._left: dict[tuple[int, int], int] = {}  # (stage, number) -> microbatches still to run on a lent set

    def before_forward(self, stage: int, microbatch: int, version: int) -> int:
        """The number of the weights a forward runs on: the version it reads, or a set lent to it."""
        horizon, _ = self._delays.horizons(self._settings.predictor, stage, microbatch)
        if not horizon:
            return version
        number = -1 - 2 * (microbatch // self._window)  # one prediction for all microbatches of a step
        if (stage, number) not in self._left:
            self._lend(stage, number, self._ahead(stage, version, horizon))
            self._left[stage, number] = self._window
        return number

    def after_forward(self, stage: int, number: int) -> None:
        """Take a lent set back once the last microbatch of the step has run on it."""
        if number < 0:
            self._left[stage, number] -= 1
            if not self._left[stage, number]:
                del self._left[stage, number]
                self._take_back(stage, number)

    def before_backward(self, stage: int, microbatch: int, version: int) -> int:
        """The same for a backward."""
        _, horizon = self._delays.horizons(self._settings.predictor, stage, microbatch)
        number = -2 - 2 * microbatch
        if horizon:
            self._lend(stage, number, self._ahead(stage, version, horizon))
            return number
        drift = self._delays.drift(stage, microbatch)
        if self._settings.correction_decay is None or not drift:
            return version
        self._lend(stage, number, self._corrected(stage, drift))
        return number

    def after_backward(self, stage: int, number: int) -> None:
        if number < 0:
            self._take_back(stage, number)

    def before_step(self, stage: int) -> Tensors:
        """The masters as they are, where their move is to be followed."""
        if self._settings.correction_decay is None:
            return {}
        return {place: master.clone() for place, master in self._masters(stage).items()}

    def after_step(self, stage: int, before: Tensors) -> None:
        """Note how far the masters have moved: delta = gamma delta + (1 - gamma) (new - old)."""
        if self._settings.correction_decay is None:
            return
        share = correction_share(self._delays.tau[stage], self._settings)
        moves, masters = self._moves[stage], self._masters(stage)
        for place, old in before.items():
            moves[place] = share * moves.get(place, torch.zeros_like(old)) + (1 - share) * (masters[place] - old)

    def _masters(self, stage: int) -> Tensors:
        return self._optimizer.values(self._stages[stage])

    def _ahead(self, stage: int, version: int, horizon: int) -> Tensors:
        return self._optimizer.ahead(stage, version, horizon, with_decay=self._settings.predictor == "pipeoptim")

    def _corrected(self, stage: int, drift: int) -> Tensors:
        moves = self._moves[stage]
        return {
            place: master - drift * moves[place] if place in moves else master
            for place, master in self._masters(stage).items()
        }

    def _lend(self, stage: int, number: int, values: Tensors) -> None:
        for module in self._stages[stage]:
            self._weights.lend(module, number, values)

    def _take_back(self, stage: int, number: int) -> None:
        for module in self._stages[stage]:
            self._weights.take_back(module, number)
