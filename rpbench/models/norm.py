"""Root-mean-square norm."""

import torch
from torch import nn
from torch.nn import functional


class Norm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * scale over the last dimension.

    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", NeurIPS'19, equation 4.
    """

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.scale = nn.Parameter(torch.empty(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, self.scale.shape, self.scale, self.eps)
