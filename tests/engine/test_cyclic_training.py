"""Cyclic data parallelism with tensors: every bit is that of training one step late, every byte is counted."""

import pytest
import torch
from spared import slow
from test_compensation import Head, known
from training_cases import assert_same, counted_bytes, reference_of, train, workload_of

from rpbench.engine.backends.threads import CpuBackend
from rpbench.engine.reference import largest_difference
from rpbench.ir.checks.check import check
from rpbench.ir.partition import split_evenly, symmetric
from rpbench.ir.schedule import Schedule, Shape
from rpbench.registry import entry


def complete(p: int, rounds: int, num_steps: int, num_layers: int = 4, *, newest: bool = False) -> Schedule:
    shape = Shape(p, p, p * rounds, num_steps=num_steps)
    order = entry("cyclic_dp").build(shape, newest=newest).with_partition(symmetric(split_evenly(num_layers, p)))
    schedule = entry("cyclic_dp").lower(order, prefetch=1, newest=newest, stagger=2)
    check(schedule)
    return schedule


def one_late(p: int, window: int):
    """CDP-v1: (stage, microbatch) -> the version it reads."""
    return lambda stage, microbatch: max(0, microbatch // window - 1)


def newest_out(p: int, window: int):
    """CDP-v2: what is new of the last stages, of one more of them with each worker."""
    return lambda stage, mb: mb // window if stage + mb % window % p >= p - 1 else max(0, mb // window - 1)


@pytest.mark.parametrize("rule, newest", [(one_late, False), (newest_out, True)])
@pytest.mark.parametrize(
    "p, rounds, num_steps, real_time",
    [
        (2, 2, 3, False),
        (3, 1, 4, True),
        *(slow((p, rounds, 3, real)) for p, rounds in ((1, 2), (3, 2), (4, 2)) for real in (False, True)),
    ],
)
def test_every_bit_is_that_of_training_on_those_weights(rule, newest, p, rounds, num_steps, real_time):
    schedule = complete(p, rounds, num_steps, newest=newest)
    options = {"learning_rate": 1e-2, "clip_norm": 0.05}
    if real_time:
        with CpuBackend() as backend:
            run = train(schedule, workload_of(schedule), backend=backend, **options)
    else:
        run = train(schedule, workload_of(schedule), **options)
    window = p * rounds
    read, stage_of = rule(p, window), run.training.layout.stage_of
    assert_same(run, reference_of(run, lambda module, microbatch: read(stage_of(module), microbatch)))
    assert set(run.training.groups.values()) == {  # one sum that goes round, and each adds its own in this order
        (tuple(range(step * window, (step + 1) * window)),) for step in range(num_steps)
    }
    assert run.training.weights._copies == {}
    assert run.training.passes.num_left == 0


def test_the_engine_is_the_recurrence_of_cdp_v1():
    """theta_{t+1} = theta_t - gamma grad f(theta_{t-1}) on a parabola, the same for all of a step's microbatches."""
    rate, curvature, steps = 0.3, 0.8, 12
    schedule = complete(3, 1, steps, num_layers=3)
    run = train(schedule, known(schedule, Head(curvature)), name="sgd", learning_rate=rate, weight_decay=0.0)
    weights = [1.0]
    for step in range(steps):
        weights.append(weights[-1] - rate * curvature * weights[max(0, step - 1)])
    assert run.training.optimizer.masters[1, "weight"].tolist() == pytest.approx([weights[-1]] * 4, rel=1e-9)


@pytest.mark.parametrize("num_devices", [3, 4])
def test_the_engine_is_the_recurrence_of_cdp_v2(num_devices):
    """The parabola stands on the first stage, of which the last worker alone has the new weights."""
    rate, curvature, steps, others = 0.3, 0.8, 12, num_devices - 1
    schedule = complete(num_devices, 1, steps, num_layers=num_devices, newest=True)
    run = train(schedule, known(schedule, Head(curvature)), name="sgd", learning_rate=rate, weight_decay=0.0)
    weights = [1.0]
    for step in range(steps):
        mean = (weights[step] + others * weights[max(0, step - 1)]) / num_devices
        weights.append(weights[-1] - rate * curvature * mean)
    assert run.training.optimizer.masters[1, "weight"].tolist() == pytest.approx([weights[-1]] * 4, rel=1e-9)


def test_each_rule_trains_something_else_and_neither_on_the_newest_weights():
    found = []
    for newest in (False, True):
        schedule = complete(3, 1, 3, newest=newest)
        run = train(schedule, workload_of(schedule), learning_rate=1e-2)
        with pytest.raises(AssertionError):
            assert_same(run, reference_of(run, lambda module, microbatch: microbatch // 3))
        found.append(run.training.optimizer.masters)
    assert largest_difference(*found) > 1e-6


@pytest.mark.parametrize("newest", [False, True])
def test_what_is_copied_is_what_the_actions_count(newest):
    schedule = complete(4, 1, 3, newest=newest)
    found = train(schedule, workload_of(schedule, dtype=torch.bfloat16)).training.traffic.moved_bytes
    assert {lane for _, lane in found} == {"net"}
    assert +found == +counted_bytes(schedule)


def test_a_worker_holds_its_stage_and_the_copies_that_have_come():
    schedule = complete(4, 1, 2)
    training = train(schedule, workload_of(schedule), device_memory_bytes=10**9).training
    assert not any(held["weights from a peer"] for held in training.memory._held)
    for device in range(4):
        own = sum(p.nbytes for module in training.layout.backward[3 - device]
                  for p in training.workload.modules[module].parameters())  # fmt: skip
        assert training.memory._held[device]["weights"] == own


@pytest.mark.parametrize("words", [slow(((),)), ("schedule.newest=true",)])
@pytest.mark.slow
def test_one_step_late_on_the_command_line(words, rpbench):
    sizes = ("backend=cpu", "model=tiny_gpt", "model.num_layers=4", "num_devices=2", "num_microbatches=4")
    status, (row,), err = rpbench("schedule=cyclic_dp", *sizes, "num_steps=3", "verify=true", "dtype=float64", *words)
    assert (status, row["status"]) == (0, "ok"), err
    assert row["grad_max_abs_diff"] == row["weight_max_abs_diff"] == 0.0
    assert (row["staleness_steps"], row["versions_as_reference"]) == (1, True)
