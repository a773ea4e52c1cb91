"""Predictions: verdicts, intervals, sensitivities, longest sequences."""

from dataclasses import replace
from math import hypot, log

import pytest

from rpbench.predict import SYSTEMS, predict
from rpbench.predict.megatron import bound_cut, pipeline_times, tensor_step
from rpbench.predict.prediction import STEP_TOKENS, longest_sequence
from rpbench.predict.systems import system


def test_a_verdict_names_what_breaks_it_and_by_how_much(case):
    found = predict(case("zero-2", "8x_rtx4090", "llama31_8b"))
    assert (found.status, found.tokens_per_s) == ("OOM", None)
    assert found.verdict.breaks == "weights on a device"
    assert "more memory is needed than there is" in found.reason
    room = 25_769_803_776 - 840_000_000
    assert found.verdict.margin == pytest.approx(1 - sum(found.device_bytes.values()) / room)


def test_what_cannot_be_divided_is_not_tried(case):
    found = predict(case("megatron-tp", "8x_a800", "qwen3_235b_lora"))
    assert (found.status, found.verdict) == ("N/A", None)
    assert "4 key heads cannot be divided among 8 devices" in found.reason


def test_intervals_follow_from_the_deviations(case):
    run = case("megatron-tp", "8x_rtx4090", "qwen3_1p7b")
    found = predict(run)
    assert found.low < found.tokens_per_s < found.high
    assert found.high / found.tokens_per_s == pytest.approx(found.tokens_per_s / found.low)
    surer = {name: replace(each, within=each.within / 2) for name, each in run.basis.declared.items()}
    narrow = predict(replace(run, basis=replace(run.basis, declared=surer, read=set())))
    assert narrow.high / narrow.low == pytest.approx((found.high / found.low) ** 0.5)


def test_sensitivities_say_what_a_system_rests_on(case):
    by_collectives = predict(case("megatron-tp", "8x_rtx4090", "llama31_8b")).sensitivity
    assert 0.85 < by_collectives["collective_bytes_per_s"] <= 1
    by_loop = predict(case("roundpipe", "8x_rtx4090", "qwen3_235b_lora")).sensitivity
    assert -1.2 < by_loop["expert_pass_s"] < -0.8
    assert "collective_bytes_per_s" not in by_loop  # it was not read


@pytest.mark.parametrize("name", list(SYSTEMS))
def test_a_predicted_step_takes_time_in_every_term(case, name):
    found = predict(case(name, "8x_a800", "llama31_8b"), with_interval=False)
    assert found.status == "ok"
    assert min(found.terms.values()) >= 0
    assert found.tokens_per_s == pytest.approx(found.case.tokens_per_step / sum(found.terms.values()))


@pytest.mark.parametrize("name", ["zero-2", "zero-infinity", "fsdp", "megatron-tp", "megatron-pp"])
def test_the_longest_sequence_fits_and_the_next_does_not(case, name):
    run = case(name, "8x_a800", "llama31_8b")
    tokens = longest_sequence(run)
    assert tokens % STEP_TOKENS == 0
    trial = replace(run, settings=replace(run.settings, num_calls=8, num_microbatches=1, microbatch_sequences=1.0))
    if not name.startswith("megatron"):
        trial = replace(trial, settings=replace(trial.settings, num_calls=1))
    if name == "megatron-pp":
        trial = replace(trial, cut=bound_cut(run).forward)
    for length, fits in ((tokens, True), (tokens + STEP_TOKENS, False)):
        memory = system(name).memory(trial.of_length(length))
        assert memory.verdict(run.basis).fits is fits


def test_a_bound_cut_fits_where_the_even_one_does_not(case):
    run = case("megatron-pp", "8x_rtx4090", "llama31_8b")
    cut = bound_cut(run).forward
    assert sum(cut) == 32
    assert cut[-1] < 4  # four layers beside the head do not fit 24 GB
    assert bound_cut(case("megatron-pp", "8x_a800", "llama31_8b")).forward == (4,) * 8


def test_unknown_systems_are_named_with_the_nearest():
    with pytest.raises(ValueError, match="unknown system 'fsdb'; did you mean fsdp"):
        system("fsdb")


