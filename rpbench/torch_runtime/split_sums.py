"""Split sums: plain training whose matrix products are made in the parts that tensor-parallel ranks make.

A product cut by inputs is a sum of partial products, and so is the gradient of the input of one cut by outputs: such
sums round otherwise than one long dot product. With this reference, what is left of a difference is not rounding.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn
from torch.nn import functional

from rpbench.engine.workload import Workload
from rpbench.models.layers import DecoderLayer
from rpbench.models.linear import Linear
from rpbench.torch_runtime.shards import BY_INPUTS, BY_OUTPUTS


class SplitLinear(nn.Module):
    """x (..., inputs) -> x @ weight.T + bias, (..., outputs), in parts of equal size.

    Args:
        linear: whose parameters it takes, under their names.
        num_parts: as many as ranks.
        by_inputs: parts are summands of the output; otherwise slices of it.
    """

    def __init__(self, linear: Linear, num_parts: int, *, by_inputs: bool) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.num_parts, self.by_inputs = num_parts, by_inputs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.view_as(x)  # the input's gradient is added up over the parts before it meets that of other maps
        weights = self._cut(self.weight, 1 if self.by_inputs else 0)
        if not self.by_inputs:
            biases = [None] * self.num_parts if self.bias is None else self._cut(self.bias, 0)
            return torch.cat([functional.linear(x, *own) for own in zip(weights, biases, strict=True)], dim=-1)
        first, *others = (functional.linear(*own) for own in zip(self._cut(x, -1), weights, strict=True))
        total = sum(others, start=first)
        return total if self.bias is None else total + self.bias

    def _cut(self, tensor: torch.Tensor, dim: int) -> Sequence[torch.Tensor]:
        return [part.contiguous() for part in tensor.chunk(self.num_parts, dim)]


def with_split_sums(workload: Workload, num_parts: int) -> Workload:
    """The same training with every decoder layer's matrices multiplied in parts; its modules are changed."""
    for module in workload.modules:
        if isinstance(module, DecoderLayer):
            for name in (*BY_OUTPUTS, *BY_INPUTS):
                _split(module, name, num_parts)
    return replace(workload)


def _split(layer: nn.Module, name: str, num_parts: int) -> None:
    parent, _, child = name.rpartition(".")
    linear = getattr(layer.get_submodule(parent), child)
    if linear is not None:
        setattr(layer.get_submodule(parent), child, SplitLinear(linear, num_parts, by_inputs=name in BY_INPUTS))
