"""Layers in shares against whole ones: the same up to the rounding of sums, and tensors that come back together."""

from dataclasses import replace

import pytest
import torch

from rpbench.models.build import build_layer
from rpbench.models.shards import (
    AttentionShards,
    check_shards,
    cut_layer,
    cut_tensors,
    held_parameters,
    joined_tensors,
    one_shard,
)
from rpbench.workload.architecture import Architecture
from rpbench.workload.counts import Experts

GPT = Architecture("gpt", num_layers=2, hidden=16, heads=4, vocab=10, gated=False)
LLAMA = replace(GPT, name="llama", family="llama", gated=True, heads=8, key_value_heads=4, head_dim=6, inner=20)
QWEN = replace(LLAMA, name="qwen3", family="qwen3", qk_norm=True)
EXPERTS = Architecture("experts", num_layers=2, hidden=16, heads=4, vocab=10, family="gpt_oss", biases=True,
                attention_sinks=True, experts=Experts(4, 2, 64), windows=(3, None))  # fmt: skip
LORA = replace(QWEN, name="lora", training_mode="lora", lora_rank=2)
MODELS = {model.name: model for model in (GPT, LLAMA, QWEN, EXPERTS, LORA)}


def layer_of(model: Architecture):
    """A layer whose every number is random, biases and adapters too."""
    layer, generator = build_layer(model, 1, dtype=torch.float64), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 3)
    return layer


def gradients(layer, x, grad):
    """Output, gradient of the input, and of every trained parameter by name."""
    named = {name: tensor for name, tensor in layer.named_parameters() if tensor.requires_grad}
    output = layer(x)
    below, *found = torch.autograd.grad(output, [x, *named.values()], grad)
    return output.detach(), below, dict(zip(named, found, strict=True))


@pytest.mark.parametrize("num_shards", [1, 2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_shares_add_up_to_the_whole_layer(name, num_shards):
    layer, generator = layer_of(MODELS[name]), torch.Generator().manual_seed(1)
    x, grad = (torch.randn(2, 5, 16, generator=generator, dtype=torch.float64) for _ in range(2))
    x.requires_grad_()
    output, below, whole = gradients(layer, x, grad)
    found, found_below, parts = gradients(cut_layer(layer, num_shards), x, grad)
    joined = joined_tensors(parts)
    assert joined.keys() == whole.keys()
    pairs = [(found, output), (found_below, below), *((joined[each], whole[each]) for each in whole)]
    for one, other in pairs:
        assert float((one - other).abs().max()) <= 1e-12 * float(other.abs().max())
        assert num_shards > 1 or torch.equal(one, other)


@pytest.mark.parametrize("name", MODELS)
def test_tensors_are_cut_as_the_layers_are_and_come_back(name):
    layer = layer_of(MODELS[name])
    whole = {name: parameter.detach() for name, parameter in layer.named_parameters()}
    cut = cut_tensors(whole, 2)
    expected = dict(cut_layer(layer, 2).named_parameters(remove_duplicate=False))
    assert cut.keys() == expected.keys()
    assert all(torch.equal(cut[each], expected[each]) for each in cut)
    owners = dict(cut_layer(layer, 2).named_parameters())  # what all shares have is there once
    back = joined_tensors({each: cut[each] for each in reversed(owners)})
    assert back.keys() == whole.keys()
    assert all(torch.equal(back[each], whole[each]) for each in whole)


def test_numbers_that_belong_to_a_tensor_are_not_cut():
    steps = {"attention.q.weight": torch.tensor(3.0), "mlp.down.weight": torch.tensor(3.0)}
    cut = cut_tensors(steps, 2)
    assert {float(step) for step in cut.values()} == {3.0}
    assert joined_tensors(cut) == steps


@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_a_device_holds_its_part_of_every_matrix(name):
    layer = layer_of(MODELS[name])
    cut = cut_layer(layer, 4)
    norms = 2 * 16
    whole = sum(parameter.numel() for parameter in layer.parameters()) - norms
    for number in range(4):
        held = held_parameters(cut, number)
        assert sum(parameter.numel() for parameter in held) == whole / 4 + norms
        alone = one_shard(cut, number, cut.attention.adding)
        assert {id(parameter) for parameter in alone.parameters()} == {id(parameter) for parameter in held}


def test_cutting_leaves_the_layer_as_it_was():
    layer = layer_of(QWEN)
    before = {name: tensor.clone() for name, tensor in layer.named_parameters()}
    cut = cut_layer(layer, 2)
    assert isinstance(cut.attention, AttentionShards)
    assert cut.attention_norm.scale is layer.attention_norm.scale
    with torch.no_grad():
        cut.attention.shares["1"].q.weight.zero_()
    assert all(torch.equal(tensor, before[name]) for name, tensor in layer.named_parameters())


@pytest.mark.parametrize(
    "model, num_shards, message",
    [
        (GPT, 3, r"3 devices: .* has 4 heads, 4 KV heads, 64 values inside its MLP; take num_devices from 2, 4"),
        (LLAMA, 8, r"8 devices: .* 8 heads, 4 KV heads, 20 values inside its MLP; take num_devices from 2, 4"),
        (replace(GPT, inner=6), 4, r"4 heads, 4 KV heads, 6 values inside its MLP; take num_devices from 2"),
        (replace(GPT, heads=1, key_value_heads=1), 2, r"1 heads, 1 KV heads, .* take num_devices from 1"),
        (EXPERTS, 8, r"8 devices: .* take num_devices from 2, 4"),
    ],
)
def test_layers_without_equal_shares_are_refused(model, num_shards, message):
    with pytest.raises(ValueError, match=message):
        check_shards(build_layer(model, 1, device="meta"), num_shards)


def test_segments_of_sequences_are_refused():
    layer = cut_layer(layer_of(GPT), 2)
    x = torch.zeros(1, 3, 16, dtype=torch.float64)
    _, own = layer(x, ())
    with pytest.raises(ValueError, match="takes whole sequences"):
        layer(x, (own,))
