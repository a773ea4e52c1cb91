"""Stage: forward, recomputation and backward of a range of modules.

A forward runs without graph and keeps the inputs of backward stages. A backward recomputes its modules with graph, from
the kept input ("stage" grain), or one module after another, each from its own ("layer" grain). The head is never
recomputed: its graph lives from the forward to the backward, or both are one action of a fused stage. Nor are the last
stage's layers, or any, where the user keeps their graphs (`rpbench.passes.recomputation`).

A shell is a module without weights, which gets them for the time of a call. Each thread has its own shells: with
streamed weights, devices run the same layer at the same time. `torch.func.functional_call` does the same, but looks
tensors up by name at every call.
"""

import copy
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import nn

from rpbench.engine.compute.randomness import drawing
from rpbench.engine.compute.segments import Exchange, Segment
from rpbench.engine.compute.split_backward import Linear, defer, deferring
from rpbench.engine.state.gradients import Place, Tensors
from rpbench.engine.state.weights import Named, WeightSource
from rpbench.engine.workload import Workload


class Shell:
    """One module to be called with any weights of its shape."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._places: dict[str, tuple[dict[str, Any], str, Any]] = {}  # name -> table, key and what is there otherwise
        for prefix, part in module.named_modules(remove_duplicate=False):
            for table in (part._parameters, part._buffers):
                for key, stand_in in table.items():
                    self._places[f"{prefix}.{key}" if prefix else key] = table, key, stand_in

    def __call__(self, tensors: Mapping[str, torch.Tensor], *inputs: Any) -> Any:
        """Call the module with these tensors, by name; all its weights must be among them."""
        try:
            for name, tensor in tensors.items():
                table, key, _ = self._places[name]
                table[key] = tensor
            return self._module(*inputs)
        finally:
            for table, key, stand_in in self._places.values():
                table[key] = stand_in


class Shells(threading.local):
    """The modules of a model as shells of the calling thread, made when first asked for."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        self._made: dict[int, Shell] = {}

    def __getitem__(self, index: int) -> Shell:
        if index not in self._made:
            self._made[index] = Shell(_emptied(self._modules[index]))
        return self._made[index]


def _emptied(module: nn.Module) -> nn.Module:
    """A copy whose parameters have no values; buffers are shared, because forward does not write them."""
    stand_ins: dict[int, object] = {
        id(parameter): nn.Parameter(
            torch.empty(parameter.shape, dtype=parameter.dtype, device="meta"), parameter.requires_grad
        )
        for parameter in module.parameters()
    }
    stand_ins |= {id(buffer): buffer for buffer in module.buffers()}
    return copy.deepcopy(module, stand_ins)


Grain = Literal["stage", "layer"]
GRAINS: tuple[Grain, ...] = get_args(Grain)


class Graph(NamedTuple):
    """A forward with its autograd graph."""

    start: torch.Tensor | None  # the input as a leaf; None where it holds tokens
    leaves: Tensors
    end: torch.Tensor
    # keys and values that passed between this segment and others; None where sequences are whole
    exchange: Exchange | None = None
    linears: tuple[Linear, ...] = ()  # the linear maps whose weight gradients can be deferred
    anchor: torch.Tensor | None = None  # an input to ask for with `start`, if there are `linears`


class Rest(NamedTuple):
    """The result of a backward's first half for the second."""

    gradients: Tensors  # of the weights that could not be deferred
    linears: list[Linear]  # the linear maps whose weight gradients are still to be made
    places: dict[int, Place]  # identity of a weight -> its place


