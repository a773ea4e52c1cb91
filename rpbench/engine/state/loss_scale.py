"""Loss scale: the factor on losses that follows from whether the gradients of all stages are finite.

The scale keeps 16-bit gradients within their range. The loss is multiplied by it before the backward, and gradients are
divided by it before the optimizer's step. A gradient that is not finite skips the step and halves the scale; after a
number of good steps the scale doubles.

Scales belong to weight versions. A step's gradients have the scale of the version they read, from which the scale of
the step's new version follows. In synchronous training each scale thus follows from the one before. One step stale,
iteration k + 1 has the scale that followed from iteration k - 1: two scalers take turns.

Sources: Micikevicius et al., "Mixed Precision Training", ICLR'18, section 3.2; for the two scalers the RoundPipe
paper's library.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from rpbench.engine.peers import at

FACTOR = 2.0  # a power of two, so that scaling changes no digit


@dataclass(frozen=True)
class LossScaling:
    """The first loss scale, and the number of good steps in a row after which a scale doubles."""

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
    """A loss scale, and the number of good steps in a row with it."""

    value: float
    num_good: int = 0


class LossScaler:
    """The scales of a run by weight version, and the versions of `skipped` steps, which changed nothing."""

    def __init__(self, rule: LossScaling, start: dict[int, Scale] | None = None) -> None:
        self.scales = dict(start) if start else {0: Scale(rule.initial)}
        self.skipped: set[int] = set()
        self._rule = rule

    def of(self, version: int) -> float:
        """The scale of gradients that are made with this weight version."""
        return self.scales[version].value

    def advance(self, version: int, read: int, gradients: Iterable[torch.Tensor]) -> bool:
        """Set the scale of `version` by the step's gradients, which read version `read`; True if they are finite."""
        finite = all(map(_is_finite, gradients))
        self.scales[version] = self._rule.follow(self.scales[read], finite=finite)
        if not finite:
            self.skipped.add(version)
        return finite


def _is_finite(gradient: torch.Tensor) -> bool:
    with at(gradient.device):
        return bool(torch.isfinite(gradient).all())
