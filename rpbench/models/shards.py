"""Shards: decoder layers, embedding and head whose matrices are cut over devices, as in Megatron-LM.

Queries, keys and values are cut by columns, whole heads at a time, and so are the first matrices of the MLP; the last
matrices of attention and MLP are cut by rows. A shard is then an attention with fewer heads, or a narrower MLP, and the
outputs of the shards are partial sums:

    x --- spread ---> shard 0 ---+
             |                   sum ---> x
             +------> shard 1 ---+

`spread` gives every shard the same tensor and adds up their gradients; `sum` adds up and gives every shard the same
gradient: the operators f and g of the paper. Norms and residuals are outside, and whole.

    q, k, v, gate, up, sinks    a shard's own columns, with their biases
    o, down                     a shard's own rows; the bias is in the first shard, so that it is added once
    q_norm, k_norm, router      whole and the same in every shard; the gradients of all shards are added up
    adapters                    one matrix is cut as the weight is, the other is whole
    norms                       outside, and whole; along the sequence: whole in every shard, for its tokens

Both ends are cut by rows of the vocabulary, V/p for each of p devices:

    embedding   tokens -> shard 0: its rows, 0 for others' tokens ---+
                       -> shard 1 ---------------------------------- sum ---> x
    head        x -> norm -> spread -> shard 0: logits, maximum, sum of exponentials, the label's logit ---+
                                    -> shard 1 ------------------------------ largest, sum, sum ---> loss

The logits of a shard stay on its device; three numbers a token are exchanged. In backward, `spread` adds up the parts
of the gradient of x: one sum of the size of x, as in the embedding's forward. Tied ends have tied shards.

A sum rounds otherwise than the product that it replaces, so a layer in shards equals the whole one only up to rounding.

Source: Shoeybi et al., "Megatron-LM", arXiv 1909.08053, section 3, figure 3: the embedding's all-reduce, and the head
with the loss in one ("fusing the output with the cross entropy loss").
"""

import copy
import math
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, Protocol, TypeVar

import torch
from torch import nn
from torch.nn import functional

from rpbench.models.attention import Attention, KeysValues
from rpbench.models.layers import DecoderLayer, Embedding, Head
from rpbench.models.vocab_shards import Rows, Shard, largest_of, share_rows, sum_in_order, summed_loss, together

Named = Mapping[str, torch.Tensor]
M = TypeVar("M", bound=nn.Module)

_BY_COLUMNS = ("q", "k", "v", "gate", "up")
_BY_ROWS = ("o", "down")
_BLOCKS = ("attention", "mlp")  # of a decoder layer, which are cut
_NORMS = ("attention_norm", "mlp_norm", "norm")  # of a decoder layer and of the head
_ENDS = "vocabulary"  # of embedding and head: the shards of their matrix


