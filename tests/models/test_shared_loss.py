"""The loss over shares of the vocabulary against the whole one, and a model that is cut against itself."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from shapes import FAMILIES, GPT, QWEN3, batch, varied
from test_chunked_loss import inputs
from torch import nn
from torch.nn.functional import cross_entropy

from rpbench.models.loss import linear_cross_entropy
from rpbench.models.shards import loss_over_shards
from rpbench.models.vocab_shards import Shard, cut_vocabulary, share_rows


def shares_of(weight: torch.Tensor, num_shards: int, chunk_tokens: int = 4) -> list[Shard]:
    """Leaves of their own, so that each has its own gradient."""
    return [
        Shard(weight.detach()[rows.start : rows.stop].requires_grad_(weight.requires_grad), rows.start, chunk_tokens)
        for rows in share_rows(len(weight), num_shards)
    ]


@settings(deadline=None)
@given(vocab=st.integers(1, 400), num_shards=st.integers(1, 70))
def test_every_row_is_in_one_share_and_no_share_is_empty(vocab: int, num_shards: int) -> None:
    if vocab < num_shards:
        with pytest.raises(ValueError, match=f"a vocabulary of {vocab} in {num_shards} shares: each has at least one"):
            share_rows(vocab, num_shards)
        return
    found = share_rows(vocab, num_shards)
    assert [row for rows in found for row in rows] == list(range(vocab))
    assert max(map(len, found)) - min(map(len, found)) <= 1


@settings(deadline=None)
@given(
    num_tokens=st.integers(1, 20),
    hidden=st.integers(1, 9),
    vocab=st.integers(1, 50),
    num_shards=st.integers(1, 8),
    chunk_tokens=st.integers(1, 25),
    scale=st.sampled_from([1.0, 0.125, 1024.0]),
    spread=st.sampled_from([1.0, 300.0]),
)
def test_shares_change_neither_value_nor_gradient(
    num_tokens: int, hidden: int, vocab: int, num_shards: int, chunk_tokens: int, scale: float, spread: float
) -> None:
    x, weight, labels = inputs(num_tokens, hidden, vocab)
    x.data.mul_(spread)
    shares = shares_of(weight, min(vocab, num_shards), chunk_tokens)
    shared, plain = loss_over_shards(shares, x, labels), cross_entropy(x @ weight.T, labels)
    torch.testing.assert_close(shared, plain, rtol=1e-12, atol=1e-12)
    of_x, *of_rows = torch.autograd.grad(shared * scale, (x, *(share.rows for share in shares)))
    for ours, theirs in zip((of_x, torch.cat(of_rows)), torch.autograd.grad(plain * scale, (x, weight)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12 * scale * spread)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_single_share_is_the_whole_loss_in_every_bit(dtype: torch.dtype) -> None:
    x, weight, labels = inputs(11, 6, 23, dtype)
    (share,) = shares_of(weight, 1, chunk_tokens=11)
    shared, plain = loss_over_shards([share], x, labels), linear_cross_entropy(x, weight, labels, 11)
    assert torch.equal(shared, plain)
    for ours, theirs in zip(
        torch.autograd.grad(shared, (x, share.rows)), torch.autograd.grad(plain, (x, weight)), strict=True
    ):
        assert torch.equal(ours, theirs)
        assert ours.dtype == dtype


def test_half_precision_stays_as_near_as_the_whole_loss_does() -> None:
    x, weight, labels = inputs(64, 8, 401, torch.bfloat16)
    exact = cross_entropy(x.detach().double() @ weight.detach().double().T, labels)
    whole = linear_cross_entropy(x, weight, labels, 16)
    shared = loss_over_shards(shares_of(weight, 5, 16), x, labels)
    assert shared.dtype == torch.float32
    assert abs(shared.double() - exact) <= 2 * abs(whole.double() - exact) + 1e-5


def test_rows_that_are_frozen_get_no_gradient() -> None:
    x, weight, labels = inputs(6, 4, 9)
    shares = shares_of(weight.detach(), 3)
    loss = loss_over_shards(shares, x, labels)
    loss.backward()
    plain = cross_entropy(x @ weight.T, labels)
    torch.testing.assert_close(x.grad, torch.autograd.grad(plain, x)[0], rtol=1e-12, atol=1e-12)
    assert all(share.rows.grad is None for share in shares)


# --- a model that is cut ---


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("num_shards", [1, 4])
def test_a_model_that_is_cut_has_the_same_loss(name: str, num_shards: int) -> None:
    layers, (tokens, labels) = varied(FAMILIES[name]), batch(FAMILIES[name])
    wanted = layers[-1](layers[:-1](tokens), labels)
    cut = cut_vocabulary(list(layers), num_shards)
    chain, shares = nn.Sequential(*cut[: len(layers)]), cut[len(layers) :]
    found = loss_over_shards(
        [share.shard(share.weight) for share in shares], chain(tokens).flatten(0, 1), labels.flatten()
    )
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    rows = torch.cat([share.weight for share in shares])
    assert torch.equal(rows, layers[-1].weight)
    assert shares[0].weight.data_ptr() == layers[-1].weight.data_ptr(), "no copy"


def test_a_tied_embedding_is_cut_along_and_looks_up_the_same() -> None:
    layers, (tokens, _) = varied(QWEN3), batch(QWEN3)
    embedding, *_, first, second = cut_vocabulary(list(layers), 2)
    assert [embedding.rows[0], embedding.rows[1]] == [first.weight, second.weight]
    assert torch.equal(embedding(tokens), layers[0](tokens))
    grad = torch.randn(*tokens.shape, QWEN3.hidden, dtype=torch.float64)
    found = torch.autograd.grad(embedding(tokens), list(embedding.rows), grad)
    (wanted,) = torch.autograd.grad(layers[0](tokens), layers[0].weight, grad)
    assert torch.equal(torch.cat(found), wanted)


def test_an_embedding_of_its_own_stays_whole_and_what_is_frozen_stays_frozen() -> None:
    layers = varied(replace(GPT, training_mode="lora", lora_rank=2))
    embedding, *_, norm, first, second = cut_vocabulary(list(layers), 2)
    assert embedding is layers[0]
    assert norm.norm is layers[-1].norm
    assert not first.weight.requires_grad
    assert not second.weight.requires_grad


def test_a_head_of_another_kind_cannot_be_cut() -> None:
    layers = varied(GPT)
    with pytest.raises(ValueError, match="Identity cannot be cut over the vocabulary: the last module must be a Head"):
        cut_vocabulary([*layers[:-1], nn.Identity()], 2)
