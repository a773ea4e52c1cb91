"""Pipelined backpropagation: its order, its two formulas where everything is known, and its reference bit for bit."""

from fractions import Fraction

import pytest
import torch
from cases import build
from hypothesis import given, settings
from hypothesis import strategies as st
from test_compensation import Head, known
from torch import nn
from training_cases import TINY, assert_same, reference_of, train, workload_of

from baselines.asynchronous.pipelined_backprop import one_by_one
from rpbench.engine.backends.threads import CpuBackend
from rpbench.engine.reference import largest_difference
from rpbench.engine.state.updates.compensation import (
    Compensation,
    Delays,
    SpikeCompensatedSGD,
    check_compensation,
    spike_coefficients,
)
from rpbench.engine.state.updates.optimizer import OptimizerSettings
from rpbench.engine.state.weights import Weights
from rpbench.engine.training_checks import check_momentum
from rpbench.engine.workload import Workload
from rpbench.ir.analysis import Analysis
from rpbench.models.data import Batch
from rpbench.registry import entry
from rpbench.sim.graph import build_graph
from rpbench.sim.memory import peak_in_flight

NAME = "pipelined_backprop"
BOTH = [(spikes, foretells) for spikes in (False, True) for foretells in (False, True)]
REMEDIES = BOTH[1:]
SGD = {"name": "sgd", "momentum": 0.9, "learning_rate": 1e-2}


def order(devices: int, num_steps: int, *, foretells: bool = True, window: int = 1, **options):
    return build(NAME, devices, window, num_steps=num_steps, steps=True, weight_prediction=foretells, **options)


def compensation_of(spikes: bool, foretells: bool) -> Compensation:
    options = {"spike_compensation": spikes, "weight_prediction": foretells}
    return Compensation(**entry(NAME).compensation(**options))


# --- the order ----------------------------------------------------------------------------------------------------

# By the rule, by hand: stage s of 3 lets 3 - s microbatches in, then one for each that is back. What stands behind a
# pass is the version it reads, and how many steps a forecast looks ahead.
GOLDEN = """
    0F0@0 0F1@0+1 0F2@0+2 0B0@0 0F3@1+2 0B1@1 0F4@2+2 0B2@2 0B3@3 0B4@4
    1F0@0 1F1@0+1 1B0@0 1F2@1+1 1B1@1 1F3@2+1 1B2@2 1F4@3+1 1B3@3 1B4@4
    2F0@0 2B0@0 2F1@1 2B1@1 2F2@2 2B2@2 2F3@3 2B3@3 2F4@4 2B4@4
"""


def test_order_versions_and_horizons():
    schedule = build(NAME, 3, 1, num_steps=5, steps=True)
    analysis = Analysis(schedule)
    delays, rows, number = Delays(analysis), [], 0
    for _, _, row in schedule.items():
        words = []
        for action in row:
            if action.microbatch is not None:
                forward, _ = delays.horizons(NAME, action.stage, action.microbatch)
                ahead = f"+{forward}" if action.kind.name == "F" and forward else ""
                words.append(f"{action}@{analysis.versions.read[number]}{ahead}")
            number += 1
        rows.append(" ".join(words))
    assert rows == [line.strip() for line in GOLDEN.strip().splitlines()]
    assert delays.tau == [2, 1, 0]


@pytest.mark.parametrize("spikes, foretells", BOTH)
def test_one_version_is_kept_and_p_less_r_microbatches(spikes, foretells):
    schedule = order(4, 9, foretells=foretells, spike_compensation=spikes)
    assert Analysis(schedule).versions.live == (1, 1, 1, 1)
    assert peak_in_flight(build_graph(schedule)) == [4, 3, 2, 1]


def test_a_device_holds_one_forecast_at_a_time_and_none_in_the_end(monkeypatch):
    """Of a stage's weights, and of no other: the last stage is not late."""
    lent, most = set(), {}
    lend, take_back = Weights.lend, Weights.take_back

    def note_lent(self, module, number, values):
        lent.add((module, number))
        most[module] = max(most.get(module, 0), sum(other == module for other, _ in lent))
        lend(self, module, number, values)

    def note_back(self, module, number):
        lent.discard((module, number))
        take_back(self, module, number)

    monkeypatch.setattr(Weights, "lend", note_lent)
    monkeypatch.setattr(Weights, "take_back", note_back)
    run = train(order(4, 9), workload_of(order(4, 9)), compensation=compensation_of(True, True), **SGD)
    late = [module for stage in range(3) for module in run.training.layout.backward[stage]]
    assert most == dict.fromkeys(late, 1)
    assert not lent


