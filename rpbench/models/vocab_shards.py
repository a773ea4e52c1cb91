"""A vocabulary in shares: the head as shards of its rows behind the final norm, and cross-entropy over all of them.

What a chain of layers ends with is the norm; shares follow it, each a module of its own, because each lives on another
device. An embedding tied to the head is cut as well, so that a share of both is one parameter. Nobody has all logits.
Every share makes those of its rows with their maximum and sum of exponentials; from those of all shares follow the loss
and, in a second half, each share's probabilities and gradients:

    share d    logits -> maximum_d, mass_d   |   gradient of its rows, its part of the hidden state's gradient
    together         maximum, mass, loss     |         the parts' sum

Exponentials stay from one half to the other, (N, rows) of them in at least float32: with them, no product of matrices
is done twice. Sums over shares are taken in the order of the shares, so that they are always the same.

Source: Yeung, Qi, Lin and Wan, "Balancing Pipeline Parallelism with Vocabulary Parallelism", MLSys'25 (arXiv
2411.05288), section 4: the algorithm with two barriers.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from rpbench.models.layers import Embedding, Head
from rpbench.models.loss import add_product


class Sums(NamedTuple):
    """Statistics of every token's logits, of one share or of all together; (N, 1) each, of at least float32.

    Args:
        maximum: of the logits.
        mass: sum of exp(logit - maximum).
        of_label: the label's logit; 0 in a share that does not have it.
    """

    maximum: torch.Tensor
    mass: torch.Tensor
    of_label: torch.Tensor


class Half(NamedTuple):
    """A share between its halves: exp(logit - its own maximum), (N, rows), and its sums."""

    exponentials: torch.Tensor
    sums: Sums


class Shard(NamedTuple):
    """Some rows of the output matrix.

    Args:
        rows: (R, H), at least one.
        first_row: the number of the first one in the whole matrix.
        chunk_tokens: tokens worked on at a time; it bounds what is needed for a moment, not the exponentials.
    """

    rows: torch.Tensor
    first_row: int
    chunk_tokens: int

    def forward(self, hidden: torch.Tensor, labels: torch.Tensor) -> Half:
        """The first half, of hidden states (N, H) and labels (N,)."""
        exact = torch.promote_types(hidden.dtype, torch.float32)
        exponentials = hidden.new_empty(len(hidden), len(self.rows), dtype=exact)
        found = []
        for chunk in self._chunks(hidden):
            column, inside = self._columns(labels[chunk])
            logits = _product(hidden[chunk], self.rows.T, exponentials[chunk])
            maximum = logits.amax(-1, keepdim=True)
            of_label = logits.gather(1, column) * inside
            found.append(Sums(maximum, logits.sub_(maximum).exp_().sum(-1, keepdim=True), of_label))
        return Half(exponentials, Sums(*map(torch.cat, zip(*found, strict=True))))

    def backward(
        self, hidden: torch.Tensor, labels: torch.Tensor, half: Half, whole: Sums, scale: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The second half, which uses the exponentials up.

        Args:
            whole: the sums of all shares.
            scale: the gradient of what is trained by the sum of the tokens' losses.

        Returns:
            This share's part of the gradient of the hidden states, (N, H), and the gradient of its rows; None where
            they are frozen.
        """
        grad_hidden = torch.empty_like(hidden)
        grad_rows: torch.Tensor | None = None
        mass = whole.mass * (whole.maximum - half.sums.maximum).exp()  # of all shares, by this one's maximum
        for chunk in self._chunks(hidden):
            column, inside = self._columns(labels[chunk])
            gradients = half.exponentials[chunk].div_(mass[chunk])  # the probabilities
            gradients.scatter_add_(1, column, -inside.to(gradients.dtype))  # d loss / d logits
            gradients = gradients.to(hidden.dtype)
            torch.mm(gradients, self.rows, out=grad_hidden[chunk])
            if self.rows.requires_grad:
                grad_rows = add_product(grad_rows, gradients.T, hidden[chunk], half.exponentials.dtype)
        return grad_hidden * scale, None if grad_rows is None else (grad_rows * scale).to(self.rows.dtype)

    def _chunks(self, hidden: torch.Tensor) -> Iterator[slice]:
        return (slice(start, start + self.chunk_tokens) for start in range(0, len(hidden), self.chunk_tokens))

    def _columns(self, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The labels as columns of this share, (N, 1), arbitrary where outside of it; and whether they are inside."""
        column = labels.unsqueeze(1) - self.first_row
        inside = (column >= 0) & (column < len(self.rows))
        return column.clamp(0, len(self.rows) - 1), inside


def _product(left: torch.Tensor, right: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """left @ right, written to `target`, whose type may be wider."""
    return torch.mm(left, right, out=target) if target.dtype == left.dtype else target.copy_(left @ right)


def together(shares: Sequence[Sums]) -> Sums:
    """The sums of all shares, added in their order."""
    maximum = shares[0].maximum
    for share in shares[1:]:
        maximum = maximum.maximum(share.maximum)
    mass, of_label = torch.zeros_like(maximum), torch.zeros_like(maximum)
    for share in shares:
        mass += share.mass * (share.maximum - maximum).exp()
        of_label += share.of_label
    return Sums(maximum, mass, of_label)


def summed_loss(whole: Sums) -> torch.Tensor:
    """The sum of the tokens' losses, a scalar."""
    return (whole.mass.log() - (whole.of_label - whole.maximum)).sum()


def loss_over_shards(shares: Sequence[Shard], hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of hidden states (N, H) against labels (N,), by shares of the matrix in one process."""
    total: torch.Tensor = _SummedLoss.apply(shares, hidden, labels, *(share.rows for share in shares))
    return total / len(labels)


class _SummedLoss(torch.autograd.Function):
    """Sum of the tokens' losses; forward is all first halves, backward all second ones."""

    @staticmethod
    def forward(
        ctx: Any, shares: Sequence[Shard], hidden: torch.Tensor, labels: torch.Tensor, *rows: torch.Tensor
    ) -> torch.Tensor:
        ctx.shares, ctx.halves = shares, [share.forward(hidden, labels) for share in shares]
        ctx.save_for_backward(hidden, labels)
        return summed_loss(together([half.sums for half in ctx.halves]))

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, labels = ctx.saved_tensors
        (scale,) = grad_outputs
        halves = ctx.halves
        del ctx.halves  # used up: there is no second backward
        whole = together([half.sums for half in halves])
        grad_hidden: torch.Tensor | None = None
        grad_rows = []
        for share, half in zip(ctx.shares, halves, strict=True):
            part, found = share.backward(hidden, labels, half, whole, scale)
            grad_hidden = part if grad_hidden is None else grad_hidden + part
            grad_rows.append(found)
        return None, grad_hidden, None, *grad_rows


class FinalNorm(nn.Module):
    """A head without its matrix: x (B, S, H) -> normed x."""

    def __init__(self, head: Head) -> None:
        super().__init__()
        self.norm = head.norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = self.norm(x)
        return normed


class HeadShard(nn.Module):
    """Some rows of a head's matrix."""

    def __init__(self, head: Head, rows: range) -> None:
        super().__init__()
        self.weight = nn.Parameter(
            head.weight.detach()[rows.start : rows.stop], requires_grad=head.weight.requires_grad
        )
        self.first_row, self.chunk_tokens = rows.start, head.chunk_tokens

    def shard(self, weight: torch.Tensor) -> Shard:
        """The share with these rows."""
        return Shard(weight, self.first_row, self.chunk_tokens)


class EmbeddingInShards(nn.Module):
    """An embedding whose rows are those of the head's shares: tokens (B, S) -> x (B, S, H).

    Each share looks up the tokens it has; the others' rows are 0 there.
    """

    def __init__(self, embedding: Embedding, shares: Sequence[HeadShard]) -> None:
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


def cut_vocabulary(modules: Sequence[nn.Module], num_shards: int) -> list[nn.Module]:
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
    shares = [HeadShard(head, rows) for rows in share_rows(len(head.weight), num_shards)]
    if isinstance(embedding, Embedding) and embedding.weight is head.weight:
        embedding = EmbeddingInShards(embedding, shares)
    return [embedding, *layers, FinalNorm(head), *shares]


def share_rows(vocab: int, num_shards: int) -> list[range]:
    """The rows of each share; they differ by one at most.

    Raises:
        ValueError: if there are fewer rows than shares.
    """
    if vocab < num_shards:
        raise ValueError(
            f"a vocabulary of {vocab} in {num_shards} shares: each has at least one row; take fewer devices"
        )
    return [range(vocab * share // num_shards, vocab * (share + 1) // num_shards) for share in range(num_shards)]
