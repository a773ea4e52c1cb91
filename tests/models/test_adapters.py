"""LoRA: what is frozen, what is added, and that it is the low-rank product it claims to be."""

from dataclasses import replace

import pytest
import torch
from shapes import FAMILIES, QWEN3_MOE, batch, loss_and_gradients, varied
from torch import nn

from rpbench.models import build_model
from rpbench.models.linear import LORA_ALPHA, ExpertLinear, Linear
from rpbench.workload.architecture import Architecture


def with_adapters(model: Architecture, rank: int = 3) -> Architecture:
    return replace(model, training_mode="lora", lora_rank=rank)


@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_hold_the_parameters_that_are_counted(family: str) -> None:
    model = with_adapters(FAMILIES[family])
    layers = build_model(model)
    trainable = {name: p.numel() for name, p in layers.named_parameters() if p.requires_grad}
    assert sum(trainable.values()) == model.trainable_parameters
    assert all(".adapter.lora_" in name for name in trainable)


@pytest.mark.parametrize("family", FAMILIES)
def test_fresh_adapters_change_nothing_and_leave_the_base_as_it_is(family: str) -> None:
    plain, adapted = build_model(FAMILIES[family]), build_model(with_adapters(FAMILIES[family]))
    for name, weight in plain.named_parameters():
        assert torch.equal(adapted.get_parameter(name), weight)
    tokens, _ = batch(FAMILIES[family])
    torch.testing.assert_close(adapted(tokens), plain(tokens), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_act_like_the_product_added_to_the_weight(family: str) -> None:
    model = with_adapters(FAMILIES[family])
    adapted = varied(model)
    tokens, labels = batch(model)
    loss, gradients = loss_and_gradients(adapted, tokens, labels)
    assert all(gradient.abs().max() > 0 for gradient in gradients.values())

    merged = varied(FAMILIES[family])
    scale = LORA_ALPHA / 3
    with torch.no_grad():
        for name, module in adapted.named_modules():
            if isinstance(module, Linear | ExpertLinear):
                assert module.adapter is not None
                product = module.adapter.lora_b @ module.adapter.lora_a
                merged.get_parameter(f"{name}.weight").add_(scale * product)
    merged_loss, merged_gradients = loss_and_gradients(merged, tokens, labels)
    torch.testing.assert_close(loss, merged_loss, rtol=1e-12, atol=1e-12)
    weight = merged_gradients["1.attention.q.weight"]  # chain rule: dB = scale * dW @ A.T
    wanted = scale * weight @ adapted[1].attention.q.adapter.lora_a.detach().T
    torch.testing.assert_close(gradients["1.attention.q.adapter.lora_b"], wanted, rtol=1e-9, atol=1e-12)


def test_the_ends_are_frozen_and_the_stream_still_carries_gradients() -> None:
    layers = varied(with_adapters(QWEN3_MOE))
    assert not any(p.requires_grad for end in (layers[0], layers[-1]) for p in end.parameters())
    x = layers[0](batch(QWEN3_MOE)[0])
    assert not x.requires_grad
    assert layers[1](x).requires_grad


def test_every_linear_map_of_a_layer_has_an_adapter() -> None:
    layer = build_model(with_adapters(QWEN3_MOE))[1]
    maps = [m for m in layer.modules() if isinstance(m, Linear | ExpertLinear)]
    assert len(maps) == 8  # q, k, v, o, router, gate, up, down
    assert all(isinstance(m.adapter, nn.Module) for m in maps)
