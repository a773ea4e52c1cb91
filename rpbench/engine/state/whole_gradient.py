"""Whole gradient: whether the gradients of all stages are finite, their norm, and the loss scale that follows.

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
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from rpbench.engine.peers import at
from rpbench.engine.state.gradients import Place, Tensors

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


class Outcome(NamedTuple):
    """The known outcome of a step: whether it `lasts` whatever other gradients are, and the factor on its gradients."""

    lasts: bool
    skipped: bool = False
    clipping: torch.Tensor | None = None


class WholeGradient:
    """Checks the gradients of all stages, once a step."""

    def __init__(
        self,
        clip_norm: float | None,  # gradients are scaled down to this norm; None: never
        scaler: LossScaler | None,  # the loss scales, if any; the step to a version has that of `read_by(version)`
        read_by: Callable[[int], int],
        made: Callable[[int], Iterable[torch.Tensor]],  # version -> all gradients, as they were made
        in_order: Callable[[int], Tensors],  # version -> the same by owner, in the order of the model
        plain: Callable[[Place, torch.Tensor, int], torch.Tensor],  # makes an owner's gradient ready for the optimizer
    ) -> None:
        self._clip_norm, self._scaler, self._read_by = clip_norm, scaler, read_by
        self._made, self._in_order, self._plain = made, in_order, plain
        self._seen = 0  # version of the last step that was looked at
        self._skipped: set[int] = set()
        self._clipping: dict[int, torch.Tensor] = {}
        self.norms: dict[int, torch.Tensor] = {}  # version -> norm before clipping; empty without clipping
        # whether steps depend on the gradients of other stages
        self.is_asked = clip_norm is not None or scaler is not None

    def look(self, version: int) -> None:
        """Find the outcome of the step to a version, unless it is known. All of its gradients must be there."""
        if self._seen >= version or not self.is_asked:
            return
        if self._scaler is not None and not self._scaler.advance(version, self._read_by(version), self._made(version)):
            self._skipped = {version}
        elif self._clip_norm is not None:
            norm = self.norms[version] = self._norm(version)
            self._clipping = {version: (self._clip_norm / (norm + 1e-6)).clamp(max=1.0)}
        self._seen = version

    def _norm(self, version: int) -> torch.Tensor:
        """The norm of all gradients, on the host; each gradient's own norm is taken on its device."""
        gradients, norms = self._in_order(version), dict[Place, torch.Tensor]()
        for place in dict.fromkeys(gradient.device for gradient in gradients.values()):
            own = [owner for owner, gradient in gradients.items() if gradient.device == place]
            with at(place):
                found = [torch.linalg.vector_norm(self._plain(owner, gradients[owner], version)) for owner in own]
                norms |= zip(own, torch.stack(found).cpu(), strict=True)
        return torch.linalg.vector_norm(torch.stack([norms[owner] for owner in gradients]))

    def outcome(self, version: int) -> Outcome:
        if not self.is_asked:
            return Outcome(lasts=True)
        if self._seen < version:
            return Outcome(lasts=False)
        return Outcome(True, version in self._skipped, self._clipping.get(version))

    def leaves_alone(self, version: int) -> bool:
        """Whether looking at the gradients changes nothing: the step is neither skipped nor clipped."""
        _, skipped, clipping = self.outcome(version)
        return not skipped and (clipping is None or bool(clipping >= 1))
