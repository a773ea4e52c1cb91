"""What a device with experts waits for: its weights, once its layers have asked for their tokens; and its loop."""

from dataclasses import replace

import pytest

from rpbench.ir.partition import Partition
from rpbench.predict import megatron, roundpipe, systems
from rpbench.predict.case import expert_s, loop_s
from rpbench.predict.streaming import Jobs, lanes_of, timed


def lanes(*, routed):
    return lanes_of(Jobs(Partition((2, 2), (1, 2, 1, 0), fused=True), 2, 3, 1, 1, False, routed=routed))


def test_weights_come_in_one_piece_behind_the_last_experts_of_the_stage_before():
    made = lanes(routed=True)
    what = [made.slots[number] for number in made.tasks.slot]
    waits_for = {number: set() for number in range(len(what))}
    for before, followers in enumerate(made.tasks.followers):
        for after in followers:
            waits_for[after].add(before)
    weights = [number for number, slot in enumerate(what) if slot.what == "weights"]
    assert all(what[number].pieces == 1 for number in weights)
    behind = [number for number in weights if waits_for[number]]
    assert len(behind) == len(weights) - 2  # the first visit of either device has nothing before it
    for number in behind:
        (before,) = waits_for[number]
        assert what[before].short  # the last microbatch
        assert what[before].routed or what[before].what == "FB"


def test_weights_come_ahead_where_nothing_asks_the_device():
    pieces = {slot.pieces for slot in lanes(routed=False).slots if slot.what == "weights"}
    assert pieces == {1, 3}


def test_one_device_waits_for_the_weights_of_its_experts_and_not_for_dense_ones(case):
    """All weights that 20B moves in a step stand beside its computation; of 1.7B next to nothing does."""
    waiting = {}
    for model in ("gpt_oss_20b", "qwen3_1p7b"):
        run = case("roundpipe-sync", "8x_rtx4090", model, 1)
        made = timed(roundpipe.synchronous_jobs(run), run, run.basis)
        moved = sum(
            made.end[number] - made.begin[number]
            for number, slot in enumerate(made.lanes.tasks.slot)
            if made.lanes.slots[slot].what == "weights"
        )
        waiting[model] = (made.computed_s(0) - sum(made.busy_s(range(1)))) / moved
    assert waiting["gpt_oss_20b"] > 0.45
    assert waiting["qwen3_1p7b"] < 0.1


def test_what_a_timed_layer_takes_beyond_its_count_is_its_experts(case):
    run = case("roundpipe", "8x_rtx4090", "gpt_oss_20b")
    plain = replace(run.basis, values={**run.basis.values, "gpt_oss_20b_forward_correction": 1.0})
    more = expert_s(run.model, 8192, run.basis) - expert_s(run.model, 8192, plain)
    assert more > 0
    assert expert_s(run.model, 16384, run.basis) > 1.9 * expert_s(run.model, 8192, run.basis)


def test_every_system_of_hugging_face_waits_for_the_whole_loop(case):
    run = case("fsdp", "8x_a800", "gpt_oss_20b")
    loop = 2 * 24 * 32 * run.basis["expert_pass_s"]  # forward and recomputation, layers, experts
    with_loop = systems.fsdp_step(run, run.basis)["computation"]
    assert with_loop - systems.compute_s(run, run.basis) == pytest.approx(loop)


def test_megatron_loops_over_experts_with_adapters_alone(case):
    adapted = case("megatron-pp", "8x_a800", "qwen3_235b_lora")
    grouped = case("megatron-pp", "8x_a800", "gpt_oss_20b")
    for run, loops in ((adapted, True), (grouped, False)):
        without = replace(run.basis, values={**run.basis.values, "expert_pass_s": 0.0})
        gap = megatron.pipeline_times(run, run.basis).forward[0] - megatron.pipeline_times(run, without).forward[0]
        assert gap == pytest.approx(loop_s(run.model, run.basis) if loops else 0.0)
