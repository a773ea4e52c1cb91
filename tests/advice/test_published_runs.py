"""Published runs on the simulator of schedules: beside the bars of figure 10, and beside the predictor of systems."""

import csv
from dataclasses import replace
from pathlib import Path

import pytest
from contest_terms import read

from rpbench.advice.published_runs import SYSTEMS, simulated, terms_of_run
from rpbench.cost.hardware.basis import make_basis
from rpbench.cost.hardware.machine import machine
from rpbench.predict import predict
from rpbench.predict.case import Case
from rpbench.predict.settings import published_settings
from rpbench.workload.architecture import architecture

PLATFORM = "8x-rtx4090-24gb"
MODELS = {
    "qwen3-1.7b": "qwen3_1p7b",
    "llama-3.1-8b": "llama31_8b",
    "gpt-oss-20b": "gpt_oss_20b",
    "qwen3-32b": "qwen3_32b",
    "qwen3-235b-lora": "qwen3_235b_lora",
}
with (Path(__file__).parents[2] / "analysis" / "published" / "throughput.csv").open() as source:
    BARS = {(row["system"], row["model"]): row for row in csv.DictReader(source) if row["platform"] == PLATFORM}


def run(system, model):
    """The simulated run, the prediction and the published bar."""
    cluster, costs = machine("8x_rtx4090"), read("cost/analytic.yaml")
    basis = make_basis(cluster, costs["constants"], costs["declared"])
    settings = published_settings(system, PLATFORM, model, float(cluster.device_memory_bytes))
    case = Case(system, architecture(MODELS[model]), basis, settings, 8, measured_on=basis)
    bar = BARS[system, model]["tokens_per_s"]
    return simulated(case, cluster), predict(case, with_interval=False), float(bar) if bar else None


NEAR = [
    ("roundpipe", "llama-3.1-8b"),
    pytest.param("roundpipe", "qwen3-1.7b", marks=pytest.mark.slow),
    ("megatron-pp", "qwen3-1.7b"),
    pytest.param("roundpipe", "qwen3-32b", marks=pytest.mark.slow),
    pytest.param("megatron-pp", "llama-3.1-8b", marks=pytest.mark.slow),
    pytest.param("megatron-tp", "qwen3-1.7b", marks=pytest.mark.slow),
    pytest.param("megatron-tp", "llama-3.1-8b", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("system", "model"), NEAR)
def test_runs_with_nothing_left_out_are_near_the_bar_and_the_prediction(system, model):
    found, predicted, bar = run(system, model)
    assert found.outcome.fits
    assert found.tokens_per_s == pytest.approx(bar, rel=0.15)
    assert found.tokens_per_s == pytest.approx(predicted.tokens_per_s, rel=0.05)
    assert sum(found.why.values()) == pytest.approx(found.step_time_s)


def test_what_is_far_off_names_what_it_lacks():
    found, predicted, bar = run("roundpipe", "qwen3-235b-lora")
    assert found.tokens_per_s > 1.15 * bar
    assert found.lacks == ("the interpreter's loop over experts",)
    more = predicted.terms["expert loop"] + found.step_time_s
    assert found.case.tokens_per_step / more == pytest.approx(predicted.tokens_per_s, rel=0.15), "that term explains it"
    assert found.tokens_per_s > predicted.tokens_per_s


def test_dense_models_have_no_loop_over_experts():
    assert run("roundpipe", "llama-3.1-8b")[0].lacks == ()


def test_steps_of_replicas_go_on_as_the_simulated_calls_do():
    found, predicted, _ = run("zero-2", "qwen3-1.7b")
    calls = found.case.settings.num_calls
    assert calls == 32
    computing = found.why["computation"] + found.why["recomputation"]
    assert computing == pytest.approx(predicted.terms["computation"], rel=0.07)
    size = found.case.settings.microbatch_sequences
    run_s = terms_of_run(found.case, machine("8x_rtx4090"), size, round(8 * size)).times(size)
    layers = sum(run_s.forward) + sum(run_s.backward) + run_s.head_forward + run_s.head_backward
    assert found.why["computation"] == pytest.approx(calls * float(layers), rel=1e-6), (
        "32 calls, of which few are timed"
    )
    assert found.why["recomputation"] == pytest.approx(calls * float(sum(run_s.recompute)), rel=1e-6)
    # The predictor counts the passes of an eager loss over its logits; the timings of layers are of a fused one.
    # A scatter of all gradients every call, at the pace of collectives, is what the step cannot be faster than.
    model, pace = found.case.model, found.case.basis["collective_bytes_per_s"]
    scatters = calls * 2 * model.trainable_parameters * 7 / 8 / pace
    assert scatters < found.step_time_s < 1.5 * scatters + computing


def test_verdicts_of_what_is_bound_to_devices_are_those_of_the_paper():
    for model in ("gpt-oss-20b",):
        assert not run("megatron-pp", model)[0].outcome.fits
        assert BARS["megatron-pp", model]["status"] == "OOM"


def test_a_system_without_a_schedule_is_refused():
    found = run("megatron-pp", "qwen3-1.7b")[0]
    with pytest.raises(ValueError, match="no schedule stands for it"):
        simulated(replace(found.case, system="x"), machine("8x_rtx4090"))
    assert set(SYSTEMS) == {system for system, _ in BARS} - {"fsdp-offload"}
