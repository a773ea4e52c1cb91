"""Sums of groups: slices that stay with their owners are trained bit for bit as in plain training, and counted."""

from collections import Counter

import pytest
import torch
from spared import slow
from training_cases import assert_same, counted_bytes, reference_of, train, uneven_costs, workload_of

from rpbench.engine.backends.threads import CpuBackend
from rpbench.engine.backends.virtual import VirtualBackend
from rpbench.engine.executor import ActionFailed, execute
from rpbench.engine.state.gradients import GroupedWindow
from rpbench.engine.training import Training
from rpbench.ir.action import Kind
from rpbench.ir.checks.check import check
from rpbench.ir.partition import split_evenly, symmetric
from rpbench.ir.schedule import Schedule, Shape
from rpbench.registry import entry


def complete(p: int, groups: int, rounds: int, num_steps: int) -> Schedule:
    shape = Shape(p, p, p * rounds, num_steps=num_steps)
    order = entry("tawpipe").build(shape, groups=groups).with_partition(symmetric(split_evenly(4, p)))
    schedule = entry("tawpipe").lower(order, prefetch=1, groups=groups)
    check(schedule)
    return schedule


@pytest.mark.parametrize(
    "p, groups, rounds, num_steps, real_time",
    [
        slow((4, 2, 1, 3, False)),
        (4, 2, 2, 2, True),
        slow((3, 1, 2, 2, False)),
        slow((3, 3, 1, 2, True)),
        slow((2, 2, 2, 2, False)),
        slow((4, 4, 1, 2, True)),
    ],
)
def test_every_bit_is_that_of_plain_training(p, groups, rounds, num_steps, real_time):
    schedule = complete(p, groups, rounds, num_steps)
    if real_time:
        with CpuBackend() as backend:
            run = train(schedule, workload_of(schedule), backend=backend, learning_rate=1e-2, clip_norm=0.05)
    else:
        run = train(schedule, workload_of(schedule), learning_rate=1e-2, clip_norm=0.05)
    assert_same(run, reference_of(run))
    assert run.training.weights._copies == {}


def test_the_order_of_a_sum_by_hand():
    """4 ranks in 2 groups: what the owner's group makes comes one by one, the other group's together."""
    training = train(complete(4, 2, 1, 2), workload_of(complete(4, 2, 1, 2))).training
    for stage in range(4):
        in_first = stage % 2 == 0
        assert training.groups[stage, 1] == (((0,), (1,), (2, 3)) if in_first else ((0, 1), (2,), (3,)))
        assert training.groups[stage, 2] == (((4,), (5,), (6, 7)) if in_first else ((4, 5), (6,), (7,)))


def test_what_is_copied_is_what_the_actions_count():
    schedule = complete(4, 2, 2, 2)
    found = train(schedule, workload_of(schedule, dtype=torch.bfloat16)).training.traffic.moved_bytes
    assert {lane for _, lane in found} == {"net"}
    assert +found == +counted_bytes(schedule)


def test_a_device_keeps_the_slice_it_owns():
    training = train(complete(4, 2, 1, 1), workload_of(complete(4, 2, 1, 1)), device_memory_bytes=10**9).training
    assert not any(held["weights from a peer"] for held in training.memory._held)
    for device, stage in enumerate((0, 2, 1, 3)):
        own = sum(p.nbytes for module in training.layout.backward[stage]
                  for p in training.workload.modules[module].parameters())  # fmt: skip
        assert training.memory._held[device]["weights"] == own


def run_without(kind: Kind, *, skip: int) -> Training:
    """A run in which one action of a kind does nothing."""
    schedule = complete(4, 2, 1, 1)
    training = Training(workload_of(schedule), schedule)
    seen: Counter[Kind] = Counter()

    def skipping(handler):
        def run(action, number, gate):
            seen[kind] += 1
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
    with pytest.raises(
        ActionFailed, match=r"the sum is handed on for microbatch \d, but that of \d is not in it|is taken"
    ):
        run_without(Kind.STORE, skip=1)


def test_a_window_adds_in_one_order_whoever_is_first():
    """(g0) + (g1) + (g2 + g3), where the second group comes first; floats for which the order shows."""
    values = {0: 1.0, 1: 1e16, 2: -1e16, 3: 1.0}
    window = GroupedWindow([([(0,)], 0), ([(1,)], 1), ([(2,), (3,)], 2)])
    for microbatch, value in values.items():
        window.add(microbatch, {(0, "w"): torch.tensor([value], dtype=torch.float64)})
    with pytest.raises(RuntimeError, match="handed on for microbatch 2, but that of 3 is not in it"):
        window.store([2], torch.clone)
    for microbatch in (3, 2, 1, 0):
        assert not window.is_complete
        window.store([microbatch], torch.clone)
    assert window.is_complete
    assert window.total[0, "w"].item() == 0.0  # one after another they are 1
