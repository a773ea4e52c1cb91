"""cost.split_penalty: what two halves of a backward take more than a whole one."""

import pytest

from rpbench.config.choices import ConfigError
from rpbench.config.loading import load
from rpbench.cost.table import LayerTimes
from rpbench.mesh.layers.layer_times import penalised
from rpbench.run.layer_times import layer_times
from rpbench.run.scheduled import terms_of_request

TIMES = LayerTimes(
    [1.0], [1.0], [4.0], 0.5, 2.0, input_grad=[2.5], weight_grad=[1.5], head_input_grad=1.0, head_weight_grad=1.0
)


def test_halves_take_longer_and_a_whole_backward_does_not():
    found = penalised(TIMES, 1.5)
    assert (found.input_grad, found.weight_grad) == ([3.75], [2.25])
    assert (found.head_input_grad, found.head_weight_grad) == (1.5, 1.5)
    assert (found.forward, found.backward, found.head_backward) == (TIMES.forward, TIMES.backward, TIMES.head_backward)
    assert penalised(TIMES, 1.0) is TIMES


def test_it_is_an_option_of_the_costs():
    asked = ["schedule=zb_h1", "model=qwen3_1p7b", "cluster=8x_rtx4090", "cost=analytic"]
    plain, more = (layer_times(load([*asked, f"cost.split_penalty={penalty}"]), 28) for penalty in (1.0, 1.25))
    assert more.weight_grad[0] == pytest.approx(1.25 * plain.weight_grad[0])
    assert more.input_grad[0] == pytest.approx(1.25 * plain.input_grad[0])
    assert more.backward == plain.backward


@pytest.mark.parametrize("penalty", ["0.9", "-1", "inf", "nan"])
def test_a_penalty_below_one_is_refused(penalty):
    with pytest.raises(ConfigError, match=r"cost\.split_penalty=.*at least 1"):
        load(["schedule=zb_h1", "cost=analytic", "model=qwen3_1p7b", f"cost.split_penalty={penalty}"])


def test_a_search_of_all_options_does_not_leave_it_out_silently():
    asked = ["schedule=zb_h1", "cost=analytic", "model=qwen3_1p7b", "cluster=8x_rtx4090", "tuning_budget=160"]
    with pytest.raises(ConfigError, match=r"cost\.split_penalty=1\.03 with tuning_budget=160"):
        terms_of_request(load([*asked, "cost.split_penalty=1.03"]))


@pytest.mark.parametrize("word", ["cost.recompute_ahead=true", "+cost.overlap_gain=0.5"])
def test_a_search_refuses_what_it_would_not_count(word):
    asked = ("schedule=dualpipe", "model=qwen3_1p7b", "cluster=8x_rtx4090", "cost=analytic", "tuning_budget=160")
    with pytest.raises(ConfigError, match=r"with tuning_budget=160: the search takes"):
        terms_of_request(load([*asked, word]))
