"""RoundPipe predicted: the simulator's times where nothing else plays a part, and what is added to them."""

from dataclasses import replace
from math import log

import pytest

from rpbench import registry
from rpbench.mesh.layers.layer_times import setting_of, times_of
from rpbench.plan.problem import Problem
from rpbench.predict import roundpipe, streaming
from rpbench.predict.settings import Settings
from rpbench.predict.systems import STEP, system
from rpbench.sim.longest_path import simulate


def without_links(case):
    """The same on a machine whose links and host take no time."""
    values = {k: v for k, v in case.basis.values.items() if k not in ("copy_bytes_per_s", "host_bytes_per_s")}
    return replace(case, basis=replace(case.basis, values=values, read=set()))


def equal(case, num_calls=1, num=10):
    return replace(case, settings=Settings(40 * num_calls, num_calls, num, 40 / num, ""))


def test_equal_microbatches_without_links_are_the_plain_simulation(case):
    small = equal(without_links(case("roundpipe-sync", "8x_rtx4090", "qwen3_1p7b")), num_calls=2)
    times = times_of(setting_of(small.model, small.chunk_tokens, small.basis))
    problem = Problem(registry.entry("roundpipe"), times, 8, 20, options={"round_size": 10}, recompute_ahead=True)
    plan = roundpipe.planned(small)
    timeline = simulate(problem.order(plan), problem.costs(plan))
    terms = roundpipe.synchronous_step(small, small.basis)
    assert sum(terms.values()) == pytest.approx(max(timeline.end))
    assert terms["optimizer"] == terms["expert loop"] == 0


def test_the_warm_interval_does_not_depend_on_how_long_it_is_timed(case):
    small = case("roundpipe", "8x_rtx4090", "qwen3_1p7b")
    found = []
    for steps in (5, 9):
        jobs = replace(roundpipe.asynchronous_jobs(small), steps=steps)
        run, (first, last) = streaming.timed(jobs, small, small.basis), roundpipe.timed_steps(jobs)
        found.append((run.computed_s(last) - run.computed_s(first)) / (last - first))
    assert found[0] == pytest.approx(found[1], rel=0.01)


def test_a_short_last_microbatch_takes_less(case):
    whole = equal(without_links(case("roundpipe-sync", "8x_rtx4090", "qwen3_1p7b")))
    short = replace(whole, settings=replace(whole.settings, global_sequences=37))  # nine of 4 and one of 1
    assert short.settings.chunks == (4, 10, 1)
    a, b = (sum(roundpipe.synchronous_step(each, each.basis).values()) for each in (short, whole))
    assert 0.9 * b < a < b


def test_transfers_hold_back_a_step_only_when_the_link_is_slow(case):
    run = case("roundpipe", "8x_rtx4090", "qwen3_1p7b")
    at = {
        factor: sum(roundpipe.asynchronous_step(run, run.basis.scaled("copy_bytes_per_s", factor)).values())
        for factor in (0.02, 1.0, 2.0)
    }
    assert at[1.0] == pytest.approx(at[2.0], rel=0.01)
    assert at[0.02] > 1.2 * at[1.0]


def test_one_interpreter_loops_for_all_devices(case):
    run = case("roundpipe", "8x_rtx4090", "qwen3_235b_lora")
    passes = 2 * run.model.experts.total * run.model.num_layers * run.settings.chunks.num
    step = sum(roundpipe.asynchronous_step(run, run.basis).values())
    assert 1 <= step / (passes * run.basis["expert_pass_s"]) < 1.1  # the loop is what the step is made of
    few = replace(run, num_devices=4)
    assert sum(roundpipe.asynchronous_step(few, few.basis).values()) < 1.2 * step
    dense = case("roundpipe", "8x_rtx4090", "llama31_8b")
    assert roundpipe.asynchronous_step(dense, dense.basis)["expert loop"] == 0


def test_the_optimizers_threads_slow_the_interpreter_down(case):
    run = case("roundpipe", "8x_rtx4090", "gpt_oss_20b")
    alone = replace(run.basis, values={**run.basis.values, "loop_share": 1.0}, read=set())
    shared, free = (roundpipe.asynchronous_step(run, basis) for basis in (run.basis, alone))
    assert shared["expert loop"] > 2 * free["expert loop"]  # part of it hides where devices wait for weights
    assert sum(shared.values()) > 1.01 * sum(free.values())


def test_slopes_are_those_of_a_step_timed_again(case):
    run = case("roundpipe-sync", "8x_rtx4090", "llama31_8b")
    found = system("roundpipe-sync").slopes(run)
    plain = sum(roundpipe.synchronous_step(run, run.basis).values())
    for name in ("host_bytes_per_s", "norm_bytes", "matmul_efficiency", "llama_3p1_8b_backward_correction"):
        again = sum(roundpipe.synchronous_step(run, run.varied(name, STEP)).values())
        assert found[name] == pytest.approx(log(plain / again) / log(STEP), abs=0.03)


def test_published_timings_make_up_for_what_counts_too_much(case):
    run = case("roundpipe", "8x_rtx4090", "llama31_8b")
    varied = run.varied("norm_bytes", 1.5)
    layers = [times_of(setting_of(run.model, 8192, basis)).forward[0] for basis in (run.basis, varied)]
    assert layers[0] == pytest.approx(layers[1])
    other = case("roundpipe", "8x_a800", "llama31_8b")  # the same correction, on a machine with another balance
    there = [
        times_of(setting_of(other.model, 8192, basis)).forward[0]
        for basis in (other.basis, other.varied("norm_bytes", 1.5))
    ]
    assert 1.001 < max(there) / min(there) < 1.05


@pytest.mark.parametrize("name", ["qwen3_1p7b", "gpt_oss_20b", "qwen3_235b_lora"])
def test_stage_weights_hold_every_parameter_once(case, name):
    run = case("roundpipe", "8x_rtx4090", name)
    plan, model = roundpipe.planned(run), run.model
    adapters = model.trainable_parameters if model.lora_rank else 0
    ends = model.embedding_parameters + model.head_parameters
    layers = model.num_layers * model.layer_parameters
    stages = streaming.Needs(roundpipe.synchronous_jobs(run), run, run.basis).stages
    forward, backward = (
        sum(stages.stage(number, backward=down).weights for number in range(len(counts)))
        for counts, down in ((plan.forward, False), (plan.backward, True))
    )
    assert backward == 2 * (layers + ends + adapters)
    assert forward == 2 * (layers + adapters + model.embedding_parameters)
