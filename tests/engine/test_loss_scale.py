"""Training in float16: losses are scaled, an overflow skips the step, and the reference does exactly the same."""

from dataclasses import replace

import pytest
import torch
from cases import build
from hypothesis import given
from hypothesis import strategies as st
from spared import slow
from training_cases import assert_same, reference_of, train, workload_of

from rpbench.engine.backends.threads import CpuBackend
from rpbench.engine.state.loss_scale import LossScaler, LossScaling, Scale
from rpbench.engine.state.updates.optimizer import OptimizerSettings
from rpbench.engine.training import Settings, Training
from rpbench.ir.policy import Policy
from rpbench.passes.lower import add_steps

FINE, BROKEN = [torch.ones(2)], [torch.ones(2), torch.tensor([1.0, torch.inf])]


def run_in_float16(name: str, *, backend=None, num_steps: int = 5, scaling: LossScaling, **options):
    schedule = build(name, 2, 3, num_steps=num_steps, **options)
    workload = workload_of(schedule, dtype=torch.float16)
    return train(schedule, workload, backend=backend, learning_rate=1e-2, loss_scaling=scaling)


def stale(microbatch_of_module, microbatch):
    return max(0, microbatch // 3 - 1)


@pytest.mark.parametrize(
    "name, options, read_version",
    [slow(("1f1b", {}, None)), ("roundpipe", {}, None), ("roundpipe", {"asynchronous": True}, stale)],
    ids=["1f1b", "roundpipe", "roundpipe-asynchronous"],
)
@pytest.mark.parametrize("initial, num_skipped", [slow((2.0**10, 0)), (2.0**20, None)])
def test_float16_equals_the_reference_with_and_without_overflow(name, options, read_version, initial, num_skipped):
    run = run_in_float16(name, scaling=LossScaling(initial, growth_steps=2), num_steps=6, **options)
    reference = reference_of(run, read_version=read_version)
    skipped = run.training.scaler.skipped
    assert (len(skipped) == num_skipped) if num_skipped is not None else 0 < len(skipped) < 6
    assert {version: scale.value for version, scale in run.training.scaler.scales.items()} == reference.scales
    assert_same(run, reference)
    assert {master.dtype for master in run.training.optimizer.masters.values()} == {torch.float32}


def test_float16_on_threads_equals_the_reference_too():
    with CpuBackend() as backend:
        run = run_in_float16("roundpipe", backend=backend, scaling=LossScaling(2.0**24), num_steps=4, asynchronous=True)
    assert 1 in run.training.scaler.skipped
    assert_same(run, reference_of(run, read_version=stale))


def test_a_skipped_step_changes_no_weight():
    run = run_in_float16("1f1b", scaling=LossScaling(2.0**60), num_steps=2)
    assert run.training.scaler.skipped == {1, 2}
    masters, workload = run.training.optimizer.masters, run.training.workload
    assert all(torch.equal(masters[place], workload.parameter(place).float()) for place in masters)
    assert run.training.mean_loss(1) != run.training.mean_loss(0), "other batches"


def test_clipping_looks_at_gradients_without_their_scale():
    schedule = build("roundpipe", 2, 3, num_steps=3)
    workload = workload_of(schedule, dtype=torch.float16)
    runs = [
        train(schedule, workload, learning_rate=1e-2, clip_norm=1e-2, loss_scaling=LossScaling(2.0**power))
        for power in (8, 10)
    ]
    for run in runs:
        assert_same(run, reference_of(run))
    one, other = (run.training.optimizer.masters for run in runs)
    assert all(torch.allclose(one[place], other[place], atol=2e-2) for place in one)


def test_scales_of_stale_training_take_turns():
    """An overflow of iteration k lowers the scale of k + 2, and leaves that of k + 1 alone."""
    scaler = LossScaler(LossScaling(64.0, growth_steps=2))
    outcomes = [BROKEN, BROKEN, FINE, FINE, FINE, FINE]
    for version, outcome in enumerate(outcomes, start=1):
        scaler.advance(version, max(0, version - 2), outcome)
    assert [scaler.of(version) for version in range(7)] == [64, 32, 32, 32, 32, 64, 64]
    assert scaler.skipped == {1, 2}


@given(outcomes=st.lists(st.booleans(), max_size=40), growth_steps=st.integers(1, 5))
def test_a_scale_follows_the_rule(outcomes, growth_steps):
    rule = LossScaling(2.0**10, growth_steps)
    scale, exponent, streak = Scale(rule.initial), 10, 0
    for finite in outcomes:
        scale = rule.follow(scale, finite=finite)
        streak = streak + 1 if finite else 0
        if not finite:
            exponent -= 1
        elif streak == growth_steps:
            exponent, streak = exponent + 1, 0
        assert scale == (2.0**exponent, streak)


@pytest.mark.parametrize("value", [0.0, -2.0, 3.0, float("inf"), float("nan")])
def test_a_scale_that_would_change_digits_is_refused(value):
    with pytest.raises(ValueError, match=r"loss_scale=.*: a power of two"):
        LossScaling(value)
    with pytest.raises(ValueError, match="loss_scale_growth_steps=0"):
        LossScaling(growth_steps=0)


def test_a_policy_that_mixes_versions_in_a_step_is_refused():
    schedule = replace(add_steps(build("1f1b", 2, 3)), policy=Policy.STASH)
    settings = Settings(OptimizerSettings(loss_scaling=LossScaling()))
    with pytest.raises(ValueError, match=r"policy stash .* different scales; use dtype=bfloat16"):
        Training(workload_of(schedule, dtype=torch.float16), schedule, settings)
