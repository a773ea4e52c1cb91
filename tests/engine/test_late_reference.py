"""The reference of late gradients: its own numbers, and what is changed in the engine alone turns verification red."""

import pytest
import torch
from cases import build
from spared import slow, spared
from test_compensation import Head, known
from training_cases import train, workload_of

from rpbench.engine import training as engine
from rpbench.engine.reference_steps import Lateness, corrected, horizons, mean_move, rate_factor
from rpbench.engine.state import weights_read
from rpbench.engine.state.updates import compensation
from rpbench.engine.state.updates.compensation import Compensation, Delays
from rpbench.engine.verification import gated, verified
from rpbench.registry import entry

PIPEMARE = Compensation(rescheduling_steps=4, correction_decay=0.135)


# --- the equations, by hand --------------------------------------------------------------------------------------


def test_a_late_stage_comes_to_its_full_rate_in_k_steps():
    """tau = 16, K = 4: 16^-1, 16^-3/4, 16^-1/2, 16^-1/4, then 1; the flushed steps before count for nothing."""
    assert [rate_factor(16.0, step, 4, 1) for step in range(7)] == [1.0, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0, 1.0]
    assert rate_factor(16.0, 0, 0, 0) == 1.0
    assert rate_factor(0.5, 0, 4, 0) == 1.0


def test_the_mean_move_and_what_it_corrects():
    """D = 1/8 and tau = 3: gamma = 1/2."""
    zero, old, new = (torch.full((2,), value, dtype=torch.float64) for value in (0.0, 4.0, 6.0))
    mean = mean_move(zero, old, new, 3.0, 0.125)
    assert mean.tolist() == [1.0, 1.0]
    assert mean_move(mean, new, old, 3.0, 0.125).tolist() == [-0.5, -0.5]
    assert mean_move(mean, old, new, 0.0, 0.125).tolist() == [2.0, 2.0]
    assert corrected(new, 3, mean).tolist() == [3.0, 3.0]


def test_delays_are_told_from_what_forward_reads():
    """Two microbatches a step, three steps; the last step reads versions 0 and 1."""
    reads = {0: 0, 1: 0, 2: 0, 3: 0, 4: 0, 5: 1}
    late = Lateness(lambda module, microbatch: reads[microbatch], 2, 3)
    assert [late.steps(7, microbatch) for microbatch in range(6)] == [0, 0, 1, 1, 2, 1]
    assert late.of_step(7, 5) == 2
    assert late.tau(7) == 1.5


def test_how_far_predictors_look():
    assert horizons("", 3, 2) == (0, 0)
    assert horizons("pipeoptim", 3, 2) == horizons("xpipe", 3, 2) == (2, 0)
    # SpecTrain, N = 6 stages: forward floor(k / 2) + N - k - 1, backward floor(k / 2)
    assert [horizons("spectrain", k, 5 - k) for k in range(6)] == [(5, 0), (4, 0), (4, 1), (3, 1), (3, 2), (2, 2)]


def test_the_schedules_own_settings_are_the_papers():
    """D = exp(-2), to three places."""
    assert entry("pipemare").options["correction_decay"] == round(2.718281828459045**-2, 3)


@pytest.mark.parametrize("stages", [2, 4])
def test_the_engine_with_rescheduling_is_descent_at_that_falling_rate(stages):
    """A parabola on the first stage: w(t+1) = w(t) - alpha tau^-p(t) lambda w(t - tau)."""
    tau, curvature, rate, num_steps = stages - 1, 0.8, 0.1, 12
    schedule = build("pipemare", stages, 1, num_layers=stages, num_steps=num_steps, steps=True)
    run = train(
        schedule,
        known(schedule, Head(curvature)),
        name="sgd",
        learning_rate=rate,
        weight_decay=0.0,
        compensation=Compensation(rescheduling_steps=5),
    )
    weights = [1.0]
    for step in range(num_steps):
        slowed = rate * tau ** -(1 - min(step / 5, 1))
        weights.append(weights[-1] - slowed * curvature * weights[max(0, step - tau)])
    assert run.training.optimizer.masters[1, "weight"].tolist() == pytest.approx([weights[-1]] * 4, rel=1e-12)


# --- what is wrong in the engine alone ---------------------------------------------------------------------------


def verdict(name: str, chosen: Compensation) -> str:
    options = {"rescheduling_steps": 4, "correction_decay": 0.135} if name == "pipemare" else {}
    schedule = build(name, 3, 1, num_steps=7, steps=True, **options)
    run = train(schedule, workload_of(schedule), compensation=chosen, learning_rate=1e-2)
    return gated(verified(run.training), torch.float64).get("status", "ok")


def with_delays(change):
    """A patch that changes delays where they are made."""
    made = Delays.__init__

    def changed(self, analysis):
        made(self, analysis)
        change(self)

    return lambda patch: patch.setattr(Delays, "__init__", changed)


def one_more(delays):
    delays.tau = [tau + 1 for tau in delays.tau]


def twice_as_far(delays):
    delays.drift = {visit: 2 * steps for visit, steps in delays.drift.items()}


CHANGES = {
    "nothing": lambda patch: None,
    "the exponent of T1": lambda patch: patch.setattr(
        engine, "slowdown", lambda *given: compensation.slowdown(*given) ** 1.01
    ),
    "gamma of T2": lambda patch: patch.setattr(
        weights_read, "correction_share", lambda *given: 0.99 * compensation.correction_share(*given)
    ),
    "the steps that T2 goes back": with_delays(twice_as_far),
    "tau": with_delays(one_more),
}


@pytest.mark.parametrize("change", spared(CHANGES, lambda change: change in ("nothing", "tau")))
def test_a_constant_changed_in_the_engine_fails_verification(change, monkeypatch):
    CHANGES[change](monkeypatch)
    assert verdict("pipemare", PIPEMARE) == ("ok" if change == "nothing" else "failed")


@pytest.mark.parametrize("name", ["pipeoptim", slow("spectrain")])
def test_a_horizon_changed_in_the_engine_fails_verification(name, monkeypatch):
    assert verdict(name, Compensation(name)) == "ok"
    real = Delays.horizons
    monkeypatch.setattr(Delays, "horizons", lambda *given: tuple(steps and steps + 1 for steps in real(*given)))
    assert verdict(name, Compensation(name)) == "failed"
