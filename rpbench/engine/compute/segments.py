"""Segments: the keys, values and gradients that pass between the parts of a cut sequence.

Causal attention reads the keys and values of the segments before its own. Forward leaves them here, per layer and
segment, until that segment's backward. Backward takes segments in reverse: it returns gradients of the keys and
values it has read, which are added up here, the last segment's first, and enter the backward of the segment that
made them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from rpbench.ir.action import Action
from rpbench.models.attention import KeysValues

Segment = tuple[int, int]  # microbatch, part of its sequences


def segment_of(action: Action) -> Segment:
    assert action.microbatch is not None
    return action.microbatch, action.part


@dataclass
class Exchange:
    """The keys and values by layer that some layers read of `earlier` segments, in order, and make of their `own`."""

    segments: "Segments"
    segment: Segment
    with_graph: bool
    earlier: dict[int, list[KeysValues]] = field(default_factory=dict)
    own: dict[int, KeysValues] = field(default_factory=dict)

    def read(self, module: int) -> Sequence[KeysValues]:
        """The keys and values of earlier segments; leaves that gradients can be asked for, with a graph."""
        microbatch, part = self.segment
        found = [self.segments.kept[module, (microbatch, other)] for other in range(part)]
        if self.with_graph:
            found = [KeysValues(*(tensor.detach().requires_grad_() for tensor in pair)) for pair in found]
        self.earlier[module] = found
        return found

    def made(self, module: int, own: KeysValues) -> None:
        self.own[module] = own
        if not self.with_graph:
            self.segments.kept[module, self.segment] = own


class Segments:
    """Keys, values and gradients between the `num_parts` segments of a run's sequences; none of whole ones."""

    def __init__(self, num_parts: int) -> None:
        self.num_parts = num_parts
        self.kept: dict[tuple[int, Segment], KeysValues] = {}  # (module, segment) -> what its forward made
        self._grads: dict[tuple[int, Segment], list[torch.Tensor | None]] = {}  # the same -> its gradients so far

    def __len__(self) -> int:
        return len(self.kept) + len(self._grads)

    def exchange(self, segment: Segment, *, with_graph: bool) -> Exchange | None:
        """For a run of layers on one segment; None where sequences are whole."""
        return Exchange(self, segment, with_graph) if self.num_parts > 1 else None

    def take(self, exchange: Exchange) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Remove the keys and values of a segment that later ones have read; returns each with its gradient."""
        found = []
        for module, own in exchange.own.items():
            del self.kept[module, exchange.segment]
            grads = self._grads.pop((module, exchange.segment), ())
            found += [(tensor, grad) for tensor, grad in zip(own, grads, strict=False) if grad is not None]
        return found

    def add(self, module: int, segment: Segment, pair: Sequence[torch.Tensor | None]) -> None:
        """Add gradients of the keys and values that a segment has made, from a later one that has read them."""
        total = self._grads.setdefault((module, segment), [None, None])
        for number, grad in enumerate(pair):
            before = total[number]
            if grad is not None:
                total[number] = grad if before is None else before + grad
