"""Segments: what the parts of a cut sequence give each other.

Causal attention reads the keys and values of the segments before its own. Forward leaves them here, per layer and
segment, until that segment's backward. Backward takes segments in reverse: it returns gradients of the keys and
values it has read, which are added up here, the last segment's first, and enter the backward of the segment that
made them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from rpbench.engine.compute.stage import Graph, Segment
from rpbench.engine.state.gradients import Tensors
from rpbench.models.attention import KeysValues

Slopes = list[torch.Tensor | None]  # of keys and values


@dataclass
class Exchange:
    """What some layers read and make for one segment in one run.

    Attributes:
        earlier: layer -> keys and values of the segments before, in order.
        own: layer -> those of this segment.
    """

    segments: "Segments"
    segment: Segment
    with_graph: bool
    earlier: dict[int, list[KeysValues]] = field(default_factory=dict)
    own: dict[int, KeysValues] = field(default_factory=dict)

    def read(self, module: int) -> Sequence[KeysValues]:
        """The keys and values of earlier segments; leaves that gradients can be asked for, with a graph."""
        found = self.segments.earlier(module, self.segment)
        if self.with_graph:
            found = [KeysValues(*(tensor.detach().requires_grad_() for tensor in pair)) for pair in found]
        self.earlier[module] = found
        return found

    def made(self, module: int, own: KeysValues) -> None:
        self.own[module] = own
        if not self.with_graph:
            self.segments.keep(module, self.segment, own)


class Segments:
    """The keys, values and gradients that lie between the segments of a run's microbatches.

    Args:
        num_parts: segments of every sequence; 1 for whole ones, which exchange nothing.
    """

    def __init__(self, num_parts: int) -> None:
        self.num_parts = num_parts
        self._kept: dict[tuple[int, Segment], KeysValues] = {}  # (module, segment) -> what its forward made
        self._slopes: dict[tuple[int, Segment], Slopes] = {}  # the same -> the gradients of it so far

    def __len__(self) -> int:
        return len(self._kept) + len(self._slopes)

    def exchange(self, segment: Segment, *, with_graph: bool) -> Exchange | None:
        """For a run of layers on one segment; None where sequences are whole."""
        return Exchange(self, segment, with_graph) if self.num_parts > 1 else None

    def earlier(self, module: int, segment: Segment) -> list[KeysValues]:
        microbatch, part = segment
        return [self._kept[module, (microbatch, other)] for other in range(part)]

    def keep(self, module: int, segment: Segment, own: KeysValues) -> None:
        self._kept[module, segment] = own

    def backward(self, graph: Graph, gradient: torch.Tensor | None) -> tuple[torch.Tensor | None, Tensors]:
        """As `stage.backward`, with gradients of keys and values going in and coming out."""
        exchange = graph.exchange
        if exchange is None:  # embedding or head alone
            exchange = Exchange(self, (0, 0), with_graph=True)
        ends, slopes = self._ends(exchange)
        places = [(module, part) for module, found in exchange.earlier.items() for part in range(len(found))]
        before = [tensor for module, part in places for tensor in exchange.earlier[module][part]]
        inputs = [*graph.leaves.values(), *before, *(() if graph.start is None else (graph.start,))]
        found: tuple[torch.Tensor | None, ...] = (None,) * len(inputs)
        outputs = [(graph.end, gradient), *zip(ends, slopes, strict=True)]
        outputs = [(end, slope) for end, slope in outputs if end.requires_grad]
        if inputs and outputs:
            found = torch.autograd.grad(
                [end for end, _ in outputs], inputs, [slope for _, slope in outputs], allow_unused=True
            )
        num_leaves = len(graph.leaves)
        for number, (module, part) in enumerate(places):
            pair = found[num_leaves + 2 * number : num_leaves + 2 * number + 2]
            self._add(module, (exchange.segment[0], part), pair)
        gradients = {place: value for place, value in zip(graph.leaves, found, strict=False) if value is not None}
        return (None if graph.start is None else found[-1]), gradients

    def _ends(self, exchange: Exchange) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """What this segment has made and later ones have read, with the gradients of it; none is needed again."""
        ends: list[torch.Tensor] = []
        slopes: list[torch.Tensor] = []
        for module, own in exchange.own.items():
            self._kept.pop((module, exchange.segment))
            for tensor, slope in zip(own, self._slopes.pop((module, exchange.segment), ()), strict=False):
                if slope is not None:
                    ends.append(tensor)
                    slopes.append(slope)
        return ends, slopes

    def _add(self, module: int, segment: Segment, pair: Sequence[torch.Tensor | None]) -> None:
        total = self._slopes.setdefault((module, segment), [None, None])
        for number, slope in enumerate(pair):
            before = total[number]
            if slope is not None:
                total[number] = slope if before is None else before + slope
