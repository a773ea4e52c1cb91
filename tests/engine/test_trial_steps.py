"""Trial steps: weights that are published, read, and taken back; the mean of two halves; bit for bit a plain loop."""

from dataclasses import replace

import pytest
import torch
from spared import slow
from test_compensation import Head, known
from test_replicated_training import complete
from training_cases import TINY, assert_same, counted_bytes, reference_of, train, uneven_costs, workload_of

from rpbench.engine.backends.threads import CpuBackend
from rpbench.engine.backends.virtual import VirtualBackend
from rpbench.engine.executor import execute
from rpbench.engine.reference import largest_difference, train_reference
from rpbench.engine.state.loss_scale import LossScaling
from rpbench.engine.state.ownership import Part
from rpbench.engine.state.updates.optimizer import KeptState, OptimizerSettings
from rpbench.engine.training import Settings, Training
from rpbench.ir.schedule import Schedule

ADAM, SGD = {"learning_rate": 1e-2}, {"name": "sgd", "momentum": 0.9, "learning_rate": 1e-2}


def acco(num_devices: int, num_stages: int = 3, each: int = 2, updates: int = 2) -> Schedule:
    """`each`: microbatches of a device in a half."""
    return complete("acco", num_devices, num_stages, each, 2 * updates)


@pytest.mark.parametrize(
    "devices, each, real_time, options, tied",
    [
        (2, 2, False, ADAM | {"clip_norm": 0.05, "num_warmup_steps": 2}, True),
        slow((3, 2, False, ADAM | {"clip_norm": 0.05, "num_warmup_steps": 2}, True)),
        slow((2, 1, True, SGD, False)),
        *(slow((p, 1, real, options, True)) for p in (1, 4) for real in (False, True) for options in (ADAM, SGD)),
        slow((2, 2, True, ADAM | {"clip_norm": 0.05}, True)),
    ],
)
def test_every_bit_is_that_of_the_plain_loop(devices, each, real_time, options, tied):
    schedule = acco(devices, each=each)
    workload = workload_of(schedule, replace(TINY, tied=tied))
    if real_time:
        with CpuBackend() as backend:
            run = train(schedule, workload, backend=backend, **options)
    else:
        run = train(schedule, workload, **options)
    assert_same(run, reference_of(run))
    assert run.training.weights._copies == {}
    assert not run.training.optimizer._kept


@pytest.mark.parametrize("dtype", [torch.bfloat16, slow(torch.float32)])
def test_in_other_types_too(dtype):
    schedule = acco(2, each=1)
    run = train(schedule, workload_of(schedule, dtype=dtype), **ADAM)
    assert_same(run, reference_of(run))


@pytest.mark.parametrize("num_devices", [1, 3])
def test_the_engine_is_the_recurrence(num_devices):
    """On a parabola c w^2 / 2: theta~ = theta - r c theta~, theta = theta - r c (theta~ + theta) / 2."""
    rate, curvature, updates = 0.3, 0.8, 6
    schedule = acco(num_devices, num_stages=4, each=1, updates=updates)
    run = train(schedule, known(schedule, Head(curvature)), name="sgd", learning_rate=rate, weight_decay=0.0)
    theta = tried = 1.0
    losses = []
    for _ in range(updates):
        losses += [curvature / 2 * 4 * tried**2, curvature / 2 * 4 * theta**2]
        tried, theta = theta - rate * curvature * tried, theta - rate * curvature * (tried + theta) / 2
    assert run.training.optimizer.masters[1, "weight"].tolist() == pytest.approx([theta] * 4, rel=1e-12)
    assert [run.training.mean_loss(step) for step in range(2 * updates)] == pytest.approx(losses, rel=1e-12)


