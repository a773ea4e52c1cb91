"""A model whose vocabulary is cut: the head as shares of its rows behind the final norm, weights as they were.

What a chain of layers ends with is then the norm; shares follow it, each a module of its own, because each lives on
another device. An embedding tied to the head is cut as well, so that a share of both is one parameter.
"""

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional

from rpbench.models.layers import Embedding, Head
from rpbench.models.sharded.sharded_loss import Share


class FinalNorm(nn.Module):
    """A head without its matrix: x (B, S, H) -> normed x."""

    def __init__(self, head: Head) -> None:
        super().__init__()
        self.norm = head.norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = self.norm(x)
        return normed


class HeadShare(nn.Module):
    """Some rows of a head's matrix."""

    def __init__(self, head: Head, rows: range) -> None:
        super().__init__()
        self.weight = nn.Parameter(
            head.weight.detach()[rows.start : rows.stop], requires_grad=head.weight.requires_grad
        )
        self.first_row, self.chunk_tokens = rows.start, head.chunk_tokens

    def share(self, weight: torch.Tensor) -> Share:
        """The share with these rows."""
        return Share(weight, self.first_row, self.chunk_tokens)


class EmbeddingInShares(nn.Module):
    """An embedding whose rows are those of the head's shares: tokens (B, S) -> x (B, S, H).

    Each share looks up the tokens it has; the others' rows are 0 there.
    """

    def __init__(self, embedding: Embedding, shares: Sequence[HeadShare]) -> None:
        super().__init__()
        self.rows = nn.ParameterList(share.weight for share in shares)
        self.first_rows = [share.first_row for share in shares]
        self.dropout = embedding.dropout

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        found = [self._look_up(tokens - first, rows) for first, rows in zip(self.first_rows, self.rows, strict=True)]
        return functional.dropout(torch.stack(found).sum(0), self.dropout, self.training)

    def _look_up(self, tokens: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        inside = (tokens >= 0) & (tokens < len(rows))
        return functional.embedding(tokens.clamp(0, len(rows) - 1), rows) * inside.unsqueeze(-1)


def cut_vocabulary(modules: Sequence[nn.Module], num_shares: int) -> list[nn.Module]:
    """Embedding, layers and final norm, then the shares of the head; the modules' weights are not copied.

    Raises:
        ValueError: if the last module is no `Head`, or has fewer rows than there are to be shares.
    """
    embedding, *layers, head = modules
    if not isinstance(head, Head):
        raise ValueError(
            f"{type(head).__name__} cannot be cut over the vocabulary: the last module must be a Head; use another "
            "schedule, such as 1f1b"
        )
    shares = [HeadShare(head, rows) for rows in share_rows(len(head.weight), num_shares)]
    if isinstance(embedding, Embedding) and embedding.weight is head.weight:
        embedding = EmbeddingInShares(embedding, shares)
    return [embedding, *layers, FinalNorm(head), *shares]


def share_rows(vocab: int, num_shares: int) -> list[range]:
    """The rows of each share; they differ by one at most.

    Raises:
        ValueError: if there are not enough.
    """
    if vocab < num_shares:
        raise ValueError(
            f"a vocabulary of {vocab} in {num_shares} shares: each has at least one row; take fewer devices"
        )
    return [range(vocab * share // num_shares, vocab * (share + 1) // num_shares) for share in range(num_shares)]
