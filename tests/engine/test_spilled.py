"""Boundary tensors that wait on the host and come back to their device: training as without, every byte counted."""

import pytest
import torch
from spared import slow
from training_cases import assert_same, counted_bytes, reference_of, train, workload_of

from rpbench.engine.backends.threads import CpuBackend
from rpbench.ir.checks.check import check
from rpbench.ir.partition import split_evenly, symmetric
from rpbench.ir.schedule import Schedule, Shape
from rpbench.registry import entry


def complete(p: int, layers: int, m: int, num_steps: int, delayed: float) -> Schedule:
    method = entry("greedysnake")
    order = method.build(Shape(p, layers, m, num_steps=num_steps), delayed=delayed)
    schedule = method.lower(order.with_partition(symmetric(split_evenly(4, layers))), prefetch=1, delayed=delayed)
    check(schedule)
    return schedule


@pytest.mark.parametrize("real_time", [slow(False), True])
@pytest.mark.parametrize("p, layers, m, delayed", [(1, 4, 3, 0.5), (2, 3, 4, 0.0), (3, 2, 3, 1.0)])
def test_every_bit_is_that_of_plain_training(p, layers, m, delayed, real_time):
    schedule = complete(p, layers, m, 3, delayed)
    if real_time:
        with CpuBackend() as backend:
            run = train(schedule, workload_of(schedule), backend=backend, learning_rate=1e-2)
    else:
        run = train(schedule, workload_of(schedule), learning_rate=1e-2)
    assert_same(run, reference_of(run))
    assert run.training.passes.num_left == 0


def test_what_is_copied_is_what_the_actions_count():
    schedule = complete(1, 4, 3, 2, 0.0)
    found = train(schedule, workload_of(schedule, dtype=torch.bfloat16)).training.traffic.moved_bytes
    assert found == counted_bytes(schedule)
