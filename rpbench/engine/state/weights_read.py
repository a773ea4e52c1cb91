"""Weights read: the version that each action of a schedule uses, and weights adjusted to late gradients.

Adjusted weights are made on the lane of their stage, between two of its steps, from the optimizer's newest state. They
are lent to the stage under a number below zero, as if it were a version.
"""

from collections import Counter
from collections.abc import Sequence

import torch

from rpbench.engine.layout import Layout
from rpbench.engine.state.gradients import Tensors
from rpbench.engine.state.updates.compensation import Compensation, Delays, correction_share
from rpbench.engine.state.updates.optimizer import HostOptimizer
from rpbench.engine.state.weights import Weights
from rpbench.ir.action import COMPUTE, Action, parts_of
from rpbench.ir.analysis import Analysis
from rpbench.ir.policy import STEPS_BEHIND


class Reads:
    """The weight version that each action reads: by the step of its microbatch, or by replay of the order.

    Without STEP actions there is version 0 alone. A resumed run begins with version 0 and those of the `num_stale`
    versions before it that are read: -1, -2, ...
    """

    def __init__(self, analysis: Analysis, num_stale: int = 0) -> None:
        self._analysis, self.schedule, self.has_steps = analysis, analysis.schedule, analysis.has_steps
        self.num_stale = min(num_stale, STEPS_BEHIND.get(self.schedule.policy, 0))

    def version(self, action: Action, number: int) -> int:
        """The version that a compute action reads; the number is its place in the schedule."""
        assert action.microbatch is not None
        fixed = self.fixed(action.microbatch)
        if fixed is not None:
            return fixed
        found = self._analysis.versions.of(number, action)
        assert found is not None
        return found

    def fixed(self, microbatch: int) -> int | None:
        """The weight version that every action of a microbatch reads; None if it depends on the order."""
        behind = STEPS_BEHIND.get(self.schedule.policy)
        if behind is None:
            return None if self.has_steps else 0
        newest = microbatch // self.schedule.shape.num_microbatches if self.has_steps else 0
        return max(newest - behind, -self.num_stale)

    def count(self, layout: Layout) -> Counter[tuple[int, int]]:
        """(module, version) -> the number of actions that read it."""
        counted: Counter[tuple[int, int]] = Counter()
        for number, action in enumerate(self._analysis.index.actions):
            for part in parts_of(action):
                if part.kind in COMPUTE:
                    version = self.version(part, number)
                    counted.update((module, version) for module in layout.modules_of(part))
        return counted


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
        """The number of the weights a backward runs on: the version it reads, or a set lent to it."""
        _, horizon = self._delays.horizons(self._settings.predictor, stage, microbatch)
        number = -2 - 2 * microbatch
        if horizon:
            self._lend(stage, number, self._ahead(stage, version, horizon))
            return number
        drift, moves = self._delays.drift[stage, microbatch], self._moves[stage]
        if self._settings.correction_decay is None or not drift:
            return version
        masters = self._masters(stage)
        self._lend(stage, number, masters | {place: masters[place] - drift * move for place, move in moves.items()})
        return number

    def after_backward(self, stage: int, number: int) -> None:
        if number < 0:
            self._take_back(stage, number)

    def before_step(self, stage: int) -> Tensors:
        """A copy of the masters for `after_step`; empty without T2."""
        if self._settings.correction_decay is None:
            return {}
        return {place: master.clone() for place, master in self._masters(stage).items()}

    def after_step(self, stage: int, before: Tensors) -> None:
        """Update the mean move of the masters: delta = gamma delta + (1 - gamma) (new - old)."""
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

    def _lend(self, stage: int, number: int, values: Tensors) -> None:
        for module in self._stages[stage]:
            self._weights.lend(module, number, values)

    def _take_back(self, stage: int, number: int) -> None:
        for module in self._stages[stage]:
            self._weights.take_back(module, number)
