"""A backward timed as one piece, cut in the ratio of its FLOPs."""

import pytest

from rpbench.config.request import load
from rpbench.cost.published import published_times
from rpbench.mesh.layers.eager_kernels import input_share
from rpbench.mesh.layers.layer_times import with_halves
from rpbench.run.assemble import assemble
from rpbench.sim.longest_path import simulate_graph

SETTING = ["cost=published", "cost.split_backward=true"]


def model_of(name):
    return load([f"model={name}"]).model


def test_share_of_a_plain_transformer_is_counted_by_hand():
    request = ["model.hidden=64", "model.heads=4", "model.seq_len=31", "model.num_layers=1"]
    model = load(["model=transformer", *request]).model
    h, keys = 64, 16  # a token of 31 sees 16 on average, itself included
    products = 2 * (4 * h * h + 2 * h * model.inner * (3 if model.gated else 2) / 2)
    attention = 2.5 * 4 * h * keys
    assert input_share(model) == pytest.approx((products + attention) / (2 * products + attention))


def test_frozen_weights_leave_nearly_everything_to_the_input_gradient():
    assert 0.5 < input_share(model_of("qwen3_32b")) < 0.6
    assert 0.9 < input_share(model_of("qwen3_235b_lora")) < 1
    times = with_halves(published_times("qwen3-235b-lora"), model_of("qwen3_235b_lora"))
    assert times.head_weight_grad == 0
    assert times.head_input_grad == times.head_backward


@pytest.mark.parametrize("name", ["qwen3_1p7b", "gpt_oss_20b", "qwen3_235b_lora"])
def test_halves_are_the_whole(name):
    whole = published_times(load([f"model={name}"]).model.published_name)
    times = with_halves(whole, model_of(name))
    assert times.backward == whole.backward
    assert [i + w for i, w in zip(times.input_grad, times.weight_grad, strict=True)] == pytest.approx(whole.backward)
    assert times.head_input_grad + times.head_weight_grad == pytest.approx(whole.head_backward)


def test_schedules_that_split_backward_run_on_published_times_if_asked():
    assembled = assemble(load([*SETTING, "schedule=zb_h1", "model=qwen3_32b"]))
    assert assembled.graph.num_actions == 3 * 8 * assembled.schedule.shape.num_microbatches
    whole = assemble(load([*SETTING[:1], "schedule=zb_h1", "model=qwen3_32b"]))
    with pytest.raises(ValueError, match=r"cost\.split_backward=true"):
        simulate_graph(whole.graph, whole.costs)
