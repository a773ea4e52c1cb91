"""Cut ends: embedding and head of a model whose matrices are cut over devices, as Megatron-LM cuts them.

Both ends are cut by rows of the vocabulary, V/p for each of p devices:

    embedding   tokens -> share 0: its rows, 0 for others' tokens ---+
                       -> share 1 ---------------------------------- sum ---> x
    head        x -> norm -> spread -> share 0: logits, maximum, sum of exponentials, the label's logit ---+
                                    -> share 1 ------------------------------ largest, sum, sum ---> loss

The logits of a share stay where they are; what is brought together are three numbers a token. In backward, a share's
probabilities less its labels are its own as well, and `spread` adds up the parts of the gradient of x: one sum of the
size of x, as the embedding's forward. Ends that are tied have tied shares.

Source: Shoeybi et al., "Megatron-LM", arXiv 1909.08053, section 3: the embedding's all-reduce, and the head with the
loss in one ("fusing the output with the cross entropy loss").
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from rpbench.models.layers import Embedding, Head
from rpbench.models.shards import Adding, InOnePlace, Shares, cut_rows, norm_shares
from rpbench.models.vocab_shards import Half, Share, Sums, summed_loss


class Rows(nn.Module):
    """Some rows of a vocabulary's matrix."""

    def __init__(self, weight: nn.Parameter, first_row: int) -> None:
        super().__init__()
        self.weight = weight
        self.first_row = first_row

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Embeddings (B, S, H) of tokens (B, S); 0 for those of other rows."""
        own = tokens - self.first_row
        inside = (own >= 0) & (own < len(self.weight))
        return functional.embedding(own.clamp(0, len(self.weight) - 1), self.weight) * inside.unsqueeze(-1)

    def share(self, chunk_tokens: int) -> Share:
        """The same rows as a share of the loss."""
        return Share(self.weight, self.first_row, chunk_tokens)


class CutEmbedding(nn.Module):
    """An embedding in shares: tokens (B, S) -> x (B, S, H)."""

    def __init__(self, vocabulary: Shares, dropout: float) -> None:
        super().__init__()
        self.vocabulary, self.dropout = vocabulary, dropout

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        found = self.vocabulary.adding.sum([rows(tokens) for rows in self.vocabulary.shares.values()])
        return functional.dropout(found, self.dropout, self.training)


class CutHead(nn.Module):
    """Final norm, output matrix in shares, and the loss: x (B, S, H), labels (B, S) -> their mean cross-entropy."""

    def __init__(self, norm: nn.Module, vocabulary: Shares, chunk_tokens: int) -> None:
        super().__init__()
        self.norm, self.vocabulary, self.chunk_tokens = norm, vocabulary, chunk_tokens

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        adding, rows = self.vocabulary.adding, self.vocabulary.shares.values()
        shares = [each.share(self.chunk_tokens) for each in rows if isinstance(each, Rows)]
        hidden = [own.flatten(0, 1) for own in adding.spread(self.norm(x), len(shares))]
        weights = [share.rows for share in shares]
        total: torch.Tensor = _LossOfShares.apply(adding, shares, labels.flatten(), *hidden, *weights)
        return total / labels.numel()


class _LossOfShares(torch.autograd.Function):
    """The sum of the tokens' losses from the shares that are here; forward is their first halves."""

    @staticmethod
    def forward(
        ctx: Any, adding: Adding, shares: Sequence[Share], labels: torch.Tensor, *tensors: torch.Tensor
    ) -> torch.Tensor:
        hidden = tensors[: len(shares)]
        halves = [share.forward(own, labels) for share, own in zip(shares, hidden, strict=True)]
        ctx.shares, ctx.halves, ctx.whole = shares, halves, _together(adding, halves)
        ctx.save_for_backward(labels, *hidden)
        return summed_loss(ctx.whole)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        labels, *hidden = ctx.saved_tensors
        halves = ctx.halves
        del ctx.halves  # used up: there is no second backward
        found = [
            share.backward(own, labels, half, ctx.whole, grad_outputs[0])
            for share, own, half in zip(ctx.shares, hidden, halves, strict=True)
        ]
        return None, None, None, *(part for part, _ in found), *(rows for _, rows in found)


def _together(adding: Adding, halves: Sequence[Half]) -> Sums:
    """Statistics of every token's logits over all shares, from those that are here."""
    maximum = adding.largest([half.sums.maximum for half in halves])
    mass = adding.total([half.sums.mass * (half.sums.maximum - maximum).exp() for half in halves])
    return Sums(maximum, mass, adding.total([half.sums.of_label for half in halves]))


def cut_ends(
    embedding: nn.Module, head: nn.Module, num_shares: int, *, along_sequence: bool = False
) -> tuple[nn.Module, nn.Module]:
    """Embedding and head with all their shares, in one place.

    Args:
        along_sequence: the head's norm is cut as well, along the sequence.

    Raises:
        ValueError: if these modules are no embedding and no head, or the vocabulary has fewer rows than shares.
    """
    if not isinstance(embedding, Embedding) or not isinstance(head, Head):
        names = f"{type(embedding).__name__} and {type(head).__name__}"
        raise ValueError(f"{names} have no shares: tensor parallelism cuts an Embedding and a Head over the vocabulary")
    rows: dict[int, list[nn.Parameter]] = {}
    for weight in (embedding.weight, head.weight):
        if id(weight) not in rows:  # tied ones are cut once
            parts = cut_rows(weight.detach(), num_shares)
            rows[id(weight)] = [nn.Parameter(part, weight.requires_grad) for part in parts]
    first, last = (_shares(rows[id(end.weight)]) for end in (embedding, head))
    norm = norm_shares(head.norm, num_shares) if along_sequence else head.norm
    return CutEmbedding(first, embedding.dropout), CutHead(norm, last, head.chunk_tokens)


def _shares(rows: Sequence[nn.Parameter]) -> Shares:
    found: dict[int, nn.Module] = {}
    first = 0
    for number, weight in enumerate(rows):
        found[number] = Rows(weight, first)
        first += len(weight)
    return Shares(found, InOnePlace())
