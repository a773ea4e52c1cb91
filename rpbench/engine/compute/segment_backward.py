"""Backward of a segment: as of a whole sequence, with gradients of keys and values going in and coming out."""

import torch

from rpbench.engine.compute.segments import Exchange, Segments
from rpbench.engine.compute.stage import Graph
from rpbench.engine.state.gradients import Tensors


def segment_backward(
    segments: Segments, graph: Graph, gradient: torch.Tensor | None
) -> tuple[torch.Tensor | None, Tensors]:
    """The gradients of a graph's input and weights, as `stage.backward`; those of what it has read go to `segments`."""
    exchange = graph.exchange
    if exchange is None:  # embedding or head alone
        exchange = Exchange(segments, (0, 0), with_graph=True)
    ends, slopes = segments.take(exchange)
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
        segments.add(module, (exchange.segment[0], part), pair)
    gradients = {place: value for place, value in zip(graph.leaves, found, strict=False) if value is not None}
    return (None if graph.start is None else found[-1]), gradients
