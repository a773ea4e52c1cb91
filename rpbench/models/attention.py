"""Causal self-attention: grouped heads, rotary positions, sliding windows, sinks.

A sink takes part in a head's softmax and contributes nothing to its output. Here it is a token before the first one,
which every query sees. Its value is zero. Queries have one extra coordinate, which is 1: the sink's key there makes its
score exactly the sink's number, and the other keys are 0 there. The token has a query too, so the causal rule stays the
plain one, fused kernels apply, and the gradient reaches the sink through its key.

A sequence may come in segments, one call each: a segment's queries also see the keys and values of earlier segments,
and its own are returned for later ones.

Sequences of several lengths may be packed behind each other in one row: each has its own positions and sees none of the
others.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional

from rpbench.models.constants import constant, noted
from rpbench.models.families import TRAITS, rotary_table, rotate
from rpbench.models.linear import Linear
from rpbench.workload.architecture import Architecture


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


WIDENING = 8  # fused kernels want heads of a multiple of 8 values; a sink needs one more value


class KeysValues(NamedTuple):
    """Keys, rotated, and values of a segment of a sequence, for later segments; (B, K, S, D) each."""

    keys: torch.Tensor
    values: torch.Tensor


class Attention(nn.Module):
    """Self-attention of one decoder layer: x (B, S, H) -> (B, S, H)."""

    def __init__(self, model: Architecture, layer: int) -> None:
        super().__init__()
        self.head_dim = model.head_dim
        self.theta = float(model.rope_theta)
        self.scaling = TRAITS[model.family].scaling
        self.window = model.layers[layer].window
        self.q = Linear(model.hidden, model.q_dim, model.biases)
        self.k = Linear(model.hidden, model.kv_dim, model.biases)
        self.v = Linear(model.hidden, model.kv_dim, model.biases)
        self.q_norm = Norm(model.head_dim, model.norm_eps) if model.qk_norm else None
        self.k_norm = Norm(model.head_dim, model.norm_eps) if model.qk_norm else None
        self.sinks = nn.Parameter(torch.empty(model.heads)) if model.attention_sinks else None
        self.o = Linear(model.q_dim, model.hidden, model.biases)

    def forward(
        self, x: torch.Tensor, earlier: Sequence[KeysValues] = (), lengths: Sequence[int] = ()
    ) -> tuple[torch.Tensor, KeysValues]:
        """The output of a segment behind the earlier ones, and its own keys and values.

        `lengths` are those of packed whole sequences; empty for one sequence a row.
        """
        flat = (linear(x) for linear in (self.q, self.k, self.v))
        q, k, v = (each.unflatten(2, (-1, self.head_dim)).transpose(1, 2) for each in flat)  # (B, A, S, D)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        start = sum(before.keys.shape[2] for before in earlier)
        whole = rotary_table(self.head_dim, start + x.shape[1], self.theta, self.scaling, x.dtype, x.device)
        table = whole[0][start:], whole[1][start:]
        if lengths:
            cos, sin = (torch.cat([each[:length] for length in lengths]) for each in whole)
            table = cos, sin
        own = KeysValues(rotate(k, *table), v)
        seen = own
        if earlier:
            keys, values = zip(*earlier, own, strict=True)
            seen = KeysValues(torch.cat(keys, dim=2), torch.cat(values, dim=2))
        q = rotate(q, *table)
        if lengths:
            apart = zip(*(each.split(list(lengths), 2) for each in (q, *own)), strict=True)
            mixed = torch.cat([attend(one, keys, values, self.window, self.sinks) for one, keys, values in apart], 2)
        else:
            mixed = attend(q, *seen, self.window, self.sinks)
        return self.o(mixed.transpose(1, 2).flatten(2)), own


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None = None, sinks: torch.Tensor | None = None
) -> torch.Tensor:
    """Causal attention, (B, A, S, D), of queries (B, A, S, D) to keys and values (B, K, T, D), where K divides A.

    The queries are those of the last S of T tokens. A query sees `window` keys with its own, or all before it. `sinks`
    are one score per query head, (A,).
    """
    head_dim, seq_len, num_before = q.shape[3], k.shape[2], k.shape[2] - q.shape[2]
    mask = None
    if num_before or (window is not None and window < seq_len):
        mask = window_mask(seq_len, window or seq_len, sinks is not None, q.device, num_before)
    # Some fused kernels read one key head for several query heads; a sink belongs to a query head, which then needs its
    # own keys.
    shares_keys = q.device.type == "cpu" or (mask is None and q.element_size() == 2)
    if sinks is not None or not shares_keys:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    if sinks is not None:
        q, k, v = _with_sink(q, k, v, sinks)
    mixed = functional.scaled_dot_product_attention(
        q, k, v, mask, is_causal=mask is None, scale=head_dim**-0.5, enable_gqa=q.shape[1] != k.shape[1]
    )
    return mixed if sinks is None else mixed[:, :, 1:, :head_dim]


def _with_sink(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values with the sink's token in front, (B, A, S + 1, D + 8)."""
    head_dim = q.shape[3]
    q, k, v = (functional.pad(x, (0, WIDENING, 1, 0)) for x in (q, k, v))
    extra = torch.zeros_like(q[0, 0, 0])
    extra[head_dim] = 1.0
    key = sinks.unsqueeze(1) * (extra * head_dim**0.5)  # (A, D + 8); the kernel divides by sqrt(D) again
    first = torch.zeros_like(k[0, 0, :, :1])
    first[0] = 1.0
    return q + extra, k + first * key.unsqueeze(1), v


@lru_cache(maxsize=64)
def window_mask(seq_len: int, window: int, sink: bool, device: torch.device, num_before: int = 0) -> torch.Tensor:
    """True where a query (row) sees a key (column): its own, the `window` - 1 before it, and the sink, if any.

    The `num_before` tokens before the first query have columns but no rows.
    """
    with constant(device):
        size = seq_len + sink
        seen = torch.ones(size, size, dtype=torch.bool, device=device).tril().triu(1 - window)
        if sink:
            seen[:, 0] = True
        rows = [row for row in range(size) if not sink <= row < sink + num_before]
        return noted(seen[rows] if num_before else seen)
