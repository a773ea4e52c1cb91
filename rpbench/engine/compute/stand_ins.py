"""Stand-ins: the ends of a graph without their values, for a graph whose activations leave the device.

A graph is gone back through from its output to its input, and holds both. Their values are needed only where an
operation has saved them, which is then what moves. A stand-in has the shape and type of a tensor and one element of
memory; gradients go through it as they are:

    leaf (no values)  ->  x  ->  stage  ->  y  ->  end (no values)
"""

from typing import Any

import torch


class _StandIn(torch.autograd.Function):
    """One tensor in a graph in the place of another, of the same shape."""

    @staticmethod
    def forward(ctx: Any, place: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return value.detach()

    @staticmethod
    def backward(ctx: Any, *slopes: torch.Tensor) -> tuple[torch.Tensor, None]:
        return slopes[0], None


def enter(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A leaf without values to ask a gradient for, and the x that a graph begins with."""
    leaf = _hollow(x).requires_grad_()
    with torch.enable_grad():
        return leaf, _StandIn.apply(leaf, x)


def leave(end: torch.Tensor) -> torch.Tensor:
    """The end of a graph without its values."""
    with torch.enable_grad():
        stand_in: torch.Tensor = _StandIn.apply(end, _hollow(end))
        return stand_in


def _hollow(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().new_zeros(()).expand(tensor.shape)
