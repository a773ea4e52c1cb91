"""Spike compensation: momentum that gives a late gradient at once what it has missed.

Without delay a gradient g takes part in its own step, and in the steps after that by what the velocity still holds of
it: 1, mu, mu^2, ... of it. With a delay of D steps it comes D steps later. The step that it comes to takes the
contributions of those D steps at once (the spike), and goes on as training without delay would:

    v <- mu v + g          w <- w - eta (a v + b g)          a = mu^D          b = (1 - mu^D) / (1 - mu)

From then on an impulse has moved the weight as far as without delay, in the end by eta (b + a / (1 - mu)) =
eta / (1 - mu). D = 0 is plain momentum, D = 1 is Nesterov's.

Source: after the description of Kosson et al., "Pipelined Backpropagation at Scale: Training Large Models without
Batches", MLSys'21 (arXiv 2003.11666); the formula from memory, its sums derived. Weight decay is ours: a part of g, as
in torch's SGD.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch


def spike_coefficients(momentum: float, delay: float) -> tuple[float, float]:
    """a and b, the factors on velocity and gradient.

    Args:
        delay: steps that a gradient is late; the mean where the microbatches of a step differ.
    """
    a = momentum**delay
    return a, (1 - a) / (1 - momentum)


class SpikeCompensatedSGD(torch.optim.SGD):
    """Gradient descent with momentum on weights whose gradients are late.

    The state of a weight is its velocity (`momentum_buffer`), and a v + b g of its last step (`direction`), along which
    weights are predicted.

    Args:
        parameters: weights, or groups of them.
        delays: the steps that the gradients of every group are late.
    """

    def __init__(
        self,
        parameters: Iterable[torch.Tensor] | Iterable[dict[str, Any]],
        delays: Sequence[float],
        momentum: float,
        weight_decay: float,
    ) -> None:
        super().__init__(parameters, lr=1.0, momentum=momentum, weight_decay=weight_decay)
        for group, delay in zip(self.param_groups, delays, strict=True):
            group["delay"] = delay

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every weight that has a gradient."""
        assert closure is None  # nobody asks for a loss
        for group in self.param_groups:
            a, b = spike_coefficients(group["momentum"], group["delay"])
            for weight in group["params"]:
                if weight.grad is not None:
                    self._move(weight, group, a, b)

    def _move(self, weight: torch.Tensor, group: dict[str, Any], a: float, b: float) -> None:
        gradient, state = weight.grad, self.state[weight]
        assert gradient is not None
        if group["weight_decay"]:
            gradient = gradient.add(weight, alpha=group["weight_decay"])
        if "momentum_buffer" in state:
            state["momentum_buffer"].mul_(group["momentum"]).add_(gradient)
        else:
            state["momentum_buffer"] = gradient.detach().clone()
        state["direction"] = a * state["momentum_buffer"] + b * gradient
        weight.add_(state["direction"], alpha=-group["lr"])
