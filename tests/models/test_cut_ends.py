"""Embedding and head cut over the vocabulary: the whole ones but for rounding, row by row."""

import pytest
import torch
from torch import nn

from rpbench.models.build import build_model
from rpbench.models.shards import CutEmbedding, CutHead, cut_ends, cut_tensors, joined_tensors
from rpbench.workload.architecture import Architecture

TINY = Architecture("tiny", num_layers=1, hidden=8, heads=2, vocab=37, seq_len=5)


def ends(*, tied: bool = False) -> tuple[nn.Module, nn.Module]:
    modules = list(build_model(TINY, seed=3, dtype=torch.float64))
    if tied:
        modules[-1].weight = modules[0].weight
    return modules[0], modules[-1]


def labelled() -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(5)
    tokens, labels = (torch.randint(37, (2, 5), generator=draw) for _ in range(2))
    tokens[0, :2] = torch.tensor([0, 36])  # the first and the last row
    return tokens, labels


def loss_of(embedding: nn.Module, head: nn.Module) -> torch.Tensor:
    tokens, labels = labelled()
    return head(embedding(tokens).tanh(), labels)


def gradients_of(*modules: nn.Module) -> list[dict[str, torch.Tensor]]:
    return [{name: weight.grad for name, weight in each.named_parameters(remove_duplicate=False)} for each in modules]


@pytest.mark.parametrize("num_shards", [1, 2, 3, 37])
@pytest.mark.parametrize("tied", [False, True])
def test_ends_in_shares_are_the_whole_ones(num_shards, tied):
    whole = ends(tied=tied)
    cut = cut_ends(*whole, num_shards)
    expected, found = loss_of(*whole), loss_of(*cut)
    assert found.item() == pytest.approx(expected.item(), rel=1e-14)
    expected.backward()
    of_whole = [{name: grad.clone() for name, grad in each.items()} for each in gradients_of(*whole)]
    whole[1].norm.zero_grad(set_to_none=True)  # the norm is the head's own
    found.backward()
    for mine, its in zip(gradients_of(*cut), of_whole, strict=True):
        joined = joined_tensors(mine)
        assert joined.keys() == its.keys()
        for name, grad in its.items():
            torch.testing.assert_close(joined[name], grad, rtol=1e-12, atol=1e-14)


def test_no_share_sees_more_than_its_own_logits():
    """37 rows in 3 shares: 12, 12 and 13; rows nobody asked for have no gradient but that of their probability."""
    embedding, head = cut_ends(*ends(), 3)
    assert isinstance(embedding, CutEmbedding)
    assert isinstance(head, CutHead)
    rows = [tuple(share.weight.shape) for share in head.vocabulary.shares.values()]
    assert rows == [(12, 8), (12, 8), (13, 8)]
    tokens = torch.tensor([[11, 12, 24]])
    seen = [share(tokens).abs().sum(-1) > 0 for share in embedding.vocabulary.shares.values()]
    assert torch.stack(seen)[:, 0].tolist() == [[True, False, False], [False, True, False], [False, False, True]]


def test_tensors_are_cut_as_the_modules_are_and_joined_again():
    embedding, head = ends()
    for whole, cut in zip((embedding, head), cut_ends(embedding, head, 3), strict=True):
        named = dict(whole.named_parameters())
        parts = cut_tensors(named, 3)
        assert {name: tensor.shape for name, tensor in parts.items()} == {
            name: tensor.shape for name, tensor in cut.named_parameters()
        }
        again = joined_tensors(parts)
        assert all(torch.equal(again[name], tensor) for name, tensor in named.items())
    count = torch.tensor(7.0)
    assert joined_tensors(cut_tensors({"weight": count}, 3)) == {"weight": count}


def test_what_cannot_be_cut_is_refused():
    embedding, head = ends()
    with pytest.raises(ValueError, match="Linear and Head have no shares: tensor parallelism cuts an Embedding and a"):
        cut_ends(nn.Linear(2, 2), head, 2)
    with pytest.raises(ValueError, match="a vocabulary of 37 in 38 shares: each has at least one row"):
        cut_ends(embedding, head, 38)
