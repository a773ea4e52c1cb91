"""Profiling on the engine, and the same work without a pipeline."""

import pytest
from cases import build
from training_cases import TINY, assert_same, reference_of, train, workload_of

from rpbench.cost.table import CostTable
from rpbench.engine.measure.layer_times import side_by_side, time_layers
from rpbench.engine.training import Settings
from rpbench.ir.action import Kind
from rpbench.ir.partition import parse
from rpbench.sim.longest_path import simulate


def test_every_layer_gets_its_times():
    workload = workload_of(build("1f1b", 2, 2, num_layers=TINY.num_layers))
    times = time_layers(workload, Settings(), 2, microbatches_per_device=1)
    assert times.num_layers == len(times.recompute) == len(times.backward) == len(times.step) == TINY.num_layers
    for found in (*times.forward, *times.recompute, *times.backward, *times.step, times.head_forward, times.head_step):
        assert 0 < found < 1
    assert all(not parameter.grad for layer in workload.modules for parameter in layer.parameters())


@pytest.mark.parametrize("cut", ["2-2", "1-2|2-1-1*"])
def test_side_by_side_nobody_waits_and_training_is_the_same(cut):
    schedule = side_by_side(parse(cut), 2, 4, 3)
    run = train(schedule, workload_of(schedule))
    assert_same(run, reference_of(run))
    costs = CostTable({kind: run_of(3) for kind in (Kind.F, Kind.B, Kind.FB)})
    timeline = simulate(schedule, costs)
    assert timeline.busy(0) == timeline.busy(1) == timeline.makespan


def run_of(stages):
    from rpbench.cost.table import Work

    return tuple(Work(1.0 + stage) for stage in range(stages))