# --- the formulas -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("delay", range(6))
@pytest.mark.parametrize("momentum", [Fraction(0), Fraction(1, 2), Fraction(9, 10)])
def test_a_late_impulse_catches_up_with_its_first_step(momentum, delay):
    """n steps after it came it has moved the weight as one without delay does n + D steps after it came."""
    a, b = spike_coefficients(momentum, delay)
    assert b + a / (1 - momentum) == 1 / (1 - momentum)
    for n in range(5):
        moved = b + a * sum(momentum**k for k in range(n + 1))
        assert moved == sum(momentum**k for k in range(n + delay + 1))


class Impulse(nn.Module):
    """A head through which every weight gets the microbatch's label as its gradient."""

    def forward(self, x, labels):
        return (x * labels.unsqueeze(-1)).sum() / labels.numel()


class Labels:
    """Microbatches of zeros; the labels of one of them are 1, of the others 0."""

    def __init__(self, when: int) -> None:
        self.when = when

    def microbatch(self, step, microbatch):
        return Batch(torch.zeros(2, 2, dtype=torch.int64), torch.full((2, 2), int(step == self.when)))


@pytest.mark.parametrize("spikes, foretells", BOTH)
def test_an_impulse_moves_a_weight_in_all_as_without_compensation(spikes, foretells):
    """eta / (1 - mu) but for what is still to come, mu^(n + 1) of it; on stage s of 4, D = 3 - s steps sooner."""
    when, after, rate, momentum = 5, 30, 2.0**-6, 0.5
    schedule = order(4, when + 1 + after, foretells=foretells, num_layers=4)
    workload = known(schedule, Head())
    workload = Workload([*workload.modules[:-1], Impulse()], Labels(when), 1)
    run = train(
        schedule, workload, compensation=compensation_of(spikes, foretells),
        name="sgd", momentum=momentum, learning_rate=rate, weight_decay=0.0,
    )  # fmt: skip
    for stage in range(4):
        missing = momentum ** (after + 1 + (3 - stage if spikes else 0))
        moved = rate * (1 - missing) / (1 - momentum)
        assert run.training.optimizer.masters[stage + 1, "weight"].tolist() == [1 - moved] * 4


@pytest.mark.parametrize("spikes, foretells", BOTH)
def test_the_engine_is_the_recurrence_written_down(spikes, foretells):
    """A parabola on the first of 4 stages: forward 3 steps before backward, which adds nothing of its own."""
    late, curvature, rate, momentum, steps = 3, 0.8, 0.05, 0.7, 40
    schedule = order(4, steps, foretells=foretells, num_layers=4)
    run = train(
        schedule, known(schedule, Head(curvature)), compensation=compensation_of(spikes, foretells),
        name="sgd", momentum=momentum, learning_rate=rate, weight_decay=0.0,
    )  # fmt: skip
    a, b = (momentum**late, (1 - momentum**late) / (1 - momentum)) if spikes else (1.0, 0.0)
    weights, moves, velocity = [1.0], [0.0], 0.0
    for step in range(steps):
        read = max(0, step - late)
        ahead = (step - read) * rate * moves[read] if foretells else 0.0
        gradient = curvature * (weights[read] - ahead)
        velocity = momentum * velocity + gradient
        moves.append(a * velocity + b * gradient)
        weights.append(weights[-1] - rate * moves[-1])
    assert run.training.optimizer.masters[1, "weight"].tolist() == pytest.approx([weights[-1]] * 4, rel=1e-9)


def stepped(optimizer: torch.optim.Optimizer, weight: torch.Tensor, gradients: torch.Tensor) -> torch.Tensor:
    optimizer.param_groups[0]["lr"] = 2.0**-5
    for gradient in gradients:
        weight.grad = gradient.clone()
        optimizer.step()
    return weight


@pytest.mark.parametrize("decay", [0.0, 0.125])
@pytest.mark.parametrize("delay, nesterov", [(0, False), (1, True)])
def test_late_by_no_step_it_is_momentum_and_by_one_step_nesterovs(delay, nesterov, decay):
    start, gradients = torch.randn(7, dtype=torch.float64), torch.randn(9, 7, dtype=torch.float64)
    one, other = start.clone(), start.clone()
    plain = torch.optim.SGD([one], lr=1.0, momentum=0.5, nesterov=nesterov, weight_decay=decay)
    late = SpikeCompensatedSGD([other], [delay], 0.5, decay)
    assert torch.equal(stepped(plain, one, gradients), stepped(late, other, gradients))


@given(st.floats(1e-4, 1), st.floats(0, 0.99), st.integers(1, 64))
def test_one_by_one_a_velocity_decays_as_fast_and_a_gradient_goes_as_far(rate, momentum, batch):
    single_rate, single = one_by_one(rate, momentum, batch)
    assert single**batch == pytest.approx(momentum)
    assert single_rate / (1 - single) == pytest.approx(rate / (1 - momentum) / batch)


