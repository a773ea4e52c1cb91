"""Linear maps, one or a bank of experts, with an optional low-rank adapter beside the weight."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn import functional

from rpbench.models.grouped import Layout

LORA_ALPHA = 16.0  # an adapter's output is multiplied by alpha / rank; as in the published benchmark

Make = Callable[..., torch.Tensor]


class _Making(threading.local):
    """How the calling thread makes linear maps; None: as torch does."""

    by: Make | None = None


_making = _Making()


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x (..., inputs) -> x @ weight.T + bias, (..., outputs), as whoever asked for it by `made_by` makes it."""
    weights = (weight,) if bias is None else (weight, bias)
    return functional.linear(x, *weights) if _making.by is None else _making.by(x, *weights)


@contextmanager
def made_by(make: Make) -> Iterator[None]:
    """Inside, linear maps of the calling thread are made by a call with the input, the weight and a bias if any."""
    before, _making.by = _making.by, make
    try:
        yield
    finally:
        _making.by = before


class Adapter(nn.Module):
    """Two thin matrices whose product is added to a frozen weight.

    Source: Hu et al., "LoRA", ICLR'22, section 4.1.
    """

    def __init__(self, inputs: int, outputs: int, rank: int, experts: tuple[int, ...]) -> None:
        super().__init__()
        self.scale = LORA_ALPHA / rank
        self.lora_a = nn.Parameter(torch.empty(*experts, rank, inputs))
        self.lora_b = nn.Parameter(torch.empty(*experts, outputs, rank))


class Linear(nn.Module):
    """x (..., inputs) -> x @ weight.T + bias, (..., outputs)."""

    def __init__(self, inputs: int, outputs: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else None
        self.adapter: Adapter | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = linear(x, self.weight, self.bias)
        if self.adapter is None:
            return y
        thin = linear(x, self.adapter.lora_a)
        return y + self.adapter.scale * linear(thin, self.adapter.lora_b)


class ExpertLinear(nn.Module):
    """One linear map per expert, applied to rows that a `Layout` has grouped by expert."""

    def __init__(self, num_experts: int, inputs: int, outputs: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, outputs, inputs))
        self.bias = nn.Parameter(torch.empty(num_experts, outputs)) if bias else None
        self.adapter: Adapter | None = None

    def forward(self, rows: torch.Tensor, layout: Layout) -> torch.Tensor:
        y = layout.linear(rows, self.weight)
        if self.bias is not None:
            y = y + layout.spread(self.bias)
        if self.adapter is None:
            return y
        thin = layout.linear(rows, self.adapter.lora_a)
        return y + self.adapter.scale * layout.linear(thin, self.adapter.lora_b)


def add_adapters(layer: nn.Module, rank: int) -> nn.Module:
    """Freeze a layer and give each of its linear maps a trainable adapter of rank `rank`; its values are unset.

    Returns:
        The same layer.
    """
    layer.requires_grad_(False)
    for module in list(layer.modules()):
        if isinstance(module, Linear | ExpertLinear):
            *experts, outputs, inputs = module.weight.shape
            with module.weight.device:
                module.adapter = Adapter(inputs, outputs, rank, tuple(experts)).to(module.weight.dtype)
    return layer
