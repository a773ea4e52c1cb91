"""Eager kernels: against the published timings, and what must hold whatever the constants are."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from analysis.predictions.compare import declared_basis
from rpbench.cost.published import published_times, published_tokens_per_microbatch
from rpbench.mesh.layers.eager_kernels import input_share, product_flops
from rpbench.mesh.layers.layer_seconds import eager_kernels
from rpbench.mesh.layers.layer_times import setting_of, times_of
from rpbench.mesh.layout import Mesh
from rpbench.workload.architecture import Architecture, architecture
from rpbench.workload.counts import Linear

DENSE = ("qwen3_1p7b", "llama31_8b", "qwen3_32b")
EXPERTS = ("gpt_oss_20b", "qwen3_235b_lora")


def basis():
    return declared_basis("8x_rtx4090")


def analytic_times(model, tokens, numbers):
    return times_of(setting_of(model, tokens, numbers))


def kernels(name, tokens, shards=1):
    return eager_kernels(replace(setting_of(architecture(name), tokens, basis()), mesh=Mesh(tensor=shards)))


@pytest.mark.parametrize("name", [*DENSE, *EXPERTS])
def test_published_timings_are_met_where_they_were_measured(name):
    model = architecture(name)
    published = published_times(model.published_name)
    times = analytic_times(model, published_tokens_per_microbatch(model.published_name), basis())
    assert 1000 * times.backward[0] == pytest.approx(published.backward[0], rel=1e-3)
    assert 1000 * times.head_forward == pytest.approx(published.head_forward, rel=1e-3)
    assert 1000 * times.head_backward == pytest.approx(published.head_backward, rel=1e-3)
    if name in DENSE:
        assert 1000 * times.forward[0] == pytest.approx(published.forward[0], rel=1e-3)
    else:  # the interpreter's loop over experts stands beside the layers
        assert 1000 * times.forward[0] < published.forward[0] * (1 + 1e-3)


@given(tokens=st.integers(64, 60_000), name=st.sampled_from([*DENSE, *EXPERTS]), more=st.floats(1.1, 4))
@settings(max_examples=25, deadline=None)
def test_more_tokens_take_longer_but_not_more_than_in_proportion(tokens, name, more):
    model = architecture(name)
    few, many = (analytic_times(model, tokens * factor, basis()) for factor in (1, more))
    for part in ("forward", "backward"):
        assert getattr(few, part)[0] < getattr(many, part)[0] <= more * getattr(few, part)[0] * (1 + 1e-9)


@pytest.mark.parametrize("name", ["matmul_flops_per_s", "memory_bytes_per_s", "wide_matmul_flops_per_s"])
def test_a_faster_machine_is_faster(name):
    model = architecture("llama31_8b")
    slow, fast = (analytic_times(model, 8192, basis().scaled(name, factor)) for factor in (1, 2))
    assert fast.forward[0] < slow.forward[0] < 2 * fast.forward[0]


def test_the_halves_of_a_backward_make_it_up():
    times = analytic_times(architecture("qwen3_1p7b"), 8192, basis())
    assert times.input_grad[0] + times.weight_grad[0] == pytest.approx(times.backward[0])
    assert times.head_input_grad + times.head_weight_grad == pytest.approx(times.head_backward)


def test_attention_goes_back_through_five_products_for_two_forward():
    """Four projections and two maps of 4 h, 12 h x h in all; two products over (s + 1) / 2 keys forward and five back.

    Source: Dao, "FlashAttention-2", arXiv 2307.08691, section 4.1: a backward has 2.5 times the FLOPs of a forward.
    """
    hidden, seq_len = 64, 127
    own = Architecture("plain", num_layers=1, hidden=hidden, heads=4, vocab=8, seq_len=seq_len, gated=False)
    products, attention = 2 * 12 * hidden**2, 2.5 * 2 * 2 * hidden * (seq_len + 1) / 2
    assert input_share(own) == pytest.approx((products + attention) / (2 * products + attention))


def test_adapters_train_less_than_their_layer():
    share = {
        name: kernels(name, 8192).weight_grad().matmul_flops / kernels(name, 8192).forward.matmul_flops
        for name in ("qwen3_235b_lora", "llama31_8b")
    }
    assert share["llama31_8b"] == pytest.approx(1)
    assert 0 < share["qwen3_235b_lora"] < 0.2


def test_narrow_products_count_more_than_once():
    half = basis()["half_rate_width"]
    square = product_flops(Linear("mlp", 4096, 4096), 8192, half)
    assert square == pytest.approx(2 * 8192 * 4096**2 * (1 + half / 4096))
    thin = product_flops(Linear("mlp", 4096, int(half)), 8192, half)
    assert thin == pytest.approx(2 * (2 * 8192 * 4096 * half))  # half the rate
    few = product_flops(Linear("experts", 4096, 4096, matrices=128, visits=2), 64 * half, half)
    assert few == pytest.approx(2 * (2 * 64 * half * 2 * 4096**2))


def test_shards_divide_products_and_not_norms():
    one, eighth = (kernels("llama31_8b", 8192, shards) for shards in (1, 8))
    whole, share = one.forward, eighth.forward
    assert whole.attention_flops == 8 * share.attention_flops
    assert whole.matmul_flops / 8 < share.matmul_flops  # thinner products
    assert share.memory_bytes > whole.memory_bytes / 8
    assert eighth.kept_bytes() > one.kept_bytes() / 8