# --- terms by hand -----------------------------------------------------------------------------------------------


def test_deviations_of_two_constants_add_as_squares(case):
    run = case("megatron-tp", "8x_rtx4090", "qwen3_1p7b")
    declared = run.basis.declared

    def width(*names):
        sure = {name: replace(each, within=each.within if name in names else 0.0) for name, each in declared.items()}
        found = predict(replace(run, basis=replace(run.basis, declared=sure, read=set())))
        return log(found.high / found.tokens_per_s)

    one, other = "collective_bytes_per_s", "memory_efficiency"
    assert min(width(one), width(other)) > 0
    assert width(one, other) == pytest.approx(hypot(width(one), width(other)))


def test_a_pipelines_boundary_takes_the_faster_way(case):
    """Directly, or down to the host and up again: two copies, one behind the other."""
    run = case("megatron-pp", "8x_rtx4090", "llama31_8b")
    size = 2 * run.microbatch_tokens * run.model.hidden
    direct = run.basis.scaled("collective_bytes_per_s", 100.0)
    assert pipeline_times(run, direct).hop == pytest.approx(size / direct["collective_bytes_per_s"])
    over_host = run.basis.scaled("collective_bytes_per_s", 0.01)
    assert pipeline_times(run, over_host).hop == pytest.approx(2 * size / over_host["copy_bytes_per_s"])
    assert pipeline_times(replace(run, num_devices=1), over_host).hop == 0


def test_a_tied_matrix_is_summed_by_the_two_devices_at_the_ends(case):
    run = case("megatron-pp", "8x_rtx4090", "qwen3_1p7b")
    assert run.model.tied
    by_hand = 2 * (1 / 2) * 4 * run.model.embedding_parameters / run.basis["collective_bytes_per_s"]
    assert system("megatron-pp").step(run, run.basis)["tied embedding"] == pytest.approx(by_hand)
    alone = replace(run, num_devices=1)
    assert system("megatron-pp").step(alone, alone.basis)["tied embedding"] == 0


def test_tensor_parallelism_sums_in_every_layer_and_at_both_ends_and_divides_the_head(case):
    run = case("megatron-tp", "8x_rtx4090", "llama31_8b")
    found, basis = tensor_step(run, run.basis), run.basis
    each = 2 * (7 / 8) * 2 * run.microbatch_tokens * run.model.hidden / basis["collective_bytes_per_s"]
    number = run.settings.num_calls * (basis["tensor_reductions"] * 32 + 2)
    assert found["reductions"] == pytest.approx(number * each)
    more = replace(run, model=replace(run.model, vocab=2 * run.model.vocab))

    def of_the_head(num_devices):
        both = (tensor_step(replace(one, num_devices=num_devices), basis)["computation"] for one in (more, run))
        return next(both) - next(both)

    assert of_the_head(8) * 8 == pytest.approx(of_the_head(1), rel=1e-6)


@pytest.mark.parametrize("name", ["zero-2", "zero-infinity", "fsdp"])
def test_a_step_of_twice_as_many_calls_computes_twice_as_long(case, name):
    run = case(name, "8x_a800", "llama31_8b")
    twice = replace(run, settings=replace(run.settings, num_calls=2 * run.settings.num_calls))
    once, more = (system(name).step(each, each.basis) for each in (run, twice))
    assert more["computation"] == pytest.approx(2 * once["computation"])
    assert more["optimizer"] == once["optimizer"]


def test_fsdp_gathers_all_weights_twice_a_call_beside_the_computation(case):
    run = case("fsdp", "8x_a800", "llama31_8b")
    slow = run.basis.scaled("collective_bytes_per_s", 1e-3)
    found = system("fsdp").step(run, slow)
    gathers = run.settings.num_calls * 2 * (7 / 8) * 2 * run.model.total_parameters / slow["collective_bytes_per_s"]
    assert found["computation"] + found["weights"] == pytest.approx(gathers)
    fast = run.basis.scaled("collective_bytes_per_s", 1e3)
    assert system("fsdp").step(run, fast)["weights"] == 0
