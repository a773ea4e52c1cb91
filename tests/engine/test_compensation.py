"""What asynchronous methods do about late gradients: bit for bit their references, and exact where theory says so."""

import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from cases import build
from hypothesis import given, settings
from hypothesis import strategies as st
from spared import slow, spared
from torch import nn
from training_cases import TINY, assert_same, reference_of, train, workload_of

from rpbench.engine.backends.threads import CpuBackend
from rpbench.engine.state.updates.compensation import (
    Compensation,
    Delays,
    check_compensation,
    correction_share,
    slowdown,
)
from rpbench.engine.state.weights import Weights
from rpbench.engine.training import Settings, Training
from rpbench.engine.workload import Workload
from rpbench.ir.analysis import Analysis
from rpbench.models.data import Batch

RATE = 1e-2

PIPEMARE = {"rescheduling_steps": 5, "correction_decay": 0.135}


def largest_stable_rate(curvature: float, tau: int) -> float:
    """The learning rate above which gradient descent with a fixed delay diverges on a parabola.

    Source: PipeMare, section 3.1, lemma 1: (2 / lambda) sin(pi / (4 tau + 2)).
    """
    return 2 / curvature * math.sin(math.pi / (4 * tau + 2))


def compensation_of(name: str, **options) -> Compensation:
    return Compensation(**options) if name == "pipemare" else Compensation(name)


METHODS = {
    "none": ("pipemare", {}),
    "T1": ("pipemare", {"rescheduling_steps": 5}),
    "T2": ("pipemare", {"correction_decay": 0.135}),
    "T1, T2, T3": ("pipemare", {**PIPEMARE, "num_sync_steps": 2}),
    "pipeoptim": ("pipeoptim", {}),
    "spectrain": ("spectrain", {}),
    "xpipe": ("xpipe", {}),
}
OPTIMIZERS = [{"name": "adamw"}, {"name": "sgd", "momentum": 0.9}, {"name": "sgd"}]


@pytest.mark.parametrize("method", spared(METHODS, lambda name: name in ("T2", "spectrain", "xpipe")))
@settings(deadline=None, max_examples=2)
@given(data=st.data())
def test_every_method_equals_its_reference(method, data):
    check_reference(*METHODS[method], data)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
@settings(deadline=None, max_examples=15)
@given(data=st.data())
def test_every_method_equals_its_reference_in_many_shapes(method, data):
    check_reference(*METHODS[method], data)


def check_reference(name, options, data):
    devices, window, steps = (data.draw(st.integers(1, top)) for top in (5, 3, 6))
    schedule = build(name, devices, window, num_steps=steps, steps=True, **options)
    run = train(
        schedule,
        workload_of(schedule, replace(TINY, dropout=data.draw(st.sampled_from([0.0, 0.2])))),
        compensation=compensation_of(name, **options),
        recompute_grain=data.draw(st.sampled_from(["stage", "layer"])),
        learning_rate=RATE,
        **data.draw(st.sampled_from(OPTIMIZERS)),
    )
    assert_same(run, reference_of(run))
    assert run.training.passes.num_left == 0


def test_weights_are_predicted_at_the_learning_rate_of_the_step_that_made_them():
    """While it warms up, every step has another one."""
    schedule = build("spectrain", 3, 1, num_steps=4, steps=True)
    compensation = compensation_of("spectrain")
    run = train(schedule, workload_of(schedule), compensation=compensation, learning_rate=RATE, num_warmup_steps=3)
    assert_same(run, reference_of(run))


@pytest.mark.parametrize("method", ["T1, T2, T3", slow("pipeoptim"), slow("spectrain")])
def test_threads_compensate_alike(method):
    name, options = METHODS[method]
    schedule = build(name, 3, 1, num_steps=8, steps=True, **options)
    with CpuBackend() as backend:
        run = train(schedule, workload_of(schedule), backend=backend, compensation=compensation_of(name, **options))
    assert_same(run, reference_of(run))


@pytest.mark.parametrize("method", [slow("T1"), slow("T2"), "pipeoptim", slow("spectrain")])
def test_compensation_changes_what_is_trained(method):
    name, options = METHODS[method]
    schedule = build(name, 3, 1, num_steps=8, steps=True, **options)
    workload = workload_of(schedule)
    plain = train(schedule, workload, learning_rate=RATE)
    run = train(schedule, workload, learning_rate=RATE, compensation=compensation_of(name, **options))
    with pytest.raises(AssertionError):
        assert_same(run, reference_of(plain))


