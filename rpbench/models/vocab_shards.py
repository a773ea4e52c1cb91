"""A vocabulary in shards: the rows of the head's matrix over devices, and cross-entropy over all of them.

The chain of layers ends with the final norm. The shards follow it, each a module of its own, because each is on another
device. An embedding tied to the head is cut as well, so that its shard and the head's are one parameter. No device has
all logits: each computes those of its rows, their maximum and their sum of exponentials. From those of all shards
follow the loss and, in a second half, each shard's probabilities and gradients:

    shard d    logits -> maximum_d, mass_d   |   gradient of its rows, its part of the hidden state's gradient
    together         maximum, mass, loss     |         sum of the parts

The exponentials, (N, rows) in at least float32, are kept from one half to the other, so that no matrix product is
computed twice. Sums over shards are taken in their order, so that they are always the same.

Source: Yeung, Qi, Lin and Wan, "Balancing Pipeline Parallelism with Vocabulary Parallelism", MLSys'25 (arXiv
2411.05288), section 4: the algorithm with two barriers.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional

from rpbench.models.layers import Embedding, Head
from rpbench.models.loss import CHUNK_TOKENS, add_product


class Sums(NamedTuple):
    """Statistics of every token's logits, of one shard or of all together; (N, 1) each, in at least float32."""

    maximum: torch.Tensor  # of the logits
    mass: torch.Tensor  # sum of exp(logit - maximum)
    of_label: torch.Tensor  # the label's logit; 0 in a shard that does not have it


class Half(NamedTuple):
    """A shard between its halves: exp(logit - its own maximum), (N, rows), and its sums."""

    exponentials: torch.Tensor
    sums: Sums


class Shard(NamedTuple):
    """Some rows of the output matrix."""

    rows: torch.Tensor  # (R, H), at least one
    first_row: int  # its number in the whole matrix
    chunk_tokens: int  # tokens at a time: bounds temporary memory, not that of the exponentials

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
        """The second half, which overwrites the exponentials.

        `whole` are the sums of all shards, `scale` is the gradient of the sum of the tokens' losses. Returns this
        shard's part of the gradient of the hidden states, (N, H), and the gradient of its rows, None if frozen.
        """
        grad_hidden = torch.empty_like(hidden)
        grad_rows: torch.Tensor | None = None
        mass = whole.mass * (whole.maximum - half.sums.maximum).exp()  # of all shards, relative to this one's maximum
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
        """The labels as columns of this shard, (N, 1), and whether they are inside."""
        return _inside(labels.unsqueeze(1), self.first_row, len(self.rows))


def _inside(numbers: torch.Tensor, first_row: int, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of the whole matrix as rows of a shard, arbitrary outside of it; and whether they are inside."""
    own = numbers - first_row
    return own.clamp(0, num_rows - 1), (own >= 0) & (own < num_rows)


def look_up(tokens: torch.Tensor, rows: torch.Tensor, first_row: int) -> torch.Tensor:
    """Embeddings (B, S, H) of tokens (B, S) by some rows of the matrix; 0 for tokens of other rows."""
    own, inside = _inside(tokens, first_row, len(rows))
    return functional.embedding(own, rows) * inside.unsqueeze(-1)


def _product(left: torch.Tensor, right: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """left @ right, written to `target`, whose type may be wider."""
    return torch.mm(left, right, out=target) if target.dtype == left.dtype else target.copy_(left @ right)


def sum_in_order(parts: Iterable[torch.Tensor]) -> torch.Tensor:
    *_, found = accumulate(parts)
    return found


def largest_of(parts: Iterable[torch.Tensor]) -> torch.Tensor:
    """The largest of all parts, value by value."""
    *_, found = accumulate(parts, torch.maximum)
    return found


Joining = Callable[[Sequence[torch.Tensor]], torch.Tensor]


def together(shares: Sequence[Sums], largest: Joining = largest_of, total: Joining = sum_in_order) -> Sums:
    """The sums of all shards, by functions that join tensors of the shards."""
    maximum = largest([share.maximum for share in shares])
    mass = total([share.mass * (share.maximum - maximum).exp() for share in shares])
    return Sums(maximum, mass, total([share.of_label for share in shares]))


def summed_loss(whole: Sums) -> torch.Tensor:
    """The sum of the tokens' losses, a scalar."""
    return (whole.mass.log() - (whole.of_label - whole.maximum)).sum()


class FinalNorm(nn.Module):
    """A head without its matrix: x (B, S, H) -> (B, S, H)."""

    def __init__(self, head: Head) -> None:
        super().__init__()
        self.norm = head.norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = self.norm(x)
        return normed


class Rows(nn.Module):
    """Some rows of a vocabulary's matrix: of an embedding, tokens (B, S) -> x (B, S, H), or of a head."""

    def __init__(self, weight: nn.Parameter, first_row: int, chunk_tokens: int = CHUNK_TOKENS) -> None:
        super().__init__()
        self.weight, self.first_row, self.chunk_tokens = weight, first_row, chunk_tokens

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return look_up(tokens, self.weight, self.first_row)

    def shard(self, weight: torch.Tensor) -> Shard:
        """The shard of the loss with this weight."""
        return Shard(weight, self.first_row, self.chunk_tokens)


class EmbeddingInShards(nn.Module):
    """An embedding with the rows of the head's shards: tokens (B, S) -> x (B, S, H)."""

    def __init__(self, embedding: Embedding, shares: Sequence[Rows]) -> None:
        super().__init__()
        self.rows = nn.ParameterList(share.weight for share in shares)
        self.first_rows = [share.first_row for share in shares]
        self.dropout = embedding.dropout

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        found = [look_up(tokens, rows, first) for first, rows in zip(self.first_rows, self.rows, strict=True)]
        return functional.dropout(torch.stack(found).sum(0), self.dropout, self.training)


def cut_vocabulary(modules: Sequence[nn.Module], num_shards: int) -> list[nn.Module]:
    """Embedding, layers and final norm, then the shards of the head; weights are not copied.

    Raises ValueError if the last module is no `Head`, or has fewer rows than shards.
    """
    embedding, *layers, head = modules
    if not isinstance(head, Head):
        raise ValueError(
            f"{type(head).__name__} cannot be cut over the vocabulary: the last module must be a Head; use another "
            "schedule, such as 1f1b"
        )
    whole, learns = head.weight.detach(), head.weight.requires_grad
    shares = [
        Rows(nn.Parameter(whole[rows.start : rows.stop], learns), rows.start, head.chunk_tokens)
        for rows in share_rows(len(whole), num_shards)
    ]
    if isinstance(embedding, Embedding) and embedding.weight is head.weight:
        embedding = EmbeddingInShards(embedding, shares)
    return [embedding, *layers, FinalNorm(head), *shares]


def share_rows(vocab: int, num_shards: int) -> list[range]:
    """The rows of each shard, whose numbers differ by one at most; ValueError for fewer rows than shards."""
    if vocab < num_shards:
        raise ValueError(
            f"a vocabulary of {vocab} in {num_shards} shares: each has at least one row; take fewer devices"
        )
    return [range(vocab * share // num_shards, vocab * (share + 1) // num_shards) for share in range(num_shards)]
