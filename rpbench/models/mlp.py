"""The second half of a decoder layer: one MLP, or a router and many experts."""

import torch
from torch import nn
from torch.nn import functional

from rpbench.models.family import TRAITS
from rpbench.models.grouped import group
from rpbench.models.linear import ExpertLinear, Linear
from rpbench.workload.architecture import Architecture


class Mlp(nn.Module):
    """x (B, S, H) -> (B, S, H) through one hidden width; three matrices with a gate, two without."""

    def __init__(self, model: Architecture) -> None:
        super().__init__()
        hidden, inner = model.hidden, model.inner
        self.activation = TRAITS[model.family].activation
        self.gate = Linear(hidden, inner, model.biases) if model.gated else None
        self.up = Linear(hidden, inner, model.biases)
        self.down = Linear(inner, hidden, model.biases)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = None if self.gate is None else self.gate(x)
        return self.down(self.activation(self.up(x), gate))


class Experts(nn.Module):
    """x (B, S, H) -> (B, S, H): each token goes through the k experts it scores highest.

    Their answers are weighted by a softmax over the k scores, which is also a softmax over all scores,
    normalised over the k: Qwen3 states it one way, GPT-OSS the other.
    """

    def __init__(self, model: Architecture) -> None:
        super().__init__()
        assert model.experts is not None
        hidden, inner, num = model.hidden, model.experts.inner, model.experts.total
        self.num_active = model.experts.active
        self.widths = (hidden, inner, *((model.lora_rank,) if model.lora_rank else ()))
        self.activation = TRAITS[model.family].activation
        self.router = Linear(hidden, num, model.biases)
        self.gate = ExpertLinear(num, hidden, inner, model.biases) if model.gated else None
        self.up = ExpertLinear(num, hidden, inner, model.biases)
        self.down = ExpertLinear(num, inner, hidden, model.biases)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, 1)  # (T, H)
        scores, chosen = self.router(tokens).topk(self.num_active, dim=-1)  # (T, k)
        shares = functional.softmax(scores, dim=-1, dtype=torch.promote_types(x.dtype, torch.float32)).to(x.dtype)
        layout = group(chosen, self.up.weight.shape[0], self.widths, x.dtype)
        rows = layout.pack(tokens)
        gate = None if self.gate is None else self.gate(rows, layout)
        rows = self.down(self.activation(self.up(rows, layout), gate), layout)
        return (layout.unpack(rows) * shares.unsqueeze(-1)).sum(1).view_as(x)
