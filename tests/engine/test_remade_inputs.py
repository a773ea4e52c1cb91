"""Inputs that are made again from one kept below: training as without, every byte counted, few inputs held."""

import pytest
import torch
from spared import slow
from training_cases import TINY, assert_same, reference_of, train, uneven_costs, workload_of

from rpbench.cost.footprint.sizes import model_bytes
from rpbench.cost.transfers import moved_bytes
from rpbench.engine.backends.threads import CpuBackend
from rpbench.engine.backends.virtual import VirtualBackend
from rpbench.engine.executor import execute
from rpbench.engine.training import Settings, Training
from rpbench.ir.checks.check import check
from rpbench.ir.partition import split_evenly, symmetric
from rpbench.ir.schedule import Schedule, Shape
from rpbench.registry import entry


def complete(p: int, stages: int, m: int, num_steps: int, interval: int) -> Schedule:
    method = entry("megatrain")
    order = method.build(Shape(p, stages, m, num_steps=num_steps), checkpoint_interval=interval)
    schedule = method.lower(
        order.with_partition(symmetric(split_evenly(4, stages))), prefetch=1, checkpoint_interval=interval
    )
    check(schedule)
    return schedule


@pytest.mark.parametrize(
    "p, stages, m, interval, real_time",
    [
        (1, 4, 2, 2, False),
        (1, 4, 1, 4, True),
        slow((1, 3, 2, 2, False)),
        slow((2, 4, 4, 2, True)),
    ],
)
def test_every_bit_is_that_of_plain_training(p, stages, m, interval, real_time):
    schedule = complete(p, stages, m, 3, interval)
    if real_time:
        with CpuBackend() as backend:
            run = train(schedule, workload_of(schedule), backend=backend, learning_rate=1e-2)
    else:
        run = train(schedule, workload_of(schedule), learning_rate=1e-2)
    assert_same(run, reference_of(run))
    assert run.training.passes.num_left == 0
    assert run.training.weights._copies == {}


def test_stages_of_several_layers_are_recomputed_layer_by_layer():
    """What lies inside a stage is made again with what lies between stages; a stage is empty, and one is the head."""
    for layers, interval in (((2, 1, 1), 2), ((1, 0, 3, 0), 2), ((0, 2, 2), 4)):
        method = entry("megatrain")
        order = method.build(Shape(1, len(layers), 2, num_steps=2), checkpoint_interval=interval)
        schedule = method.lower(order.with_partition(symmetric(layers)), prefetch=1, checkpoint_interval=interval)
        run = train(schedule, workload_of(schedule), recompute_grain="layer", learning_rate=1e-2)
        assert_same(run, reference_of(run))
        assert run.training.passes.num_left == 0


def test_what_is_copied_is_what_the_actions_count():
    schedule = complete(1, 4, 1, 2, 2)
    found = train(schedule, workload_of(schedule, dtype=torch.bfloat16)).training.traffic.moved_bytes
    sizes = model_bytes(TINY, 10)
    (counted,) = moved_bytes(schedule, sizes)
    assert found == {(0, "h2d"): counted["h2d LOAD:P"], (0, "d2h"): counted["d2h STORE:G"]}
    parameters = sum(part.weights for part in (*sizes.layers, sizes.embedding, sizes.head)) // 2
    assert counted == {"h2d LOAD:P": 2 * 6 * parameters, "d2h STORE:G": 2 * 2 * parameters}  # of two steps


def most_inputs(interval: int) -> int:
    """The most bytes of inputs that the device of a run held at a time."""
    schedule = complete(1, 4, 1, 1, interval)
    training = Training(workload_of(schedule), schedule, Settings(device_memory_bytes=10**9))
    held, change = [0], training.memory.hold

    def hold(tensor, what, **options):
        change(tensor, what, **options)
        held.append(training.memory._held[0]["inputs kept to recompute from"])

    training.memory.hold = hold
    costs = uneven_costs(schedule)
    execute(training.program(costs), training.handlers, VirtualBackend(costs))
    return max(held)


def test_fewer_inputs_are_held():
    """Blocks of 2: 1 of a block and 1 in it. One block: all 3 that are no tokens. The head's is left out."""
    one = 2 * TINY.seq_len * TINY.hidden * 8
    assert most_inputs(2) == 2 * one
    assert most_inputs(4) == 3 * one