class Adding(Protocol):
    """Collectives over shards; tensors are given and returned by shard."""

    def spread(self, x: torch.Tensor, num_shards: int) -> Sequence[torch.Tensor]:
        """One tensor for each shard; backward adds up their gradients."""

    def sum(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """The sum over all shards; backward gives each the same gradient."""

    def total(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """The sum over all shards, without gradient."""

    def largest(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """The largest of all shards, value by value, without gradient."""


class InOnePlace:
    """All shards are in this process; sums are taken in their order."""

    def spread(self, x: torch.Tensor, num_shards: int) -> Sequence[torch.Tensor]:
        found: tuple[torch.Tensor, ...] = _Spread.apply(x, num_shards)
        return found

    sum = total = staticmethod(sum_in_order)
    largest = staticmethod(largest_of)


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, num_shards: int) -> tuple[torch.Tensor, ...]:
        return tuple(x.view_as(x) for _ in range(num_shards))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return sum_in_order(gradients), None


class Shards(nn.Module):
    """Some or all shards of a block, by number."""

    def __init__(self, shares: Mapping[int, nn.Module], adding: Adding) -> None:
        super().__init__()
        self.shares = nn.ModuleDict({str(number): share for number, share in shares.items()})
        self.adding = adding

    def of(self, number: int, adding: Adding) -> "Shards":
        return type(self)({number: self.shares[str(number)]}, adding)

    def _each(self, x: torch.Tensor, *more: Any) -> list[Any]:
        inputs = self.adding.spread(x, len(self.shares))
        return [share(own, *more) for share, own in zip(self.shares.values(), inputs, strict=True)]


class AttentionShards(Shards):
    """Self-attention in shards: x (B, S, H) -> (B, S, H), and the keys and values of the first shard here."""

    def forward(
        self, x: torch.Tensor, earlier: Sequence[KeysValues] = (), lengths: Sequence[int] = ()
    ) -> tuple[torch.Tensor, KeysValues]:
        """The output for whole sequences, packed ones included; ValueError for segments."""
        if earlier:
            raise ValueError("attention in shares takes whole sequences, and was given a segment of one")
        mixed, own = zip(*self._each(x, earlier, lengths), strict=True)
        return self.adding.sum(mixed), own[0]


class MlpShards(Shards):
    """An MLP in shards: x (B, S, H) -> (B, S, H)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.adding.sum(self._each(x))


class NormShards(Shards):
    """A norm whose tokens are cut over the shards, which all have its scale: (B, S, H) -> (B, S, H).

    x is of whole sequences if all shards are here; a shard alone gets its own slice.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        slices = x.chunk(len(self.shares), 1)  # equal ones, as checked
        found = [share(own) for share, own in zip(self.shares.values(), slices, strict=True)]
        return torch.cat(found, 1) if len(found) > 1 else found[0]


def norm_shards(norm: nn.Module, num_shards: int) -> NormShards:
    """A norm in shards along the sequence, with tied scales, whose gradients are added up."""
    return NormShards({number: _same_weights(norm) for number in range(num_shards)}, InOnePlace())


def cut_layer(layer: DecoderLayer, num_shards: int, *, along_sequence: bool = False) -> DecoderLayer:
    """The layer with all its shards; ValueError if it cannot be cut evenly.

    Norms are the layer's own, or with `along_sequence` cut along the sequence.
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
    """A layer or an end that has been cut, with one of its shards alone and the same weights."""
    found = _same_weights(layer)
    for block, shares in layer.named_children():
        if isinstance(shares, Shards):
            setattr(found, block, shares.of(number, adding))
    return found


def check_shards(layer: DecoderLayer, num_shards: int) -> None:
    """Raise ValueError for a layer whose heads or inner width cannot be cut into equal shards."""
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
    """The parameters on the device with one shard of a layer; all, of a layer that is not cut."""
    return [
        parameter
        for name, parameter in layer.named_parameters(remove_duplicate=False)
        if ".shares." not in name or f".shares.{number}." in name
    ]


# --- tensors by name, cut and whole ---------------------------------------------------------------------------


def cut_tensors(named: Named, num_shards: int, *, norms_too: bool = False) -> dict[str, torch.Tensor]:
    """The tensors of a module as its shards have them, under their names in the cut module.

    With `norms_too`, those of norms are there also under their names when cut along the sequence.
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
            if norms_too and block in _NORMS:
                found |= {f"{block}.shares.{number}.{rest}": tensor for number in range(num_shards)}
            continue
        for number in range(num_shards):
            part = _part(rest, tensor, number, num_shards)
            if part is not None:
                found[f"{block}.shares.{number}.{rest}"] = part
    return found


def joined_tensors(named: Named) -> dict[str, torch.Tensor]:
    """The tensors of a module in shards as the whole module has them: joined, or added up if all shards have one."""
    parts: dict[str, dict[int, torch.Tensor]] = {}
    for name, tensor in named.items():
        block, shares, rest = name.partition(".shares.")
        number, _, own = rest.partition(".")
        whole = own if block == _ENDS else f"{block}.{own}"
        parts.setdefault(whole if shares else name, {})[int(number or 0)] = tensor
    return {name: _joined(name, [found[number] for number in sorted(found)]) for name, found in parts.items()}


def _joined(name: str, parts: list[torch.Tensor]) -> torch.Tensor:
    dimension = 0 if name == "weight" else _dimension(name.partition(".")[2])
    if len(parts) == 1 or not parts[0].dim():  # a number, such as an optimizer's count of steps, is the same in all
        return parts[0]
    return sum_in_order(parts) if dimension is None else torch.cat(parts, dimension)


def cut_rows(tensor: torch.Tensor, num_shards: int) -> list[torch.Tensor]:
    """The shards of a matrix with the vocabulary's rows, or of its optimizer state; ValueError as of `share_rows`."""
    if not tensor.dim():  # such as an optimizer's count of steps: the same in all
        return [tensor] * num_shards
    return [tensor[rows.start : rows.stop].clone() for rows in share_rows(len(tensor), num_shards)]


def _dimension(name: str) -> int | None:
    """The dimension along which a block's parameter is cut; None if it is not cut."""
    *owner, kind = name.split(".")
    if not owner:
        return 0 if kind == "sinks" else None
    if owner[0] in _BY_COLUMNS:
        return {"weight": -2, "lora_b": -2, "bias": -1}.get(kind)
    return -1 if owner[0] in _BY_ROWS and kind in ("weight", "lora_a") else None


def _part(name: str, tensor: torch.Tensor, number: int, num_shards: int) -> torch.Tensor | None:
    """A shard's part of a block's parameter, or of its optimizer state; None if it has none."""
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
    """A copy of the layer with the same parameter and buffer objects."""
    tensors = [*layer.parameters(), *layer.buffers()]
    return copy.deepcopy(layer, {id(tensor): tensor for tensor in tensors})


class CutEmbedding(nn.Module):
    """An embedding in shards: tokens (B, S) -> x (B, S, H)."""

    def __init__(self, vocabulary: Shards, dropout: float) -> None:
        super().__init__()
        self.vocabulary, self.dropout = vocabulary, dropout

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        found = self.vocabulary.adding.sum([rows(tokens) for rows in self.vocabulary.shares.values()])
        return functional.dropout(found, self.dropout, self.training)


class CutHead(nn.Module):
    """Final norm, output matrix in shards, and the loss: x (B, S, H), labels (B, S) -> their mean cross-entropy."""

    def __init__(self, norm: nn.Module, vocabulary: Shards) -> None:
        super().__init__()
        self.norm, self.vocabulary = norm, vocabulary

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        adding, rows = self.vocabulary.adding, self.vocabulary.shares.values()
        shares = [each.shard(each.weight) for each in rows if isinstance(each, Rows)]
        hidden = [own.flatten(0, 1) for own in adding.spread(self.norm(x), len(shares))]
        return _mean_loss(adding, shares, labels.flatten(), hidden)


def loss_over_shards(shares: Sequence[Shard], hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of hidden states (N, H) against labels (N,), with all shards in one process."""
    here = InOnePlace()
    return _mean_loss(here, shares, labels, here.spread(hidden, len(shares)))


def _mean_loss(
    adding: Adding, shares: Sequence[Shard], labels: torch.Tensor, hidden: Sequence[torch.Tensor]
) -> torch.Tensor:
    total: torch.Tensor = _LossOfShards.apply(adding, shares, labels, *hidden, *(share.rows for share in shares))
    return total / len(labels)


class _LossOfShards(torch.autograd.Function):
    """The sum of the tokens' losses from the shards that are here; forward runs their first halves."""

    @staticmethod
    def forward(
        ctx: Any, adding: Adding, shares: Sequence[Shard], labels: torch.Tensor, *tensors: torch.Tensor
    ) -> torch.Tensor:
        hidden = tensors[: len(shares)]
        halves = [share.forward(own, labels) for share, own in zip(shares, hidden, strict=True)]
        ctx.shares, ctx.halves = shares, halves
        ctx.whole = together([half.sums for half in halves], adding.largest, adding.total)
        ctx.save_for_backward(labels, *hidden)
        return summed_loss(ctx.whole)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        labels, *hidden = ctx.saved_tensors
        halves = ctx.halves
        del ctx.halves  # overwritten: there is no second backward
        found = [
            share.backward(own, labels, half, ctx.whole, grad_outputs[0])
            for share, own, half in zip(ctx.shares, hidden, halves, strict=True)
        ]
        return None, None, None, *(part for part, _ in found), *(rows for _, rows in found)


def cut_ends(
    embedding: nn.Module, head: nn.Module, num_shards: int, *, along_sequence: bool = False
) -> tuple[nn.Module, nn.Module]:
    """Embedding and head with all their shards; with `along_sequence` the head's norm is cut along the sequence.

    Raises ValueError if the modules are no embedding and head, or the vocabulary has fewer rows than shards.
    """
    if not isinstance(embedding, Embedding) or not isinstance(head, Head):
        names = f"{type(embedding).__name__} and {type(head).__name__}"
        raise ValueError(f"{names} have no shares: tensor parallelism cuts an Embedding and a Head over the vocabulary")
    rows: dict[int, list[nn.Parameter]] = {}
    for weight in (embedding.weight, head.weight):
        if id(weight) not in rows:  # tied ones are cut once
            parts = cut_rows(weight.detach(), num_shards)
            rows[id(weight)] = [nn.Parameter(part, weight.requires_grad) for part in parts]
    first, last = (_vocabulary(rows[id(end.weight)], head.chunk_tokens) for end in (embedding, head))
    norm = norm_shards(head.norm, num_shards) if along_sequence else head.norm
    return CutEmbedding(first, embedding.dropout), CutHead(norm, last)


def _vocabulary(rows: Sequence[nn.Parameter], chunk_tokens: int) -> Shards:
    starts = accumulate(map(len, rows[:-1]), initial=0)
    pairs = enumerate(zip(rows, starts, strict=True))
    return Shards({n: Rows(own, start, chunk_tokens) for n, (own, start) in pairs}, InOnePlace())
