"""Transfers in time: the longest path where links are apart, fair shares where they are not."""

from dataclasses import replace
from math import inf

import pytest
from fairness import fair_rates
from hypothesis import given, settings
from hypothesis import strategies as st

from rpbench.cost.constant import constant_times
from rpbench.cost.footprint.sizes import model_bytes
from rpbench.cost.hardware.machine import Machine
from rpbench.cost.transfers import StageBytes, TransferTimes
from rpbench.ir.action import Action, Kind
from rpbench.ir.partition import Partition, symmetric
from rpbench.ir.schedule import Schedule, Shape
from rpbench.passes.lower import add_steps
from rpbench.passes.offload import offload, stream
from rpbench.registry import entry
from rpbench.sim.graph import build_graph
from rpbench.sim.longest_path import simulate_graph
from rpbench.sim.shared_links import simulate_links
from rpbench.workload.architecture import Architecture

SIZES = model_bytes(Architecture("tiny", num_layers=6, hidden=32, heads=2, vocab=64, seq_len=16), 32)


def setup(schedule: Schedule, cluster: Machine):
    cut = schedule.partition
    times = TransferTimes(StageBytes(cut, SIZES), cluster, 1000)
    layers = constant_times(6, 3, forward_ms=1.5, input_grad_ms=1, weight_grad_ms=2, recompute_ms=1.5)
    return build_graph(schedule), replace(layers.table(cut, recompute_ahead=True), transfer_time=times), times


def roundpipe(devices: int, microbatches: int, num_steps: int = 1, **options) -> Schedule:
    cut = Partition((3, 2), (2, 2, 1, 1), fused=True)
    shape = Shape(devices, 2, microbatches, 4, num_steps=num_steps, fused=True)
    return add_steps(entry("roundpipe").build(shape, **options).with_partition(cut))


@settings(deadline=None, max_examples=25)
@given(
    devices=st.integers(1, 5),
    microbatches=st.integers(1, 6),
    prefetch=st.integers(0, 3),
    activations=st.booleans(),
    pace=st.sampled_from([None, 1e6, 1e8, 1e10]),
    asynchronous=st.booleans(),
    num_steps=st.integers(1, 3),
)
def test_without_sharing_events_and_the_longest_path_agree(
    devices, microbatches, prefetch, activations, pace, asynchronous, num_steps
):
    order = roundpipe(devices, microbatches, num_steps, asynchronous=asynchronous)
    schedule = stream(order, prefetch=prefetch, activations=activations)
    cluster = Machine("x", devices, host_to_device_bytes_per_s=pace, transfer_latency_s=1e-6)
    graph, costs, times = setup(schedule, cluster)
    path, events = simulate_graph(graph, costs), simulate_links(graph, costs, times)
    assert events.end == pytest.approx(path.end, rel=1e-9, abs=1e-9)
    assert events.start == pytest.approx(path.start, rel=1e-9, abs=1e-9)
    assert events.exposed == pytest.approx(path.exposed, abs=1e-6)


def test_prefetch_hides_the_weights_and_without_it_every_visit_waits():
    """One device, weights of 1 s a stage, compute of 2 s a visit: only the first load shows."""
    schedule = Schedule(
        Shape(1, 2, 1), ((Action(Kind.F, 0, 0), Action(Kind.F, 1, 0), Action(Kind.B, 1, 0), Action(Kind.B, 0, 0)),)
    )
    schedule = schedule.with_partition(symmetric((3, 3)))
    order = replace(schedule, weights=entry("roundpipe").build(Shape(1, 1, 1)).weights)
    times = constant_times(6, 1, forward_ms=4000, input_grad_ms=4000, weight_grad_ms=0).table(symmetric((3, 3)))
    costs = replace(times, transfer_time=lambda payload: 1000 * float(payload.share) * (payload.lane == "h2d"))
    makespans = [
        float(simulate_graph(build_graph(stream(order, prefetch=prefetch, activations=False)), costs).makespan)
        for prefetch in (0, 1, 2)
    ]
    assert makespans == [8000 + 4 * 1000, 8000 + 1000, 8000 + 1000]


def replicas(devices: int) -> Schedule:
    rows = tuple((Action(Kind.F, 0, device), Action(Kind.B, 0, device)) for device in range(devices))
    return offload(Schedule(Shape(devices, 1, devices), rows).with_partition(symmetric((6,))))


def loaded_s(schedule: Schedule, cluster: Machine) -> list[float]:
    """When the weights have come to each device."""
    timeline = simulate_links(*setup(schedule, cluster))
    return [span.end / 1000 for span in timeline.spans() if span.action.kind is Kind.LOAD]


def test_devices_on_one_root_complex_share_it():
    schedule = replicas(4)
    alone = Machine("x", 4, host_to_device_bytes_per_s=1e6)
    one = loaded_s(schedule, alone)[0]
    pairs = replace(alone, devices_per_root_complex=2, root_complex_bytes_per_s=1e6)
    assert loaded_s(schedule, pairs) == pytest.approx([2 * one] * 4)
    wide = replace(pairs, root_complex_bytes_per_s=2e6)
    assert loaded_s(schedule, wide) == pytest.approx([one] * 4)
    memory = replace(alone, host_memory_bytes_per_s=1e6)
    assert loaded_s(schedule, memory) == pytest.approx([4 * one] * 4)


def test_links_without_a_pace_take_no_time_whatever_the_memory_does():
    assert loaded_s(replicas(3), Machine("x", 3, host_memory_bytes_per_s=1e6)) == [0.0] * 3


def test_fair_rates_fill_the_tightest_link_first():
    uses = {0: ["a", "hub"], 1: ["b", "hub"], 2: ["c", "hub"], 3: []}
    found = fair_rates(uses, {"a": 1.0, "b": 10.0, "c": 10.0, "hub": 9.0})
    assert found == {0: 1.0, 1: 4.0, 2: 4.0, 3: inf}


@given(
    st.dictionaries(st.integers(0, 9), st.sets(st.sampled_from("abcd")), max_size=8),
    st.fixed_dictionaries({link: st.floats(0.5, 9) for link in "abcd"}),
)
def test_no_link_carries_more_than_it_can_and_every_transfer_has_a_full_one(uses, capacity):
    rates = fair_rates(uses, capacity)
    load = {link: sum(rates[transfer] for transfer, links in uses.items() if link in links) for link in capacity}
    assert all(load[link] <= capacity[link] * (1 + 1e-9) for link in capacity)
    for transfer, links in uses.items():
        assert not links or any(load[link] >= capacity[link] * (1 - 1e-9) for link in links), transfer