def test_it_is_not_training_without_trials():
    """Neither on the same weights where every step stays, nor with first halves at the weights that stay."""
    schedule = acco(2, each=1)
    run = train(schedule, workload_of(schedule), **ADAM)
    training, window = run.training, schedule.shape.num_microbatches
    for other in (
        {"trials": False},
        {"read_version": lambda module, microbatch: microbatch // window // 2 * 2},  # theta_t in both halves
    ):
        with pytest.raises(AssertionError):
            assert_same(run, reference_of(run, **other))
    assert training.passes.num_left == 0


def test_a_trial_leaves_masters_moments_and_count_as_they_were():
    """Stopped behind its first round, nothing has been learned; behind its third, one update."""
    for rounds, counts in ((1, None), (3, 1.0)):
        schedule = complete("acco", 2, 3, 1, rounds)
        training = train(schedule, workload_of(schedule), **ADAM).training
        start = {place: training.workload.parameter(place).detach() for place in training.optimizer.masters}
        moments = training.optimizer.moments()
        if counts is None:
            assert largest_difference(training.optimizer.masters, start) == 0.0
            assert moments == {}
        else:
            assert largest_difference(training.optimizer.masters, start) > 1e-3
            assert {float(state["step"]) for state in moments.values()} == {counts}


def test_what_is_kept_gives_back_every_bit():
    masters = {(0, "w"): torch.randn(7), (0, "b"): torch.randn(3)}
    part = Part(None, masters, torch.optim.AdamW(list(masters.values()), lr=0.1))
    for _ in range(3):
        before = {place: master.clone() for place, master in masters.items()}
        states = {place: {k: v.clone() for k, v in part.optimizer.state[m].items()} for place, m in masters.items()
                  if m in part.optimizer.state}  # fmt: skip
        kept = KeptState(part)
        for master in masters.values():
            master.grad = torch.randn_like(master)
        part.optimizer.step()
        assert largest_difference(masters, before) > 0
        kept.give_back()
        assert largest_difference(masters, before) == 0.0
        assert states.keys() == {place for place, m in masters.items() if m in part.optimizer.state}
        for place, state in states.items():
            assert all(torch.equal(part.optimizer.state[masters[place]][name], state[name]) for name in state)
        part.optimizer.step()  # and on


@pytest.mark.slow
def test_a_run_that_goes_on_is_as_one_that_did_not_stop():
    """The trial's weights are in the checkpoint: the first round that follows reads them."""

    def run(updates: int, start=None) -> Training:
        schedule = acco(2, each=1, updates=updates)
        settings = Settings(OptimizerSettings(1e-2, clip_norm=0.5, num_warmup_steps=3), keep_state=True)
        training = Training(workload_of(schedule), schedule, settings, start)
        execute(training.program(uneven_costs(schedule)), training.handlers, VirtualBackend(uneven_costs(schedule)))
        return training

    straight, resumed = run(3).state(), run(1, run(2).state()).state()
    assert largest_difference(resumed.masters, straight.masters) == 0.0
    assert largest_difference(resumed.stale[1], straight.stale[1]) == 0.0
    assert largest_difference(straight.stale[1], {p: straight.masters[p] for p in straight.stale[1]}) > 1e-6
    for place, moments in straight.moments.items():
        assert largest_difference(resumed.moments[place], moments) == 0.0


def test_what_is_copied_is_what_the_actions_count():
    schedule = acco(3, each=1)
    found = train(schedule, workload_of(schedule, dtype=torch.bfloat16)).training.traffic.moved_bytes
    assert {lane for _, lane in found} == {"net"}
    assert sum(found.values()) == pytest.approx(sum(counted_bytes(schedule).values()), abs=200)


def test_scaled_losses_and_checkpoints_of_a_trial_are_refused():
    schedule = acco(2)
    with pytest.raises(ValueError, match=r"policy trial .* different scales; use dtype=bfloat16"):
        Training(workload_of(schedule), schedule, Settings(OptimizerSettings(loss_scaling=LossScaling())))
    odd = complete("acco", 2, 3, 1, 3)
    with pytest.raises(ValueError, match=r"policy trial over 3 steps leaves no state"):
        Training(workload_of(odd), odd, Settings(keep_state=True))


def test_the_reference_itself_is_the_recurrence():
    """Its own trials, on the parabola, without an engine beside it."""
    schedule = acco(1, num_stages=4, each=1, updates=4)
    run = train(schedule, known(schedule, Head(0.5)), name="sgd", learning_rate=0.4, weight_decay=0.0)
    theta = tried = 1.0
    for _ in range(4):
        tried, theta = theta - 0.2 * tried, theta - 0.2 * (tried + theta) / 2
    assert reference_of(run).masters[1, "weight"].tolist() == pytest.approx([theta] * 4, rel=1e-12)
    assert train_reference.__module__ == "rpbench.engine.reference"


@pytest.mark.parametrize("words", [("num_microbatches=4",), slow((("num_microbatches=8", "backend=virtual"),))])
@pytest.mark.slow
def test_on_the_command_line(words, rpbench):
    sizes = ("model=tiny_gpt", "model.num_layers=4", "num_devices=2", "num_steps=2", "verify=true", "dtype=float64")
    status, (row,), err = rpbench("schedule=acco", "backend=cpu", *sizes, *words)
    assert (status, row["status"]) == (0, "ok"), err
    assert row["grad_max_abs_diff"] == row["weight_max_abs_diff"] == 0.0
    assert (row["num_updates"], row["staleness_steps"], row["versions_as_reference"]) == (4, 1, True)


def test_an_odd_number_of_microbatches_is_refused_on_the_command_line(rpbench):
    status, rows, err = rpbench("schedule=acco", "num_devices=1", "num_microbatches=5")
    assert (status, rows) == (2, [])
    assert "num_microbatches=5: acco takes those of an update in 2 rounds" in err
    assert "take num_microbatches=6" in err
