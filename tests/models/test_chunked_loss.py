"""The loss in chunks against the plain one; and that it never holds all logits."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from shapes import GPT, LLAMA, batch, varied
from torch.nn.functional import cross_entropy

from rpbench.models import linear_cross_entropy
from rpbench.workload.architecture import Architecture


def inputs(
    num_tokens: int, hidden: int, vocab: int, dtype: torch.dtype = torch.float64
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(num_tokens)
    x = torch.randn(num_tokens, hidden, dtype=dtype, generator=generator).requires_grad_()
    weight = torch.randn(vocab, hidden, dtype=dtype, generator=generator).requires_grad_()
    return x, weight, torch.randint(vocab, (num_tokens,), generator=generator)


@given(
    num_tokens=st.integers(1, 40),
    hidden=st.integers(1, 9),
    vocab=st.integers(1, 50),
    chunk_tokens=st.integers(1, 45),
    scale=st.sampled_from([1.0, 0.125, 1024.0]),
)
def test_chunks_change_neither_value_nor_gradient(
    num_tokens: int, hidden: int, vocab: int, chunk_tokens: int, scale: float
) -> None:
    x, weight, labels = inputs(num_tokens, hidden, vocab)
    chunked = linear_cross_entropy(x, weight, labels, chunk_tokens)
    plain = cross_entropy(x @ weight.T, labels)
    torch.testing.assert_close(chunked, plain, rtol=1e-12, atol=1e-12)
    for ours, theirs in zip(
        torch.autograd.grad(chunked * scale, (x, weight)), torch.autograd.grad(plain * scale, (x, weight)), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12 * scale)


def test_its_gradient_is_the_slope_of_its_value() -> None:
    x, weight, labels = inputs(7, 3, 5)
    assert torch.autograd.gradcheck(lambda x, weight: linear_cross_entropy(x, weight, labels, 3), (x, weight))


@pytest.mark.parametrize("model", [GPT, LLAMA], ids=lambda model: model.family)
def test_the_head_takes_the_loss_of_its_logits(model: Architecture) -> None:
    layers = varied(model)
    layers[-1].chunk_tokens = 5
    tokens, labels = batch(model)
    x = layers[:-1](tokens)
    wanted = cross_entropy(layers[-1](x).flatten(0, 1), labels.flatten())
    torch.testing.assert_close(layers[-1](x, labels), wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("trained", ["hidden", "weight", "neither"])
def test_what_is_frozen_gets_no_gradient(trained: str) -> None:
    x, weight, labels = inputs(6, 4, 9)
    x.requires_grad_(trained == "hidden")
    weight.requires_grad_(trained == "weight")
    loss = linear_cross_entropy(x, weight, labels, 4)
    assert loss.requires_grad == (trained != "neither")
    if trained != "neither":
        loss.backward()
        plain = cross_entropy(x @ weight.T, labels)
        leaf = x if trained == "hidden" else weight
        assert leaf.grad is not None
        torch.testing.assert_close(leaf.grad, torch.autograd.grad(plain, leaf)[0], rtol=1e-12, atol=1e-12)
    assert (x.grad is None) == (trained != "hidden")
    assert (weight.grad is None) == (trained != "weight")


def test_both_halves_of_a_split_backward_can_be_asked_one_after_the_other() -> None:
    x, weight, labels = inputs(6, 4, 9)
    loss = linear_cross_entropy(x, weight, labels, 4)
    (first,) = torch.autograd.grad(loss, x, retain_graph=True)
    (second,) = torch.autograd.grad(loss, weight)
    both = torch.autograd.grad(linear_cross_entropy(x, weight, labels, 4), (x, weight))
    assert torch.equal(first, both[0])
    assert torch.equal(second, both[1])


def test_half_precision_keeps_gradients_that_a_mean_would_round_to_zero() -> None:
    x, weight, labels = inputs(64, 8, 4000, torch.float32)
    half_x, half_weight = (tensor.detach().half().requires_grad_() for tensor in (x, weight))
    loss_scale = 2.0**14
    loss = linear_cross_entropy(half_x, half_weight, labels, 16) * loss_scale
    (got,) = torch.autograd.grad(loss, half_weight)
    plain = cross_entropy(half_x.detach().float() @ weight.half().float().T, labels) * loss_scale
    (wanted,) = torch.autograd.grad(plain, weight)
    assert got.dtype == torch.float16
    assert (got.float() - wanted).abs().max() < 0.01 * wanted.abs().max()


@pytest.mark.parametrize("with_grad", [True, False])
def test_only_one_chunk_of_logits_exists_at_a_time(with_grad: bool) -> None:
    """The largest tensor made is one chunk's logits, or the gradient of the weight."""
    x, weight, labels = inputs(96, 4, 512)
    with torch.set_grad_enabled(with_grad), _LargestResult() as largest:
        linear_cross_entropy(x, weight, labels, 8)
    assert largest.num_values == max(8 * 512, weight.numel() * with_grad)


class _LargestResult(torch.utils._python_dispatch.TorchDispatchMode):
    """Remembers how many values the largest result of any operation had."""

    num_values = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and not func.is_view:
            self.num_values = max(self.num_values, result.numel())
        return result


def test_inputs_that_do_not_fit_are_refused() -> None:
    x, weight, labels = inputs(6, 4, 9)
    with pytest.raises(ValueError, match="chunk_tokens=0"):
        linear_cross_entropy(x, weight, labels, 0)
    with pytest.raises(ValueError, match=r"labels are \(5,\)"):
        linear_cross_entropy(x, weight, labels[:5])
    with pytest.raises(ValueError, match="N at least 1"):
        linear_cross_entropy(x[:0], weight, labels[:0])


def test_large_logits_do_not_overflow() -> None:
    x, weight, labels = inputs(6, 4, 9)
    x.data.mul_(1e4)
    wanted = cross_entropy(x @ weight.T, labels)
    torch.testing.assert_close(linear_cross_entropy(x, weight, labels, 2), wanted, rtol=1e-12, atol=1e-12)


def test_a_loss_that_is_not_finite_says_so() -> None:
    x, weight, labels = inputs(6, 4, 9)
    x.data[2, 1] = float("nan")
    assert linear_cross_entropy(x, weight, labels, 2).isnan()