def test_a_batch_of_one_changes_nothing_and_of_none_is_refused():
    assert one_by_one(0.1, 0.9, 1) == (pytest.approx(0.1), 0.9)
    with pytest.raises(ValueError, match=r"batch=0, momentum=0.9: a batch of at least 1"):
        one_by_one(0.1, 0.9, 0)


# --- training -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spikes, foretells", REMEDIES)
@settings(deadline=None, max_examples=2)
@given(data=st.data())
def test_every_bit_is_that_of_the_reference(spikes, foretells, data):
    devices, window, steps = (data.draw(st.integers(1, top)) for top in (5, 3, 6))
    schedule = order(devices, steps, foretells=foretells, window=window)
    run = train(
        schedule,
        workload_of(schedule),
        compensation=compensation_of(spikes, foretells),
        recompute_grain=data.draw(st.sampled_from(["stage", "layer"])),
        **SGD,
        **data.draw(st.sampled_from([{}, {"clip_norm": 0.05}, {"num_warmup_steps": 3, "weight_decay": 0.1}])),
    )
    assert_same(run, reference_of(run))
    assert run.training.passes.num_left == 0


@pytest.mark.parametrize("spikes, foretells", [(True, True)])
def test_on_threads_too(spikes, foretells):
    schedule = order(3, 7, foretells=foretells)
    with CpuBackend() as backend:
        run = train(
            schedule, workload_of(schedule), backend=backend, compensation=compensation_of(spikes, foretells), **SGD
        )
    assert_same(run, reference_of(run))


def test_on_one_device_nothing_is_late_and_it_is_plain_momentum():
    schedule = order(1, 6)
    plain = build("gpipe", 1, 1, num_steps=6, steps=True, chunks=1)
    run = train(schedule, workload_of(schedule), compensation=compensation_of(True, True), **SGD)
    assert Delays(Analysis(schedule)).tau == [0]
    expected = train(plain, workload_of(plain), **SGD).training.optimizer.masters
    assert largest_difference(run.training.optimizer.masters, expected) == 0.0


def test_each_remedy_trains_something_else():
    found = []
    for spikes, foretells in BOTH:
        schedule = order(3, 7, foretells=foretells)
        compensation = compensation_of(spikes, foretells)
        found.append(train(schedule, workload_of(schedule, TINY), compensation=compensation, **SGD))
    masters = [run.training.optimizer.masters for run in found]
    assert all(largest_difference(one, other) > 1e-6 for one in masters for other in masters if one is not other)


# --- what is refused ----------------------------------------------------------------------------------------------

SIZES = ("backend=virtual", "model=tiny_gpt", "model.num_layers=4", "num_devices=2", "num_microbatches=4")


@pytest.mark.parametrize(
    "words, said",
    [
        ((), "optimizer=adamw optimizer.momentum=0.0: spike_compensation and weight_prediction of pipelined_backprop"),
        (
            ("optimizer=sgd", "schedule.weight_prediction=false"),
            "use optimizer=sgd optimizer.momentum=0.9, or schedule.spike_compensation=false\n",
        ),
        (("optimizer=sgd", "optimizer.momentum=0.9", "model.tied=true"), "set model.tied=false"),
        (("optimizer=sgd", "optimizer.momentum=0.9", "recompute=none"), "reads other weights than its forward"),
        (("schedule.spike_compensation=2",), "schedule.spike_compensation=2: pipelined_backprop takes true or false"),
    ],
)
def test_what_cannot_be_is_refused_with_a_way_out(words, said, rpbench, tmp_path):
    status, rows, err = rpbench(f"schedule={NAME}", *SIZES, *words)
    assert (status, rows) == (2, [])
    assert said in err
    assert not list(tmp_path.rglob("events.jsonl"))


@pytest.mark.parametrize("words", [("optimizer=sgd", "optimizer.momentum=0.9"), ("schedule.spike_compensation=false",
                         "schedule.weight_prediction=false")])  # fmt: skip
def test_what_is_said_to_help_does(words, rpbench):
    status, (row,), err = rpbench(f"schedule={NAME}", *SIZES, *words, "verify=true", "dtype=float64")
    assert (status, row["status"]) == (0, "ok"), err
    assert row["grad_max_abs_diff"] == row["weight_max_abs_diff"] == 0.0
    assert (row["weight_versions"], row["staleness_steps"]) == (1, 1)


def test_spike_compensation_takes_an_order_that_reads_what_is_newest():
    flushed = build("1f1b", 2, 2)
    with pytest.raises(ValueError, match=r"policy latest, 1f1b has flush; use schedule=pipelined_backprop"):
        check_compensation(flushed, Compensation(spike_compensation=True), has_tied=False)
    check_momentum(Compensation(), OptimizerSettings())
    check_momentum(Compensation("spectrain"), OptimizerSettings())
