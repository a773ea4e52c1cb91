"""Deferred: linear maps whose weight gradient is left for later, so that I and W share the work of B.

Autograd makes the gradients of inputs and weights in one pass. Inside `deferring`, every linear map is one operation
whose backward makes the gradient of x and keeps x and the gradient of y. The gradients of weight and bias are made from
these later, without the graph. Products, shapes and strides are autograd's, so the bits are the same:

    y = x W^T + b      dx = dy W      dW = dy^T x      db = sum of dy over all but the last dimension

Weights of other operations (norms, embeddings, banks of experts, the chunked loss), and those that a graph uses more
than once, get their gradient with the input's: several contributions might be added in another order. A module without
a linear map thus has all its work in I, and its W is empty.

Source: the halves are those of Qi et al., "Zero Bubble Pipeline Parallelism", ICLR'24, section 1; the products those of
torch's derivatives.yaml for mm and addmm.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from rpbench.models.linear import made_by


class LinearGrads(NamedTuple):
    """The tensors that make the gradients of a linear map: x (..., inputs), and the gradient of y (..., outputs)."""

    x: torch.Tensor
    grad: torch.Tensor

    def of_input(self, weight: torch.Tensor) -> torch.Tensor:
        x, grad = self._rows()
        is_by_columns = x.stride() == (1, len(x))  # then autograd makes the transposed product
        found = weight.t().mm(grad.t()).t() if is_by_columns else grad.mm(weight)
        return found.reshape(self.x.shape)

    def of_weights(self, weights: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        x, grad = self._rows()
        # torch makes one product of rows and adds the bias in it, or a product of x as it is, and adds it afterwards.
        is_one = self.x.dim() == 2 or (self.x.dim() == 3 and self.x.is_contiguous())
        biases = ((grad if is_one else self.grad).sum_to_size(bias.shape) for bias in weights[1:])
        return grad.t().mm(x), *biases

    def _rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x.reshape(-1, self.x.shape[-1]), self.grad.reshape(-1, self.grad.shape[-1])


class Linear:
    """One application of a linear map to its weight, and its bias if there is one."""

    def __init__(self, *weights: torch.Tensor) -> None:
        self.weights = weights
        self.deferred = False  # whether the backward leaves the gradients of `weights` to `weight_gradients`
        self.left: LinearGrads | None = None  # the tensors for these, from the backward on

    def weight_gradients(self) -> tuple[torch.Tensor, ...]:
        """The gradients of `weights`, once; none if no backward reached the map."""
        left, self.left = self.left, None
        return () if left is None else left.of_weights(self.weights)


class _Node(torch.autograd.Function):
    """A `Linear` in a graph, reached whenever its anchor is among the inputs asked for."""

    @staticmethod
    def forward(
        ctx: Any, linear: Linear, anchor: torch.Tensor, x: torch.Tensor, *weights: torch.Tensor
    ) -> torch.Tensor:
        ctx.linear = linear
        ctx.save_for_backward(x, weights[0])  # torch refuses to go back if they were written to
        return functional.linear(x, *weights)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        linear, found = ctx.linear, LinearGrads(x.detach(), grads[0])
        below = found.of_input(weight) if ctx.needs_input_grad[2] else None
        if linear.deferred:
            linear.left = found
            return (None, None, below, *(None for _ in linear.weights))
        return (None, None, below, *found.of_weights(linear.weights))


@contextmanager
def deferring(leaves: Iterable[torch.Tensor]) -> Iterator[tuple[list[Linear], torch.Tensor]]:
    """Inside, linear maps (`rpbench.models.linear`) whose weights are among some leaves can be deferred.

    Gives the list of those that are applied, in order, and an anchor: an input to ask for, so that the backward reaches
    every one of them; it never has a gradient.
    """
    linears, anchor, own = list[Linear](), torch.zeros((), requires_grad=True), {id(leaf) for leaf in leaves}

    def linear(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        if not torch.is_grad_enabled() or any(id(tensor) not in own for tensor in weights):
            return functional.linear(x, *weights)
        linears.append(Linear(*weights))
        return _Node.apply(linears[-1], anchor, x, *weights)

    with made_by(linear):
        yield linears, anchor


def defer(end: torch.Tensor, linears: Collection[Linear]) -> list[Linear]:
    """Defer the weight gradients of those linear maps whose weights the graph of `end` uses once; returns them."""
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
