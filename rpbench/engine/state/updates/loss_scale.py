"""Loss scaling: keeps the gradients of 16-bit floats within their range.

The loss is multiplied before the backward, and what comes out is divided again before the optimizer looks at it. A
gradient that is not finite skips the step and halves the scale; after a number of good steps the scale doubles.

Scales belong to weight versions. The gradients of a step are made with the scale of the version they read, and that
scale, as it fared in this step, makes the scale of the version the step brings about. Trained synchronously, each
scale thus follows from the one before. One step stale, iteration k + 1 runs with what came of iteration k - 1: two
scalers that take turns, neither of which answers for the other's overflow.

Sources: Micikevicius et al., "Mixed Precision Training", ICLR'18, section 3.2; for the two scalers the RoundPipe
paper's library.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from rpbench.engine.transfers.peers import at

FACTOR = 2.0  # a power of two, so that scaling changes no digit


@dataclass(frozen=True)
class LossScaling:
    """The rule.

    Args:
        initial: the first scale.
        growth_steps: good steps in a row after which a scale doubles.
    """

    initial: float = 65536.0
    growth_steps: int = 2000

    def __post_init__(self) -> None:
        if not (self.initial > 0 and math.isfinite(self.initial) and math.frexp(self.initial)[0] == 0.5):
            raise ValueError(f"loss_scale={self.initial}: a power of two, such as 65536, changes no digit")
        if self.growth_steps < 1:
            raise ValueError(f"loss_scale_growth_steps={self.growth_steps}: a number of steps, at least 1")

    def follow(self, before: "Scale", *, finite: bool) -> "Scale":
        """The scale after a step with it."""
        if not finite:
            return Scale(before.value / FACTOR, 0)
        if before.num_good + 1 < self.growth_steps:
            return Scale(before.value, before.num_good + 1)
        return Scale(before.value * FACTOR, 0)


class Scale(NamedTuple):
    """What a loss is multiplied by, and for how many steps in a row that went well."""

    value: float
    num_good: int = 0


class LossScaler:
    """The scales of a run, by weight version.

    Args:
        start: the scales of the versions a run begins with; None: the first one.

    Attributes:
        scales: version -> its scale.
        skipped: versions of the steps that changed nothing.
    """

    def __init__(self, rule: LossScaling, start: dict[int, Scale] | None = None) -> None:
        self.scales = dict(start) if start else {0: Scale(rule.initial)}
        self.skipped: set[int] = set()
        self._rule = rule

    def of(self, version: int) -> float:
        """The scale of the gradients of whoever reads this version."""
        return self.scales[version].value

    def advance(self, version: int, read: int, gradients: Iterable[torch.Tensor]) -> bool:
        """Note how the step to `version` went, whose gradients read version `read`; whether it is to be taken."""
        finite = all(map(_is_finite, gradients))
        self.scales[version] = self._rule.follow(self.scales[read], finite=finite)
        if not finite:
            self.skipped.add(version)
        return finite


def _is_finite(gradient: torch.Tensor) -> bool:
    with at(gradient.device):
        return bool(torch.isfinite(gradient).all())
