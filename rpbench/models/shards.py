"""Shards: decoder layers, embedding and head whose matrices are cut over devices, as Megatron-LM cuts them.

Attention's queries, keys and values are cut by columns, whole heads at a time, and so is what leads into the MLP; the
matrices that lead out of either are cut by rows. A share is then an attention, or an MLP, of fewer heads or a narrower
inside, and what the shares come to are partial sums:

    x --- spread ---> share 0 ---+
             |                   sum ---> x
             +------> share 1 ---+

`spread` gives every share the same tensor and adds up what comes back of its gradient; `sum` adds up and hands every
share the same gradient: the operators f and g of the paper. Norms and residuals are outside, and whole.

    q, k, v, gate, up, sinks    a share's own columns, biases with them
    o, down                     a share's own rows; the bias belongs to the first share, so that it is added once
    q_norm, k_norm, router      in every share whole, and the same; a share's gradient of them is a part of theirs
    adapters                    cut along the side that their matrix is cut along; their other matrix is whole
    norms                       outside, and whole; along the sequence: whole in every share, for its tokens

Both ends are cut by rows of the vocabulary, V/p for each of p devices:

    embedding   tokens -> share 0: its rows, 0 for others' tokens ---+
                       -> share 1 ---------------------------------- sum ---> x
    head        x -> norm -> spread -> share 0: logits, maximum, sum of exponentials, the label's logit ---+
                                    -> share 1 ------------------------------ largest, sum, sum ---> loss

The logits of a share stay where they are; what is brought together are three numbers a token. In backward, a share's
probabilities less its labels are its own as well, and `spread` adds up the parts of the gradient of x: one sum of the
size of x, as the embedding's forward. Ends that are tied have tied shares.

A sum has another rounding than the one product it takes the place of, so a layer in shares equals the whole one only
up to the last digits.

Source: Shoeybi et al., "Megatron-LM", arXiv 1909.08053, section 3, figure 3: the embedding's all-reduce, and the head
with the loss in one ("fusing the output with the cross entropy loss").
"""

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, Protocol, TypeVar

import torch
from torch import nn
from torch.nn import functional

from rpbench.models.attention import Attention, KeysValues
from rpbench.models.layers import DecoderLayer, Embedding, Head
from rpbench.models.vocab_shards import Half, Shard, Sums, share_rows, summed_loss

Named = Mapping[str, torch.Tensor]
M = TypeVar("M", bound=nn.Module)

_BY_COLUMNS = ("q", "k", "v", "gate", "up")
_BY_ROWS = ("o", "down")
_BLOCKS = ("attention", "mlp")  # of a decoder layer: what is cut
_NORMS = ("attention_norm", "mlp_norm", "norm")  # of a decoder layer and of the head
_ENDS = "vocabulary"  # of embedding and head: where the shares of their matrix are


