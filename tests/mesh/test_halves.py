"""A backward timed as one piece, cut in the ratio of its FLOPs."""

from dataclasses import replace

import pytest

from rpbench.config.loading import load
from rpbench.cost.published import published_times
from rpbench.mesh.layers.eager_kernels import input_share
from rpbench.mesh.layers.layer_seconds import head_seconds, layer_seconds
from rpbench.mesh.layers.layer_times import times_of, with_halves
from rpbench.mesh.layout import Mesh
from rpbench.run.assemble import assemble
from rpbench.run.layer_times import setting_of
from rpbench.sim.longest_path import simulate_graph
from rpbench.workload.architecture import architecture

SETTING = ["cost=published", "cost.split_backward=true"]


def test_share_of_a_plain_transformer_is_counted_by_hand():
    request = ["model.hidden=64", "model.heads=4", "model.seq_len=31", "model.num_layers=1"]
    model = load(["model=transformer", *request]).model
    h, keys = 64, 16  # a token of 31 sees 16 on average, itself included
    products = 2 * (4 * h * h + 2 * h * model.inner * (3 if model.gated else 2) / 2)
    attention = 2.5 * 4 * h * keys
    assert input_share(model) == pytest.approx((products + attention) / (2 * products + attention))


def test_frozen_weights_leave_nearly_everything_to_the_input_gradient():
    assert 0.5 < input_share(architecture("qwen3_32b")) < 0.6
    assert 0.9 < input_share(architecture("qwen3_235b_lora")) < 1
    times = with_halves(published_times("qwen3-235b-lora"), architecture("qwen3_235b_lora"))
    assert times.head_weight_grad == 0
    assert times.head_input_grad == times.head_backward


@pytest.mark.parametrize("name", ["qwen3_1p7b", "gpt_oss_20b", "qwen3_235b_lora"])
def test_halves_are_the_whole(name):
    whole = published_times(load([f"model={name}"]).model.published_name)
    times = with_halves(whole, architecture(name))
    assert times.backward == whole.backward
    assert [i + w for i, w in zip(times.input_grad, times.weight_grad, strict=True)] == pytest.approx(whole.backward)
    assert times.head_input_grad + times.head_weight_grad == pytest.approx(whole.head_backward)


def test_schedules_that_split_backward_run_on_published_times_if_asked():
    assembled = assemble(load([*SETTING, "schedule=zb_h1", "model=qwen3_32b"]))
    assert assembled.graph.num_actions == 3 * 8 * assembled.schedule.shape.num_microbatches
    whole = assemble(load([*SETTING[:1], "schedule=zb_h1", "model=qwen3_32b"]))
    with pytest.raises(ValueError, match=r"cost\.split_backward=true"):
        simulate_graph(whole.graph, whole.costs)


def test_shards_of_matrices_take_what_their_kernels_take():
    """What every rank loses with a microbatch stays; kernels take longer than their part of a whole layer's."""
    request = ["model=qwen3_1p7b", "cluster=8x_h100", "num_devices=8", "cost=analytic", "num_microbatches=8"]
    setting = setting_of(load(request))
    whole, kinds = times_of(setting), set(setting.architecture.layers)
    cut = replace(setting, mesh=Mesh(tensor=8))
    own, head = layer_seconds(cut, *kinds), head_seconds(cut)
    found = whole.of_shards(along_sequence=False)
    assert found.forward[0] == pytest.approx(8 * own.forward + whole.rank_loss)
    assert found.recompute[0] == pytest.approx(8 * (own.recompute - own.forward_exposed))
    assert found.backward[0] == pytest.approx(8 * (own.input_grad + own.weight_grad) + whole.rank_loss)
    assert found.head_forward + found.head_backward == pytest.approx(
        8 * (head.forward + head.input_grad + head.weight_grad)
    )
    assert found.forward[0] > whole.of_shards(along_sequence=True).forward[0] > whole.forward[0]
    assert found.of_shards(along_sequence=False) is found


def test_shards_of_frozen_layers_have_no_backward():
    request = ["model=qwen3_1p7b", "cluster=8x_h100", "num_devices=8", "cost=analytic", "num_microbatches=8"]
    whole = times_of(setting_of(load(request)))
    found = whole.frozen(2).of_shards(along_sequence=False)
    assert [found.recompute[:2], found.backward[:2], found.input_grad[:2], found.weight_grad[:2]] == [[0, 0]] * 4
    assert found.backward[2:] == whole.of_shards(along_sequence=False).backward[2:]


def test_heads_that_shards_cannot_cut_leave_layers_as_they_are():
    request = ["model=qwen3_1p7b", "model.heads=12", "model.key_value_heads=4", "cluster=8x_h100", "num_devices=8"]
    whole = times_of(setting_of(load([*request, "cost=analytic", "num_microbatches=8"])))
    assert whole.of_shards(along_sequence=False) is whole
