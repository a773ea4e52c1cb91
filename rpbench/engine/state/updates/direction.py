"""Direction: where an optimizer is heading, told from its state before the next gradient is known."""

from typing import Any

import torch


def direction(optimizer: torch.optim.Optimizer, weight: torch.Tensor, *, with_decay: bool) -> torch.Tensor | None:
    """What a step of learning rate 1 would take off a weight if gradients stayed as they are; None before the first.

    AdamW: the mean gradient over the root of the mean square, both without their bias towards 0, and the weight decay
    if it is to count. SGD: the momentum, which plain gradient descent does not have; what the last step took off, where
    steps compensate spikes.

    Source: PipeOptim (arXiv 2312.00839), section 3; XPipe (arXiv 1911.04610), section 3.2, for Adam.
    """
    state, group = optimizer.state.get(weight, {}), optimizer.param_groups[0]
    if isinstance(optimizer, torch.optim.SGD):
        found: torch.Tensor | None = state.get("direction", state.get("momentum_buffer"))
        return found
    if not state:
        return None
    assert isinstance(optimizer, torch.optim.AdamW), "checked when the run is asked for"
    found = _adam_direction(state, group)
    return found + group["weight_decay"] * weight.detach() if with_decay else found


def _adam_direction(state: dict[str, Any], group: dict[str, Any]) -> torch.Tensor:
    (beta1, beta2), step = group["betas"], float(state["step"])
    mean = state["exp_avg"] / (1 - beta1**step)
    root = (state["exp_avg_sq"] / (1 - beta2**step)).sqrt()
    found: torch.Tensor = mean / (root + group["eps"])
    return found