@dataclass(frozen=True)
class Stages:
    """A model's modules, run a range at a time with weights of a given version."""

    workload: Workload
    weights: WeightSource
    shells: Shells
    num_parts: int = 1  # segments that sequences are cut into; an `exchange` is what they read of each other
    splits: bool = False  # whether some backward comes in halves

    def run(
        self, modules: range, x: torch.Tensor, segment: Segment, version: int, exchange: Exchange | None = None
    ) -> torch.Tensor:
        """The output of some modules; after the head, the loss as its share of the step's mean."""
        for module in modules:
            with drawing(self.workload, module, *segment):
                x = self._call(module, self.weights.all_of(module, version), x, segment, exchange)
        return x

    def keep(
        self,
        modules: range,
        x: torch.Tensor,
        segment: Segment,
        version: int,
        note: Callable[[int, torch.Tensor], None],
        exchange: Exchange | None = None,
    ) -> torch.Tensor:
        """`run` without graph; `note` gets every module's input."""
        with torch.no_grad():
            for module in modules:
                note(module, x)
                x = self.run(range(module, module + 1), x, segment, version, exchange)
        return x

    def graph(
        self, modules: range, x: torch.Tensor, segment: Segment, version: int, exchange: Exchange | None = None
    ) -> Graph:
        """`run` with graph, of a leaf with the values of x, or of x itself where that is part of a graph."""
        leaves = {
            (module, name): leaf for module in modules for name, leaf in self.weights.leaves(module, version).items()
        }
        with torch.enable_grad():
            start = (x if x.requires_grad else x.detach().requires_grad_()) if x.is_floating_point() else None
            if not self.splits:
                end = self.run(modules, x if start is None else start, segment, version, exchange)
                return Graph(start, leaves, end, exchange)
            with deferring(leaves.values()) as (linears, anchor):
                end = self.run(modules, x if start is None else start, segment, version, exchange)
        return Graph(start, leaves, end, exchange, tuple(linears), anchor)

    def tensors(self, modules: range, version: int) -> list[torch.Tensor]:
        return [tensor for module in modules for tensor in self.weights.all_of(module, version).values()]

    def _call(
        self, module: int, tensors: Named, x: torch.Tensor, segment: Segment, exchange: Exchange | None
    ) -> torch.Tensor:
        shell, head = self.shells[module], self.workload.head
        if exchange is not None and module not in (0, head):
            output, own = shell(tensors, x, exchange.read(module))
            exchange.made(module, own)
            return output
        if module != head:
            packed = self.workload.packed(module, segment[0])
            return shell(tensors, x, None, packed) if packed else shell(tensors, x)
        labels = self.workload.segment(*segment, self.num_parts).labels
        return self.workload.share(shell(tensors, x, labels), *segment, self.num_parts)


def backward(graph: Graph, gradient: torch.Tensor | None) -> tuple[torch.Tensor | None, Tensors]:
    """The gradients of a graph's input and weights, given that of its output (None: 1)."""
    inputs = [*graph.leaves.values(), *(() if graph.start is None else (graph.start,))]
    found = _differentiate(graph, inputs, gradient)
    below = found[-1] if found and graph.start is not None else None
    return below, present(graph.leaves, found)


def input_gradient(graph: Graph, gradient: torch.Tensor | None) -> tuple[torch.Tensor | None, Rest]:
    """The first half of `backward`: the gradient of the graph's input, and what is left to do. Frees the graph."""
    later = defer(graph.end, graph.linears)
    put_off = {id(weight) for linear in later for weight in linear.weights}
    now = {place: leaf for place, leaf in graph.leaves.items() if id(leaf) not in put_off}
    places = {id(leaf): place for place, leaf in graph.leaves.items() if id(leaf) in put_off}
    ends = [tensor for tensor in (graph.start, graph.anchor if later else None) if tensor is not None]
    found = _differentiate(graph, [*now.values(), *ends], gradient)
    below = found[len(now)] if found and graph.start is not None else None
    return below, Rest(present(now, found), later, places)


def weight_gradients(rest: Rest) -> Tensors:
    """The second half of `backward`: the gradients of all weights. Frees what the first half kept."""
    gradients = rest.gradients
    for linear in rest.linears:
        found = linear.weight_gradients()
        gradients |= {rest.places[id(weight)]: value for weight, value in zip(linear.weights, found, strict=False)}
    return gradients


def _differentiate(
    graph: Graph, inputs: list[torch.Tensor], gradient: torch.Tensor | None
) -> tuple[torch.Tensor | None, ...]:
    if not inputs or not graph.end.requires_grad:
        return ()
    return torch.autograd.grad(graph.end, inputs, gradient, allow_unused=True)


def present(leaves: Tensors, found: Sequence[torch.Tensor | None]) -> Tensors:
    """The gradients that were found, by the places of the leaves."""
    return {place: value for place, value in zip(leaves, found, strict=False) if value is not None}


def pieces(modules: range, grain: Grain) -> list[range]:
    """A range as the pieces that are recomputed one at a time."""
    if grain == "layer":
        return [range(module, module + 1) for module in modules]
    return [modules] if modules else []
