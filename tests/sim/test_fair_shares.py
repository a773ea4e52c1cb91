"""The event loop of shared links: its rates are fair, and compiled it gives the same bits as plain."""

from math import inf

import numpy as np
import pytest
from fairness import fair_rates
from hypothesis import given
from hypothesis import strategies as st

from rpbench.cost.charges import with_everything
from rpbench.cost.constant import constant_times
from rpbench.cost.footprint.sizes import model_bytes
from rpbench.cost.hardware.machine import Machine
from rpbench.cost.transfers import OptimizerTraffic, Traffic
from rpbench.ir.partition import Partition, split_evenly, symmetric
from rpbench.ir.schedule import Shape
from rpbench.registry import entry
from rpbench.sim.fair_shares import PARTS, Queues, Servers, Shared, run_events, share
from rpbench.sim.graph import build_graph
from rpbench.sim.kernels import compiled
from rpbench.sim.shared_links import MovingGraph, simulate_links
from rpbench.workload.architecture import Architecture

SIZES = model_bytes(Architecture("tiny", num_layers=8, hidden=64, heads=2, vocab=16, seq_len=4), 8)


@given(
    flows=st.lists(st.tuples(st.one_of(st.floats(0.1, 100), st.just(inf)), st.integers(-1, 2)), min_size=1, max_size=9),
    capacity=st.floats(0.1, 200),
    each=st.floats(0.1, 50),
)
def test_rates_are_those_of_max_min_fairness(flows, capacity, each):
    """One memory for all but those with complex -1, which use no shared link; links of complexes below it."""
    num = len(flows)
    pace, below = map(list, zip(*flows, strict=True))
    memory = [0 if way >= 0 else -1 for way in below]
    servers = Servers(pace, memory, [way if way > 0 else -1 for way in below], [False] * num, [0.0] * num)
    queues, rates = Queues([], [], [0] * num, [1] * num), [0.0] * num
    links = [capacity, each, each]
    share(queues, servers, Shared(links, links, [0.0] * 3, [0] * 3, [0.0] * 3), rates)
    uses = {
        number: [number, *(["memory"] if way >= 0 else []), ("complex", way)] for number, (_, way) in enumerate(flows)
    }
    links = {number: limit for number, limit in enumerate(pace) if limit != inf}
    links |= {"memory": capacity, ("complex", 1): each, ("complex", 2): each}
    assert dict(enumerate(rates)) == pytest.approx(fair_rates(uses, links))


@pytest.mark.parametrize("name", ["1f1b", "chimera", "mobius", "zero_offload", "roundpipe"])
@pytest.mark.parametrize(
    "shared",
    [
        {"host_bytes_per_s": 4e4},
        {"host_bytes_per_s": 1e6},
        {"host_bytes_per_s": 6e4, "devices_per_root_complex": 2, "root_complex_bytes_per_s": 4e4},
        {"devices_per_root_complex": 4, "root_complex_bytes_per_s": 5e4},
    ],
)
def test_compiled_and_plain_give_the_same_bits(name, shared):
    cluster = Machine("x", 4, host_to_device_bytes_per_s=4e4, transfer_latency_s=1e-4, **shared)
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
    assert compiled(run_events, *PARTS, allocates=False) is not run_events
    for column in ("start", "main", "end", "exposed"):
        assert np.array_equal(getattr(fast, column), getattr(plain, column)), column
