"""Every family against the implementation in `transformers`: the same weights give the same logits and gradients."""

import pytest
import torch
from reference import in_reference_names, reference_model
from shapes import FAMILIES, batch, loss_and_gradients, varied
from torch.nn.functional import cross_entropy


@pytest.fixture
def double_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the reference compute in float64 throughout; it casts to float32 in norms, softmaxes and rotary tables."""
    monkeypatch.setattr(torch, "float32", torch.float64)
    monkeypatch.setattr(torch, "float", torch.float64)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_gradients_are_the_references_in_float64(family: str, double_reference: None) -> None:
    compare(family, torch.float64, 1e-12)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_gradients_are_the_references_in_float32(family: str) -> None:
    compare(family, torch.float32, 2e-5)


def compare(family: str, dtype: torch.dtype, tolerance: float) -> None:
    """Logits, loss and every gradient agree to `tolerance`, relative to the largest value of each tensor."""
    model = FAMILIES[family]
    tokens, labels = batch(model)
    ours = varied(model, dtype)
    theirs = reference_model(family, model).to(dtype)
    weights = in_reference_names(family, model, dict(ours.named_parameters()))
    missing, unexpected = theirs.load_state_dict(weights, strict=False)
    assert not unexpected
    assert missing == (["lm_head.weight"] if model.tied else [])  # tied: the embedding stands for both

    logits = theirs(tokens).logits
    assert distance(ours(tokens), logits) < tolerance
    expected = cross_entropy(logits.flatten(0, 1), labels.flatten())
    expected.backward()
    loss, gradients = loss_and_gradients(ours, tokens, labels)
    assert distance(loss, expected) < tolerance

    mapped = in_reference_names(family, model, gradients)
    wanted = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    assert mapped.keys() == wanted.keys()
    for name, gradient in wanted.items():
        assert gradient is not None
        assert gradient.abs().max() > 0, name
        assert distance(mapped[name], gradient) < tolerance, name


def distance(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Largest difference over largest value."""
    assert ours.shape == theirs.shape
    return float(((ours - theirs).abs().max() / theirs.abs().max()).detach())
