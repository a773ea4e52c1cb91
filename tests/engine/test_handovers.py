"""Weights and gradients that go from device to device: every bit is that of plain training, every byte is counted."""

from collections import Counter

import pytest
import torch
from spared import slow
from training_cases import assert_same, counted_bytes, reference_of, train, uneven_costs, workload_of

from rpbench.engine.backends.threads import CpuBackend
from rpbench.engine.backends.virtual import VirtualBackend
from rpbench.engine.executor import ActionFailed, execute
from rpbench.engine.training import Training
from rpbench.ir.action import Kind
from rpbench.ir.checks.check import check
from rpbench.ir.partition import split_evenly, symmetric
from rpbench.ir.schedule import Schedule, Shape
from rpbench.registry import entry


def complete(p: int, rounds: int, num_steps: int) -> Schedule:
    shape = Shape(p, p, p * rounds, num_steps=num_steps)
    order = entry("weipipe").build(shape).with_partition(symmetric(split_evenly(4, p)))
    schedule = entry("weipipe").lower(order, prefetch=1, buffers=4)
    check(schedule)
    return schedule


@pytest.mark.parametrize("real_time", [slow(False), True])
@pytest.mark.parametrize("p, rounds, num_steps", [slow((2, 2, 2)), (3, 2, 3), slow((4, 1, 2))])
def test_every_bit_is_that_of_plain_training(p, rounds, num_steps, real_time):
    schedule = complete(p, rounds, num_steps)
    if real_time:
        with CpuBackend() as backend:
            run = train(schedule, workload_of(schedule), backend=backend, learning_rate=1e-2, clip_norm=0.05)
    else:
        run = train(schedule, workload_of(schedule), learning_rate=1e-2, clip_norm=0.05)
    assert_same(run, reference_of(run))
    assert set(run.training.groups.values()) == {  # one after another, as the sum comes by
        (tuple(range(step * p * rounds, (step + 1) * p * rounds)),) for step in range(num_steps)
    }
    assert run.training.weights._copies == {}


def test_what_is_copied_is_what_the_actions_count():
    schedule = complete(3, 2, 2)
    found = train(schedule, workload_of(schedule, dtype=torch.bfloat16)).training.traffic.moved_bytes
    assert {lane for _, lane in found} == {"net"}
    assert +found == +counted_bytes(schedule)


def test_a_device_holds_its_slice_and_what_has_come():
    schedule = complete(4, 2, 1)
    training = train(schedule, workload_of(schedule), device_memory_bytes=10**9).training
    assert not any(held["weights from a peer"] for held in training.memory._held)
    for device in range(4):
        stage = -device % 4
        own = sum(p.nbytes for module in training.layout.backward[stage]
                  for p in training.workload.modules[module].parameters())  # fmt: skip
        assert training.memory._held[device]["weights"] == own


def run_without(kind: Kind, *, skip: int) -> Training:
    """A run in which one action of a kind does nothing."""
    schedule = complete(3, 2, 1)
    training = Training(workload_of(schedule), schedule)
    seen: Counter[Kind] = Counter()

    def skipping(handler):
        def run(action, number, gate):
            seen[kind] += action.object != "P" or kind is not Kind.FREE
            if seen[kind] != skip:
                handler(action, number, gate)

        return run

    handlers = dict(training.handlers) | {kind: skipping(training.handlers[kind])}
    execute(training.program(uneven_costs(schedule)), handlers, VirtualBackend(uneven_costs(schedule)))
    return training


def test_weights_that_have_not_come_are_an_error():
    with pytest.raises(ActionFailed, match=r"which is not on its device: no LOAD:P|KeyError"):
        run_without(Kind.LOAD, skip=1)


def test_a_sum_that_has_not_come_is_an_error():
    with pytest.raises(ActionFailed, match=r"the sum is handed on for microbatch \d, but that of \d is not in it"):
        run_without(Kind.STORE, skip=1)
