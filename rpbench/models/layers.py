"""The layers of a model: embedding, decoder layers with one MLP or many experts, head. Forward keeps no state."""

from collections.abc import Sequence
from typing import overload

import torch
from torch import nn
from torch.nn import functional

from rpbench.models.attention import Attention, KeysValues, Norm
from rpbench.models.families import TRAITS
from rpbench.models.linear import ExpertLinear, Linear, group, linear
from rpbench.models.loss import CHUNK_TOKENS, linear_cross_entropy
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
    """x (B, S, H) -> (B, S, H): each token goes through the k experts with its highest scores.

    Their outputs are weighted by a softmax over the k scores (GPT-OSS), which equals a softmax over all scores,
    normalised over the k (Qwen3).
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


class Embedding(nn.Module):
    """The first layer: tokens (B, S) -> x (B, S, H)."""

    def __init__(self, model: Architecture) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(model.vocab, model.hidden))
        self.dropout = model.dropout

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return functional.dropout(functional.embedding(tokens, self.weight), self.dropout, self.training)


class DecoderLayer(nn.Module):
    """Attention and MLP, each behind a norm and beside a residual: x (B, S, H) -> (B, S, H)."""

    def __init__(self, model: Architecture, index: int) -> None:
        """Decoder layer `index`, counted from 0: every second one has the sliding window, if there is one."""
        super().__init__()
        self.attention_norm: nn.Module = Norm(model.hidden, model.norm_eps)
        self.attention = Attention(model, index)
        self.mlp_norm: nn.Module = Norm(model.hidden, model.norm_eps)
        self.mlp = Experts(model) if model.experts is not None else Mlp(model)
        self.dropout = model.dropout

    @overload
    def forward(self, x: torch.Tensor, earlier: None = None, lengths: Sequence[int] = ()) -> torch.Tensor: ...

    @overload
    def forward(self, x: torch.Tensor, earlier: Sequence[KeysValues]) -> tuple[torch.Tensor, KeysValues]: ...

    def forward(
        self, x: torch.Tensor, earlier: Sequence[KeysValues] | None = None, lengths: Sequence[int] = ()
    ) -> torch.Tensor | tuple[torch.Tensor, KeysValues]:
        """x of whole sequences, of `lengths` if they are packed; or x of a segment with its keys and values, given the
        earlier segments' ones.
        """
        mixed, own = self.attention(self.attention_norm(x), earlier or (), lengths)
        x = x + functional.dropout(mixed, self.dropout, self.training)
        x = x + functional.dropout(self.mlp(self.mlp_norm(x)), self.dropout, self.training)
        return x if earlier is None else (x, own)


class Head(nn.Module):
    """The last layer: final norm, output matrix, and the loss if labels are given."""

    def __init__(self, model: Architecture) -> None:
        super().__init__()
        self.norm = Norm(model.hidden, model.norm_eps)
        self.weight = nn.Parameter(torch.empty(model.vocab, model.hidden))
        self.chunk_tokens = CHUNK_TOKENS

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        """Logits (B, S, V) of x (B, S, H); or, with labels (B, S), their mean cross-entropy without the logits."""
        x = self.norm(x)
        if labels is None:
            return linear(x, self.weight)
        return linear_cross_entropy(x.flatten(0, 1), self.weight, labels.flatten(), self.chunk_tokens)