def test_a_synchronous_start_is_plain_training():
    """T3: as long as steps are flushed, T1 and T2 have nothing to do."""
    schedule = build("pipemare", 3, 2, num_steps=4, num_sync_steps=4)
    run = train(schedule, workload_of(schedule), compensation=Compensation(num_sync_steps=4, **PIPEMARE))
    assert_same(run, reference_of(run, lambda module, microbatch: microbatch // 2))
    assert Delays(Analysis(schedule)).tau == [0, 0, 0]


# --- delays and the numbers made of them ---


@pytest.mark.parametrize("window", [1, 2, 4])
def test_tau_is_measured_on_the_order(window):
    """1F1B on p ranks is late by p - 1 - s microbatches, that is (p - 1 - s) / N steps on average."""
    schedule = build("pipemare", 4, window, num_steps=12, steps=True)
    assert Delays(Analysis(schedule)).tau == [(3 - stage) / window for stage in range(4)]


def test_a_slow_stage_gains_its_full_rate():
    settings_ = Compensation(rescheduling_steps=4, num_sync_steps=2)
    assert [slowdown(9.0, version, settings_) for version in (1, 2)] == [1.0, 1.0]
    found = [slowdown(9.0, version, settings_) for version in range(3, 9)]
    assert found == pytest.approx([1 / 9, 9**-0.75, 1 / 3, 9**-0.25, 1.0, 1.0])
    assert slowdown(0.5, 3, settings_) == 1.0, "no stage learns faster than it would"
    assert slowdown(9.0, 3, Compensation()) == 1.0


def test_what_is_left_of_an_old_move():
    assert correction_share(3.0, Compensation(correction_decay=0.125)) == pytest.approx(0.5)
    assert correction_share(0.0, Compensation(correction_decay=0.125)) == 0.0


@pytest.mark.parametrize("tau", [0, 1, 2, 5, 10, 40])
def test_the_bound_of_stability(tau):
    """w(t+1) = w(t) - alpha lambda w(t - tau): the roots of z^(tau+1) - z^tau + alpha lambda lie inside the circle."""
    curvature = 1.7

    def radius(rate):
        polynomial = np.zeros(tau + 2)
        polynomial[0], polynomial[1] = 1.0, -1.0
        polynomial[-1] += rate * curvature
        return abs(np.roots(polynomial)).max()

    low, high = 0.0, 2 / curvature + 1e-9
    low = high / 1e4
    while high - low > 1e-10:
        middle = (low + high) / 2
        low, high = (middle, high) if radius(middle) < 1 else (low, middle)
    assert low == pytest.approx(largest_stable_rate(curvature, tau), rel=1e-6)


# --- models of which everything is known ---


class Shift(nn.Module):
    """x + w: whatever comes after it, the weight's gradient is the output's."""

    def __init__(self, start: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((4,), start, dtype=torch.float64))

    def forward(self, x):
        return x + self.weight


class Zeros(nn.Module):
    def forward(self, tokens):
        return torch.zeros(*tokens.shape, 4, dtype=torch.float64)


class Head(nn.Module):
    """The mean of x, or of its square times half the curvature."""

    def __init__(self, curvature: float | None = None) -> None:
        super().__init__()
        self.curvature = curvature

    def forward(self, x, labels):
        return x.mean() if self.curvature is None else self.curvature / 2 * (x * x).sum() / x[..., 0].numel()


class NoTokens:
    def microbatch(self, step, microbatch):
        return Batch(torch.zeros(2, 2, dtype=torch.int64), torch.zeros(2, 2, dtype=torch.int64))


def known(schedule, head: Head) -> Workload:
    num_layers = schedule.partition.num_layers
    num_shifts = num_layers if head.curvature is None else 1
    layers = [Shift(1.0) if number < num_shifts else nn.Identity() for number in range(num_layers)]
    return Workload([Zeros(), *layers, head], NoTokens(), schedule.shape.num_microbatches)


@pytest.mark.parametrize("stages", [1, slow(2), 3, slow(4)])
def test_the_engine_is_gradient_descent_with_that_delay(stages):
    """A parabola on the first stage of p, nothing on the others: inside the bound it shrinks, outside it grows."""
    tau, curvature = stages - 1, 0.8
    for factor, grows in ((0.98, False), (1.02, True)):
        rate = factor * largest_stable_rate(curvature, tau)
        schedule = build("pipemare", stages, 1, num_layers=stages, num_steps=150, steps=True)
        run = train(schedule, known(schedule, Head(curvature)), name="sgd", learning_rate=rate, weight_decay=0.0)
        weights = [1.0]
        for step in range(150):
            weights.append(weights[-1] - rate * curvature * weights[max(0, step - tau)])
        found = run.training.optimizer.masters[1, "weight"]
        assert found.tolist() == pytest.approx([weights[-1]] * 4, rel=1e-9)
        losses = [run.training.mean_loss(step) for step in range(150)]
        assert (max(losses[-20:]) > max(losses[20:40])) == grows


@pytest.mark.parametrize("optimizer", [{"name": "adamw"}, {"name": "sgd", "momentum": 0.5}], ids=["adamw", "sgd"])
@pytest.mark.parametrize("name", ["pipeoptim", slow("spectrain"), slow("xpipe")])
def test_a_forecast_on_a_straight_way_is_where_the_weights_will_be(name, optimizer, monkeypatch):
    """The gradient is the same in every step, so weights move on a line once momentum has settled."""
    devices, steps = 4, 90
    schedule = build(name, devices, 1, num_layers=4, num_steps=steps, steps=True)
    workload = known(schedule, Head())
    lent, published = {}, {}
    lend, publish = Weights.lend, Weights.publish

    def note_lent(self, module, number, values):
        lent[module, number] = values[module, "weight"].clone() if (module, "weight") in values else None
        lend(self, module, number, values)

    def note_published(self, modules, version, masters):
        for module in modules:
            if (module, "weight") in (values := masters(None)):
                published[module, version] = values[module, "weight"].clone()
        publish(self, modules, version, masters)

    monkeypatch.setattr(Weights, "lend", note_lent)
    monkeypatch.setattr(Weights, "publish", note_published)
    settings_ = {"learning_rate": 2.0**-6, "weight_decay": 0.0, **optimizer}
    training: Training = train(schedule, workload, compensation=Compensation(name), **settings_).training
    num_compared = 0
    for (module, number), weight in lent.items():
        stage = training.layout.stage_of(module)
        beyond = stage // 2 if name == "spectrain" else 0
        minibatch = (-1 - number) // 2  # forward: -1 - 2 mb, backward: -2 - 2 mb
        if weight is not None and (module, minibatch + beyond) in published and minibatch > steps - 30:
            torch.testing.assert_close(weight, published[module, minibatch + beyond], rtol=1e-12, atol=1e-12)
            num_compared += 1
    assert num_compared > 3 * 20


# --- closed forms ---


def throughput_over_flushed(num_stages: int, num_microbatches: int) -> Fraction:
    """How many times as many microbatches leave a pipeline that is never flushed: (N + P - 1) / N.

    Both are of equal stages, and one that flushes is busy N / (N + P - 1) of the time. The paper's "up to 4.3 times
    the utilisation" is this at (P - 1) / N = 3.3.
    """
    return Fraction(num_microbatches + num_stages - 1, num_microbatches)


def weights_over_one_copy(num_stages: int, *, corrected: bool = True) -> Fraction:
    """Memory of weights, gradients and optimizer state where old versions are kept, over PipeMare's.

    In copies of the weights: a weight, a gradient and Adam's two moments; on p equal stages of 1F1B a stash holds
    (p - 1) / 2 old versions more on average, T2 holds one mean move. The paper's "up to 2.7 times less" is this for
    about 20 stages.
    """
    stashed = 4 + Fraction(num_stages - 1, 2)
    return stashed / (5 if corrected else 4)


@pytest.mark.parametrize("p, n", [(4, 8), (8, 32), (107, 8)])
def test_what_a_pipeline_gains_that_is_never_flushed(p, n):
    assert throughput_over_flushed(p, n) == 1 + Fraction(p - 1, n)


def test_the_papers_largest_claims_and_what_they_take():
    assert throughput_over_flushed(34, 10) == Fraction(43, 10)
    assert weights_over_one_copy(20) == Fraction(27, 10)
    assert weights_over_one_copy(20, corrected=False) == Fraction(27, 8)


# --- what is refused ---


@pytest.mark.parametrize(
    "options, expected",
    [
        ({"predictor": "oracle"}, "predictor='oracle': one of pipelined_backprop, pipeoptim, spectrain, xpipe"),
        ({"rescheduling_steps": -1}, "rescheduling_steps=-1"),
        ({"correction_decay": 1.0}, "correction_decay=1.0: between 0 and 1"),
        ({"num_sync_steps": -2}, "num_sync_steps=-2"),
    ],
)
def test_settings_that_cannot_be_are_refused(options, expected):
    with pytest.raises(ValueError, match=expected):
        Compensation(**options)


def test_compensation_belongs_to_its_policy():
    flushed = build("1f1b", 2, 2)
    with pytest.raises(ValueError, match=r"policy latest, 1f1b has flush; use schedule=pipemare"):
        check_compensation(flushed, Compensation(**PIPEMARE), has_tied=False)
    with pytest.raises(ValueError, match=r"policy predict, 1f1b has flush; use schedule=pipeoptim"):
        Training(workload_of(flushed), flushed, Settings(compensation=Compensation("pipeoptim")))
    check_compensation(flushed, Compensation(), has_tied=True)
    with pytest.raises(ValueError, match=r"set model.tied=false"):
        check_compensation(build("pipemare", 2, 2), Compensation(**PIPEMARE), has_tied=True)


def test_bound_falls_with_delay():
    bounds = [largest_stable_rate(1.0, tau) for tau in range(6)]
    assert bounds[0] == pytest.approx(2.0)
    assert bounds == sorted(bounds, reverse=True)
    assert largest_stable_rate(1.0, 1000) * 1000 == pytest.approx(math.pi / 2, rel=1e-3)
