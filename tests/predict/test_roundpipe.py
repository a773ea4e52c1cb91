"""RoundPipe predicted: the simulator's times where nothing else plays a part, and what is added to them."""

from dataclasses import replace

import pytest

from rpbench import registry
from rpbench.cost.analytic import analytic_times
from rpbench.plan.problem import Problem
from rpbench.predict import roundpipe
from rpbench.predict.settings import Settings
from rpbench.sim.longest_path import simulate


def without_links(case):
    """The same on a machine whose links and host take no time."""
    values = {k: v for k, v in case.basis.values.items() if k not in ("copy_bytes_per_s", "host_bytes_per_s")}
    return replace(case, basis=replace(case.basis, values=values, read=set()))


def equal(case, num_calls=1, num=10):
    return replace(case, settings=Settings(40 * num_calls, num_calls, num, 40 / num, ""))


def test_equal_microbatches_without_links_are_the_plain_simulation(case):
    small = equal(without_links(case("roundpipe-sync", "8x_rtx4090", "qwen3_1p7b")), num_calls=2)
    times = analytic_times(small.model, small.chunk_tokens, small.basis)
    problem = Problem(registry.entry("roundpipe"), times, 8, 20, options={"round_size": 10}, recompute_ahead=True)
    plan = roundpipe.planned(small)
    timeline = simulate(problem.order(plan), problem.costs(plan))
    terms = roundpipe.synchronous_step(small, small.basis)
    assert terms["pipeline"] == pytest.approx(max(timeline.end))
    assert terms["optimizer"] == terms["expert loop"] == 0


def test_the_warm_interval_does_not_depend_on_how_long_it_is_timed(case):
    small = case("roundpipe", "8x_rtx4090", "qwen3_1p7b")
    seconds = [
        roundpipe.asynchronous_step(replace(small, timed_calls=calls), small.basis)["pipeline"] for calls in (8, 16)
    ]
    assert seconds[0] == pytest.approx(seconds[1], rel=0.01)


def test_a_short_last_microbatch_takes_less(case):
    whole = equal(without_links(case("roundpipe-sync", "8x_rtx4090", "qwen3_1p7b")))
    short = replace(whole, settings=replace(whole.settings, global_sequences=37))  # nine of 4 and one of 1
    assert short.settings.chunks == (4, 10, 1)
    a, b = (roundpipe.synchronous_step(each, each.basis)["pipeline"] for each in (short, whole))
    assert 0.9 * b < a < b


def test_uploads_hold_back_a_step_only_when_the_link_is_slow(case):
    run = case("roundpipe", "8x_rtx4090", "qwen3_1p7b")
    at = {
        factor: roundpipe.asynchronous_step(run, run.basis.scaled("copy_bytes_per_s", factor))["pipeline"]
        for factor in (0.02, 1.0, 2.0)
    }
    assert at[1.0] == pytest.approx(at[2.0], rel=0.01)
    assert at[0.02] > 1.2 * at[1.0]


def test_one_interpreter_loops_for_all_devices(case):
    whole, half = (case("roundpipe", "8x_rtx4090", "gpt_oss_20b", devices) for devices in (8, 4))
    loops = [roundpipe.expert_loop_s(each, each.basis) for each in (whole, half)]
    assert loops[0] == loops[1] == pytest.approx(whole.basis["expert_pass_s"] * 2 * 24 * 32 * 16)
    dense = case("roundpipe", "8x_rtx4090", "llama31_8b")
    assert roundpipe.expert_loop_s(dense, dense.basis) == 0


def test_an_asynchronous_step_is_never_shorter_than_the_optimizer(case):
    run = case("roundpipe", "8x_a800", "gpt_oss_20b")
    slow = run.basis.scaled("host_bytes_per_s", 0.25)
    assert sum(roundpipe.asynchronous_step(run, slow).values()) == pytest.approx(roundpipe.optimizer_s(run, slow))


@pytest.mark.parametrize("name", ["qwen3_1p7b", "gpt_oss_20b", "qwen3_235b_lora"])
def test_stage_weights_hold_every_parameter_once(case, name):
    run = case("roundpipe", "8x_rtx4090", name)
    plan, model = roundpipe.planned(run), run.model
    adapters = model.trainable_parameters if model.lora_rank else 0
    ends = model.embedding_parameters + model.head_parameters
    layers = model.num_layers * model.layer_parameters
    assert sum(roundpipe.weights_of(model, plan.backward, backward=True)) == 2 * (layers + ends + adapters)
    forward = sum(roundpipe.weights_of(model, plan.forward, backward=False))
    assert forward == 2 * (layers + adapters + model.embedding_parameters)
