"""The layers a schedule deals with: embedding, decoder layers, head. Each is x -> x and keeps no state in forward."""

from collections.abc import Sequence
from typing import overload

import torch
from torch import nn
from torch.nn import functional

from rpbench.models.attention import Attention, KeysValues, Norm
from rpbench.models.linear import linear
from rpbench.models.loss import CHUNK_TOKENS, linear_cross_entropy
from rpbench.models.mlp import Experts, Mlp
from rpbench.workload.architecture import Architecture


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
        """x of whole sequences; or of a segment, given the earlier ones' keys and values, and with its own.

        Args:
            lengths: of sequences that are packed in a row.
        """
        mixed, own = self.attention(self.attention_norm(x), earlier or (), lengths)
        x = x + functional.dropout(mixed, self.dropout, self.training)
        x = x + functional.dropout(self.mlp(self.mlp_norm(x)), self.dropout, self.training)
        return x if earlier is None else (x, own)


class Head(nn.Module):
    """The last layer: final norm, output matrix, and the loss where labels are given."""

    def __init__(self, model: Architecture, chunk_tokens: int = CHUNK_TOKENS) -> None:
        super().__init__()
        self.norm = Norm(model.hidden, model.norm_eps)
        self.weight = nn.Parameter(torch.empty(model.vocab, model.hidden))
        self.chunk_tokens = chunk_tokens

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        """Logits (B, S, V) of x (B, S, H); or, with labels (B, S), their mean cross-entropy without the logits."""
        x = self.norm(x)
        if labels is None:
            return linear(x, self.weight)
        return linear_cross_entropy(x.flatten(0, 1), self.weight, labels.flatten(), self.chunk_tokens)