class Adding(Protocol):
    """Collectives over shares; tensors are given and returned by share."""

    def spread(self, x: torch.Tensor, num_shards: int) -> Sequence[torch.Tensor]:
        """One tensor for each share; in backward, their gradients are added up."""

    def sum(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """The sum over all shares; in backward, each gets its gradient."""

    def total(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """The sum of some numbers, whole for every share; without gradient."""

    def largest(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """The largest of all shares, value by value; without gradient."""


class InOnePlace:
    """All shares are here: sums in their order."""

    def spread(self, x: torch.Tensor, num_shards: int) -> Sequence[torch.Tensor]:
        found: tuple[torch.Tensor, ...] = _Spread.apply(x, num_shards)
        return found

    def sum(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        return _sum(parts)

    def total(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        return _sum(parts)

    def largest(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        *_, found = accumulate(parts, torch.maximum)
        return found


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, num_shards: int) -> tuple[torch.Tensor, ...]:
        return tuple(x.view_as(x) for _ in range(num_shards))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _sum(gradients), None


def _sum(parts: Iterable[torch.Tensor]) -> torch.Tensor:
    *_, total = accumulate(parts)
    return total


class Shards(nn.Module):
    """Some or all shares of a block, by number."""

    def __init__(self, shares: Mapping[int, nn.Module], adding: Adding) -> None:
        super().__init__()
        self.shares = nn.ModuleDict({str(number): share for number, share in shares.items()})
        self.adding = adding

    def of(self, number: int, adding: Adding) -> "Shards":
        """One share alone, with the same weights."""
        return type(self)({number: self.shares[str(number)]}, adding)

    def _each(self, x: torch.Tensor, *more: Any) -> list[Any]:
        inputs = self.adding.spread(x, len(self.shares))
        return [share(own, *more) for share, own in zip(self.shares.values(), inputs, strict=True)]


class AttentionShards(Shards):
    """Self-attention in shares: x (B, S, H) -> (B, S, H), and the keys and values of the first share here."""

    def forward(
        self, x: torch.Tensor, earlier: Sequence[KeysValues] = (), lengths: Sequence[int] = ()
    ) -> tuple[torch.Tensor, KeysValues]:
        """The output for whole sequences, packed ones included.

        Raises:
            ValueError: for segments of sequences.
        """
        if earlier:
            raise ValueError("attention in shares takes whole sequences, and was given a segment of one")
        mixed, own = zip(*self._each(x, earlier, lengths), strict=True)
        return self.adding.sum(mixed), own[0]


class MlpShards(Shards):
    """An MLP in shares: x (B, S, H) -> (B, S, H)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.adding.sum(self._each(x))


class NormShards(Shards):
    """A norm whose tokens are cut over the shares, which all have its scale: (B, S, H) -> (B, S, H).

    In one place x is of whole sequences; a share alone has its own slice of them.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        slices = x.chunk(len(self.shares), 1)  # whose lengths have been found to divide
        found = [share(own) for share, own in zip(self.shares.values(), slices, strict=True)]
        return torch.cat(found, 1) if len(found) > 1 else found[0]


def norm_shards(norm: nn.Module, num_shards: int) -> NormShards:
    """A norm in shares along the sequence: each has the same scale, tied, and a share's gradient is a part of it."""
    return NormShards({number: _same_weights(norm) for number in range(num_shards)}, InOnePlace())


def cut_layer(layer: DecoderLayer, num_shards: int, *, along_sequence: bool = False) -> DecoderLayer:
    """The layer with all its shares, in one place; norms are the layer's own.

    Args:
        along_sequence: norms are cut as well, along the sequence.

    Raises:
        ValueError: if it cannot be cut evenly.
    """
    check_shards(layer, num_shards)
    found = _same_weights(layer)
    for block, kind in (("attention", AttentionShards), ("mlp", MlpShards)):
        whole = getattr(layer, block)
        setattr(found, block, kind({n: _shard(whole, n, num_shards) for n in range(num_shards)}, InOnePlace()))
    if along_sequence:
        found.attention_norm, found.mlp_norm = (
            norm_shards(norm, num_shards) for norm in (layer.attention_norm, layer.mlp_norm)
        )
    return found


def one_shard(layer: M, number: int, adding: Adding) -> M:
    """A layer or an end that has been cut, with one of its shares alone and the same weights."""
    found = _same_weights(layer)
    for block, shares in layer.named_children():
        if isinstance(shares, Shards):
            setattr(found, block, shares.of(number, adding))
    return found


def check_shards(layer: DecoderLayer, num_shards: int) -> None:
    """Refuse a layer that cannot be cut into equal shares.

    Raises:
        ValueError: if heads or inner width do not divide.
    """
    attention, mlp = layer.attention, layer.mlp
    assert isinstance(attention, Attention)
    sizes = {
        "heads": attention.q.weight.shape[0] // attention.head_dim,
        "KV heads": attention.k.weight.shape[0] // attention.head_dim,
        "values inside its MLP": mlp.up.weight.shape[-2],
    }
    if any(size % num_shards for size in sizes.values()):
        common = math.gcd(*sizes.values())
        ways = ", ".join(str(n) for n in range(2, common + 1) if common % n == 0) or "1"
        has = ", ".join(f"{size} {name}" for name, size in sizes.items())
        raise ValueError(
            f"{num_shards} devices: every one takes as many heads and columns as any other, and a layer has {has}; "
            f"take num_devices from {ways}"
        )


def held_parameters(layer: nn.Module, number: int) -> list[nn.Parameter]:
    """The parameters that the device with a share of a layer holds; of a layer in one piece, all."""
    return [
        parameter
        for name, parameter in layer.named_parameters(remove_duplicate=False)
        if ".shares." not in name or f".shares.{number}." in name
    ]


# --- tensors by name, cut and whole ---------------------------------------------------------------------------


def cut_tensors(named: Named, num_shards: int, *, norms_too: bool = False) -> dict[str, torch.Tensor]:
    """Tensors of a module, by name, as its shares have them: every one's own, by the names they have when it is cut.

    Args:
        norms_too: those of norms also by the names they have when these are cut along the sequence.
    """
    found: dict[str, torch.Tensor] = {}
    for name, tensor in named.items():
        block, _, rest = name.partition(".")
        if name == "weight":  # of an end
            parts = cut_rows(tensor, num_shards)
            found |= {f"{_ENDS}.shares.{number}.{name}": part for number, part in enumerate(parts)}
            continue
        if block not in _BLOCKS:
            found[name] = tensor
            if norms_too and block in _NORMS:  # along the sequence, where all have its scale
                found |= {f"{block}.shares.{number}.{rest}": tensor for number in range(num_shards)}
            continue
        for number in range(num_shards):
            part = _part(rest, tensor, number, num_shards)
            if part is not None:
                found[f"{block}.shares.{number}.{rest}"] = part
    return found


def joined_tensors(named: Named) -> dict[str, torch.Tensor]:
    """Tensors of a module in shares, as the whole one has them: side by side, and what all have added up."""
    parts: dict[str, dict[int, torch.Tensor]] = {}
    for name, tensor in named.items():
        block, shares, rest = name.partition(".shares.")
        number, _, own = rest.partition(".")
        whole = own if block == _ENDS else f"{block}.{own}"
        parts.setdefault(whole if shares else name, {})[int(number or 0)] = tensor
    return {name: _joined(name, [found[number] for number in sorted(found)]) for name, found in parts.items()}


def _joined(name: str, parts: list[torch.Tensor]) -> torch.Tensor:
    dimension = 0 if name == "weight" else _dimension(name.partition(".")[2])
    if len(parts) == 1 or not parts[0].dim():  # a number, such as the steps an optimizer counts, is the same in all
        return parts[0]
    return _sum(parts) if dimension is None else torch.cat(parts, dimension)


def cut_rows(tensor: torch.Tensor, num_shards: int) -> list[torch.Tensor]:
    """A matrix of the vocabulary's rows, or what belongs to one, by share; the rows differ by one at most.

    Raises:
        ValueError: if there are fewer rows than shares.
    """
    if not tensor.dim():  # such as the steps an optimizer counts: the same in all
        return [tensor] * num_shards
    return [tensor[rows.start : rows.stop].clone() for rows in share_rows(len(tensor), num_shards)]


def _dimension(name: str) -> int | None:
    """The dimension along which a block's parameter is cut; None for one that is not cut."""
    *owner, kind = name.split(".")
    if not owner:
        return 0 if kind == "sinks" else None
    if owner[0] in _BY_COLUMNS:
        return {"weight": -2, "lora_b": -2, "bias": -1}.get(kind)
    return -1 if owner[0] in _BY_ROWS and kind in ("weight", "lora_a") else None


def _part(name: str, tensor: torch.Tensor, number: int, num_shards: int) -> torch.Tensor | None:
    """A share's part of a block's parameter, or of something that belongs to it; None if it has none."""
    if name.partition(".")[0] in _BY_ROWS and name.endswith(".bias"):
        return tensor if number == 0 else None
    dimension = _dimension(name)
    if dimension is None or not tensor.dim():
        return tensor
    return tensor.chunk(num_shards, dimension)[number].clone()


def _shard(block: nn.Module, number: int, num_shards: int) -> nn.Module:
    stand_ins: dict[int, Any] = {}
    for name, parameter in block.named_parameters():
        values = parameter.detach()
        part = _part(name, values, number, num_shards)
        own = parameter if part is values else part if part is None else nn.Parameter(part, parameter.requires_grad)
        stand_ins[id(parameter)] = own
    return copy.deepcopy(block, stand_ins)


def _same_weights(layer: M) -> M:
    """A copy that has the very parameters and buffers of the layer."""
    tensors = [*layer.parameters(), *layer.buffers()]
    return copy.deepcopy(layer, {id(tensor): tensor for tensor in tensors})


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

    def shard(self, chunk_tokens: int) -> Shard:
        """The same rows as a share of the loss."""
        return Shard(self.weight, self.first_row, chunk_tokens)


class CutEmbedding(nn.Module):
    """An embedding in shares: tokens (B, S) -> x (B, S, H)."""

    def __init__(self, vocabulary: Shards, dropout: float) -> None:
        super().__init__()
        self.vocabulary, self.dropout = vocabulary, dropout

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        found = self.vocabulary.adding.sum([rows(tokens) for rows in self.vocabulary.shares.values()])
        return functional.dropout(found, self.dropout, self.training)


class CutHead(nn.Module):
    """Final norm, output matrix in shares, and the loss: x (B, S, H), labels (B, S) -> their mean cross-entropy."""

    def __init__(self, norm: nn.Module, vocabulary: Shards, chunk_tokens: int) -> None:
        super().__init__()
        self.norm, self.vocabulary, self.chunk_tokens = norm, vocabulary, chunk_tokens

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        adding, rows = self.vocabulary.adding, self.vocabulary.shares.values()
        shares = [each.shard(self.chunk_tokens) for each in rows if isinstance(each, Rows)]
        hidden = [own.flatten(0, 1) for own in adding.spread(self.norm(x), len(shares))]
        weights = [share.rows for share in shares]
        total: torch.Tensor = _LossOfShards.apply(adding, shares, labels.flatten(), *hidden, *weights)
        return total / labels.numel()


class _LossOfShards(torch.autograd.Function):
    """The sum of the tokens' losses from the shares that are here; forward is their first halves."""

    @staticmethod
    def forward(
        ctx: Any, adding: Adding, shares: Sequence[Shard], labels: torch.Tensor, *tensors: torch.Tensor
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
    embedding: nn.Module, head: nn.Module, num_shards: int, *, along_sequence: bool = False
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
            parts = cut_rows(weight.detach(), num_shards)
            rows[id(weight)] = [nn.Parameter(part, weight.requires_grad) for part in parts]
    first, last = (_shares(rows[id(end.weight)]) for end in (embedding, head))
    norm = norm_shards(head.norm, num_shards) if along_sequence else head.norm
    return CutEmbedding(first, embedding.dropout), CutHead(norm, last, head.chunk_tokens)


def _shares(rows: Sequence[nn.Parameter]) -> Shards:
    found: dict[int, nn.Module] = {}
    first = 0
    for number, weight in enumerate(rows):
        found[number] = Rows(weight, first)
        first += len(weight)
    return Shards(found, InOnePlace())
