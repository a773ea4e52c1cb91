"""The compiled event loop against the plain one, where many devices share the memory of one host."""

import numpy as np
import pytest

from rpbench.cost.constant import constant_times
from rpbench.cost.machine import Machine
from rpbench.cost.sizes import model_bytes
from rpbench.cost.traffic import OptimizerTraffic, Traffic
from rpbench.ir.partition import Partition, split_evenly, symmetric
from rpbench.ir.schedule import Shape
from rpbench.plan.contest.charges import with_everything
from rpbench.registry import entry
from rpbench.sim.graph import build_graph
from rpbench.sim.links import simulate_links
from rpbench.sim.memory_loop import COMPILES
from rpbench.sim.memory_shares import MovingGraph
from rpbench.workload.architecture import Architecture

SIZES = model_bytes(Architecture("tiny", num_layers=8, hidden=64, heads=2, vocab=16, seq_len=4), 8)


@pytest.mark.skipif(not COMPILES, reason="without numba the plain loop runs in any case")
@pytest.mark.parametrize("name", ["1f1b", "chimera", "mobius", "zero_offload", "roundpipe"])
@pytest.mark.parametrize("memory", [None, 4e4, 1e6])
def test_both_loops_give_the_same_times(name, memory):
    cluster = Machine("x", 4, host_to_device_bytes_per_s=4e4, host_bytes_per_s=memory, transfer_latency_s=1e-4)
    found = entry(name)
    fused = found.separate_cuts
    cut = Partition((2, 2, 2, 1), (4, 3, 1), fused=True) if fused else symmetric(split_evenly(8, 4))
    shape = Shape(4, 4, 4, len(cut.backward), num_steps=2, fused=fused)
    order = found.build(shape, None, **found.options).with_partition(cut)
    schedule = with_everything(order, found, cluster, found.options, 1)
    graph = build_graph(schedule)
    times = constant_times(8, 4, forward_ms=1, input_grad_ms=1, weight_grad_ms=1)
    costs = Traffic(SIZES, cluster, boundaries=True, optimizer=OptimizerTraffic(40, 28, 1e7)).charged(
        schedule, times.table(cut, recompute_ahead=found.recompute_ahead)
    )
    fast, plain = MovingGraph(graph).simulate(costs), simulate_links(graph, costs, costs.transfer_time)
    for column in ("start", "main", "end", "exposed"):
        np.testing.assert_allclose(
            getattr(fast, column), np.asarray(getattr(plain, column), float), rtol=1e-9, atol=1e-9
        )


def test_a_root_complex_is_left_to_the_plain_loop():
    cluster = Machine(
        "x",
        2,
        host_to_device_bytes_per_s=4e4,
        host_bytes_per_s=1e5,
        devices_per_root_complex=2,
        root_complex_bytes_per_s=4e4,
    )
    found, cut = entry("1f1b"), symmetric((4, 4))
    order = found.build(Shape(2, 2, 2), None).with_partition(cut)
    schedule = with_everything(order, found, cluster, {}, 1)
    times = constant_times(8, 2, forward_ms=1, input_grad_ms=1, weight_grad_ms=1)
    costs = Traffic(SIZES, cluster, boundaries=True).charged(schedule, times.table(cut))
    graph = build_graph(schedule)
    assert list(MovingGraph(graph).simulate(costs).end) == list(simulate_links(graph, costs, costs.transfer_time).end)
