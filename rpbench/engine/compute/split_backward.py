"""Deferred: linear maps whose weight gradient is left for later, so that I and W share the work of B.

Autograd goes back through a graph once, for inputs and weights together. Inside `Deferring`, every `linear` becomes
one operation with a graph of its own, apart from the one around it:

    x  -> [ x' -> linear(weight, bias) -> y' ] -> y

Going back through the outer graph asks the inner one for the gradient of x' only, and notes that of y'. Later the
inner one is asked for weight and bias. Both times kernels, shapes and strides are those autograd would have used, so
the bits are the same. In between only x and the gradient of y are kept; the outer graph is gone.

Weights that a graph uses more than once, and those of other operations (norms, embeddings, banks of experts, the
chunked loss), get their gradient together with the input's: several contributions might be added in another order.
A module without a linear map thus has all its work in I, and its W is empty.

Source: the halves are those of Qi et al., "Zero Bubble Pipeline Parallelism", ICLR'24, section 1.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import functional
from torch.overrides import TorchFunctionMode


class Linear:
    """One application of a linear map.

    Attributes:
        weights: the leaves it used: the weight, and the bias if there is one.
        deferred: whether going back leaves their gradients to `weight_gradients`.
    """

    def __init__(self, *weights: torch.Tensor) -> None:
        self.weights = weights
        self.deferred = False
        self._start: torch.Tensor | None = None  # x', while it is needed
        self._end: GradientEdge | None = None  # where y' stands in its graph; y' itself would take memory
        self._slope: torch.Tensor | None = None

    def run(self, x: torch.Tensor) -> torch.Tensor:
        """The map, in a graph of its own; the result stands outside of it."""
        with torch.enable_grad():
            self._start = x.detach().requires_grad_(x.requires_grad)
            y = functional.linear(self._start, *self.weights)
        self._end = get_gradient_edge(y)
        return y.detach()

    def go_back(self, slope: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Gradients of x and the weights from that of the result; of the weights none, if they are deferred."""
        assert self._start is not None
        assert self._end is not None
        inputs = [self._start] if self._start.requires_grad else []
        none = (None,) * (1 - len(inputs))
        if not self.deferred:
            return (*none, *torch.autograd.grad(self._end, [*inputs, *self.weights], slope))
        self._start, self._slope = None, slope
        found = torch.autograd.grad(self._end, inputs, slope, retain_graph=True) if inputs else ()
        return (*none, *found, *(None,) * len(self.weights))

    def weight_gradients(self) -> tuple[torch.Tensor, ...]:
        """Those of `weights`, once; none if nothing went back through the map."""
        if self._end is None or self._slope is None:
            return ()
        found = torch.autograd.grad(self._end, self.weights, self._slope)
        self._end = self._slope = None
        return found


class _Node(torch.autograd.Function):
    """A `Linear` as a node of the outer graph, reached whenever its anchor is among the inputs asked for."""

    @staticmethod
    def forward(
        ctx: Any, linear: Linear, anchor: torch.Tensor, x: torch.Tensor, *weights: torch.Tensor
    ) -> torch.Tensor:
        ctx.linear = linear
        return linear.run(x)

    @staticmethod
    def backward(ctx: Any, *slopes: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return (None, None, *ctx.linear.go_back(slopes[0]))


class Deferring(TorchFunctionMode):
    """A context in which linear maps whose weights are among some leaves can be deferred.

    Attributes:
        linears: what was applied, in order.
        anchor: an input to ask for, so that going back reaches every linear map; it never has a gradient.
    """

    def __init__(self, leaves: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.linears: list[Linear] = []
        self.anchor = torch.zeros((), requires_grad=True)
        self._leaves = {id(leaf) for leaf in leaves}

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if func is functional.linear:
            return self._linear(*args, **given)
        return func(*args, **given)

    def _linear(self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        weights = (weight,) if bias is None else (weight, bias)
        if not torch.is_grad_enabled() or any(id(tensor) not in self._leaves for tensor in weights):
            return functional.linear(input, weight, bias)
        self.linears.append(Linear(*weights))
        result: torch.Tensor = _Node.apply(self.linears[-1], self.anchor, input, *weights)
        return result


def defer(end: torch.Tensor, linears: Collection[Linear]) -> list[Linear]:
    """Put off the weight gradients of those linear maps whose weights the graph of `end` uses once."""
    uses = _uses(end) if linears else Counter[int]()
    for linear in linears:
        linear.deferred = all(uses[id(weight)] == 1 for weight in linear.weights)
    return [linear for linear in linears if linear.deferred]


def _uses(end: torch.Tensor) -> Counter[int]:
    """How often a graph uses each leaf, by identity."""
    uses: Counter[int] = Counter()
    seen = {end.grad_fn}
    ahead = [end.grad_fn]
    while ahead:
        node = ahead.pop()
        for following, _ in node.next_functions if node is not None else ():
            leaf = getattr(following, "variable", None)
            if leaf is not None:
                uses[id(leaf)] += 1
            elif following is not None and following not in seen:
                seen.add(following)
                ahead.append(following)
    return uses
