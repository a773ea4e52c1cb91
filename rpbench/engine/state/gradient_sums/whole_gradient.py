"""Whole gradient: what a step asks of the gradients of all stages together, whether they are finite and their norm."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch

from rpbench.engine.state.gradient_sums.gradients import Place, Tensors
from rpbench.engine.state.updates.loss_scale import LossScaler
from rpbench.engine.transfers.peers import at


class Outcome(NamedTuple):
    """What is known of a step when a part takes it.

    Args:
        lasts: nothing that is looked at later can change it.
        skipped: it changes nothing.
        clipping: what gradients are multiplied by.
    """

    lasts: bool
    skipped: bool = False
    clipping: torch.Tensor | None = None


class WholeGradient:
    """Looks at the gradients of all stages, once a step.

    Args:
        clip_norm: what their norm is scaled down to; None: never.
        scaler: the scales of losses, where those are scaled; the step to a version has those of `read_by(version)`.
        made: version -> all gradients, as they were made.
        in_order: version -> the same by owner, in the order of the model.
        plain: what the optimizer takes of an owner's gradient.

    Attributes:
        norms: by version, before clipping; empty without it.
        is_asked: whether a step depends on it.
    """

    def __init__(
        self,
        clip_norm: float | None,
        scaler: LossScaler | None,
        read_by: Callable[[int], int],
        made: Callable[[int], Iterable[torch.Tensor]],
        in_order: Callable[[int], Tensors],
        plain: Callable[[Place, torch.Tensor, int], torch.Tensor],
    ) -> None:
        self._clip_norm, self._scaler, self._read_by = clip_norm, scaler, read_by
        self._made, self._in_order, self._plain = made, in_order, plain
        self._seen = 0  # version of the last step that was looked at
        self._skipped: set[int] = set()
        self._clipping: dict[int, torch.Tensor] = {}
        self.norms: dict[int, torch.Tensor] = {}
        self.is_asked = clip_norm is not None or scaler is not None

    def look(self, version: int) -> None:
        """Note how the step to a version goes, unless that is known. All of its gradients must be there."""
        if self._seen >= version or not self.is_asked:
            return
        if self._scaler is not None and not self._scaler.advance(version, self._read_by(version), self._made(version)):
            self._skipped = {version}
        elif self._clip_norm is not None:
            norm = self.norms[version] = self._norm(version)
            self._clipping = {version: (self._clip_norm / (norm + 1e-6)).clamp(max=1.0)}
        self._seen = version

    def _norm(self, version: int) -> torch.Tensor:
        """The norm of all gradients, on the host; each is looked at where it is."""
        gradients, norms = self._in_order(version), dict[Place, torch.Tensor]()
        for place in dict.fromkeys(gradient.device for gradient in gradients.values()):
            own = [owner for owner, gradient in gradients.items() if gradient.device == place]
            with at(place):
                found = [torch.linalg.vector_norm(self._plain(owner, gradients[owner], version)) for owner in own]
                norms |= zip(own, torch.stack(found).cpu(), strict=True)
        return torch.linalg.vector_norm(torch.stack([norms[owner] for owner in gradients]))

    def outcome(self, version: int) -> Outcome:
        """What is known of a step now."""
        if not self.is_asked:
            return Outcome(lasts=True)
        if self._seen < version:
            return Outcome(lasts=False)
        return Outcome(True, version in self._skipped, self._clipping.get(version))

    def leaves_alone(self, version: int) -> bool:
        """Whether the step to a version, which has been looked at, is what it is without a look."""
        _, skipped, clipping = self.outcome(version)
        return not skipped and (clipping is None or bool(clipping >= 1))
