"""Replicas that train: plain training summed in device order, or on weights one step old, bit for bit."""

import pytest
import torch
from spared import slow, spared
from training_cases import assert_same, reference_of, train, workload_of

from rpbench.engine.backends.threads import CpuBackend
from rpbench.ir.checks.check import check
from rpbench.ir.partition import split_evenly, symmetric
from rpbench.ir.schedule import Schedule, Shape
from rpbench.registry import entry

METHODS = [
    ("data_parallel", {}),
    ("zero_2", {}),
    ("zero_3", {}),
    ("zero_3", {"offload": True, "reduce_each_microbatch": False}),
    ("zero_offload", {"share": 0.5}),
    ("zero_infinity", {}),
    ("mobius", {}),
]


def complete(name: str, num_devices: int, num_stages: int, each: int, num_steps: int, **options) -> Schedule:
    """A method with its steps and all it moves."""
    found = entry(name)
    shape = Shape(num_devices, num_stages, num_devices * each, num_steps=num_steps)
    order = found.build(shape, **options).with_partition(symmetric(split_evenly(4, num_stages)))
    schedule = found.lower(order, prefetch=1, **(found.options | options))
    check(schedule)
    return schedule


@pytest.mark.parametrize("name, options", spared(METHODS, lambda case: case[0] in ("zero_infinity", "mobius")))
@pytest.mark.parametrize("real_time", [False, slow(True)])
def test_a_method_with_all_it_moves_trains_as_plain_training_does(name, options, real_time):
    schedule = complete(name, 2, 4, 2, 3, **options)
    if real_time:
        with CpuBackend() as backend:
            run = train(schedule, workload_of(schedule), backend=backend)
    else:
        run = train(schedule, workload_of(schedule))
    assert_same(run, reference_of(run))


def test_the_gradients_of_a_device_are_added_before_those_of_all():
    schedule = complete("data_parallel", 3, 2, 2, 1)
    run = train(schedule, workload_of(schedule, dtype=torch.float32))
    assert set(run.training.groups.values()) == {((0, 1), (2, 3), (4, 5))}
    assert_same(run, reference_of(run))


@pytest.mark.parametrize("real_time", [slow(False), True])
def test_a_delayed_update_trains_on_weights_one_step_old(real_time):
    """Step k runs on the weights after max(k - 1, 0) steps: ZeRO-Offload, ATC'21, section 5.2, from the first step."""
    schedule = complete("zero_offload", 2, 3, 2, 8, delayed_update=True)
    if real_time:
        with CpuBackend() as backend:
            run = train(schedule, workload_of(schedule), backend=backend, learning_rate=1e-2)
    else:
        run = train(schedule, workload_of(schedule), learning_rate=1e-2)
    assert_same(run, reference_of(run, read_version=lambda module, microbatch: max(0, microbatch // 4 - 1)))
    with pytest.raises(AssertionError):
        assert_same(run, reference_of(run, read_version=lambda module, microbatch: microbatch // 4))
