"""Attention against its definition, written out score by score; rotary tables against the references' formulas."""

import math
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rpbench.models.attention import attend, window_mask
from rpbench.models.families import Llama3Scaling, YarnScaling, rotary_table, rotate


def by_definition(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None, sinks: torch.Tensor | None
) -> torch.Tensor:
    seq_len, head_dim = q.shape[2:]
    share = q.shape[1] // k.shape[1]
    heads = []
    for head in range(q.shape[1]):
        scores = q[:, head] @ k[:, head // share].transpose(1, 2) / math.sqrt(head_dim)
        for query, key in product(range(seq_len), repeat=2):
            if key > query or (window is not None and query - key >= window):
                scores = scores.index_put((torch.arange(len(q)), torch.tensor(query), torch.tensor(key)), _OUT)
        mass = scores.exp().sum(-1, keepdim=True) + (0 if sinks is None else sinks[head].exp())
        heads.append(scores.exp() / mass @ v[:, head // share])
    return torch.stack(heads, dim=1)


_OUT = torch.tensor(-math.inf, dtype=torch.float64)


@given(
    seq_len=st.integers(1, 7),
    groups=st.tuples(st.integers(1, 2), st.integers(1, 3)),
    head_dim=st.sampled_from([2, 6, 8]),
    window=st.none() | st.integers(1, 8),
    with_sinks=st.booleans(),
)
def test_attention_is_its_definition(
    seq_len: int, groups: tuple[int, int], head_dim: int, window: int | None, with_sinks: bool
) -> None:
    kv_heads, share = groups
    generator = torch.Generator().manual_seed(seq_len)
    shapes = [(2, kv_heads * share, seq_len, head_dim), *[(2, kv_heads, seq_len, head_dim)] * 2, (kv_heads * share,)]
    q, k, v, sinks = (
        (2 * torch.randn(shape, dtype=torch.float64, generator=generator)).requires_grad_() for shape in shapes
    )
    inputs = [q, k, v, sinks] if with_sinks else [q, k, v]
    ours = attend(q, k, v, window, sinks if with_sinks else None)
    wanted = by_definition(q, k, v, window, sinks if with_sinks else None)
    torch.testing.assert_close(ours, wanted, rtol=1e-12, atol=1e-12)
    upstream = torch.randn(ours.shape, dtype=torch.float64, generator=generator)
    for got, right in zip(*(torch.autograd.grad(y, inputs, upstream) for y in (ours, wanted)), strict=True):
        torch.testing.assert_close(got, right, rtol=1e-11, atol=1e-11)


def test_a_window_shows_a_query_its_own_key_and_those_just_before() -> None:
    seen = window_mask(5, 2, False, torch.device("cpu"))
    assert seen.int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [0, 1, 1, 0, 0],
        [0, 0, 1, 1, 0],
        [0, 0, 0, 1, 1],
    ]
    with_sink = window_mask(2, 1, True, torch.device("cpu"))
    assert with_sink.int().tolist() == [[1, 0, 0], [1, 1, 0], [1, 0, 1]]


def test_rotation_turns_pairs_and_scores_depend_on_distance_alone() -> None:
    table = rotary_table(8, 12, 10_000.0, None, torch.float64, torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(2, 8, dtype=torch.float64, generator=generator)
    q, k = (rotate(x.expand(1, 1, 12, 8), *table)[0, 0] for x in (query, key))
    assert torch.equal(q[0], query)
    scores = q @ k.T
    for distance in (1, 5):
        diagonal = scores.diagonal(-distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("scaling, turns_kept, magnitude", [(Llama3Scaling(), 4, 1.0), (YarnScaling(), 32, 1.3466)])
def test_stretching_keeps_fast_frequencies_and_slows_the_slow_ones(
    scaling: Llama3Scaling | YarnScaling, turns_kept: float, magnitude: float
) -> None:
    theta = 150_000.0
    frequencies = theta ** (-torch.arange(0, 64, 2, dtype=torch.float64) / 64)
    turns = scaling.original_length * frequencies / (2 * math.pi)
    ratio = scaling.stretch(frequencies, theta) / frequencies
    assert (ratio[turns > turns_kept] == 1).all()
    torch.testing.assert_close(ratio[turns < 1], torch.full_like(ratio[turns < 1], 1 / scaling.factor))
    assert (ratio.diff() <= 1e-15).all()
    assert scaling.magnitude == pytest.approx(magnitude, abs=1e-4)


def test_tables_are_usable_with_gradients_after_inference_mode() -> None:
    with torch.inference_mode():
        table = rotary_table(4, 3, 77.0, None, torch.float64, torch.device("cpu"))
        mask = window_mask(3, 2, True, torch.device("cpu"))
    x = torch.ones(1, 1, 3, 4, dtype=torch.float64, requires_grad=True)
    rotate(x, *table).sum().backward()
    assert x.grad is not None
    assert not mask.is_inference()
