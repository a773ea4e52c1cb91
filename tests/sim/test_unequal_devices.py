"""Devices of unequal speed: everything that times work agrees on what that means."""

from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nearby import nearby

from rpbench.config.choices import ConfigError
from rpbench.config.loading import load
from rpbench.cost.hardware.machine import Machine
from rpbench.cost.table import LayerTimes
from rpbench.ir.action import Kind
from rpbench.ir.checks.check import check
from rpbench.ir.costs import StageCosts
from rpbench.ir.partition import Partition, symmetric
from rpbench.ir.schedule import Shape
from rpbench.registry import entries, entry
from rpbench.run.assemble import assemble
from rpbench.sim.events import RULES, deal
from rpbench.sim.graph import build_graph
from rpbench.sim.longest_path import simulate, simulate_graph
from rpbench.sim.memory import peak_in_flight

NAMES = sorted(entries())
SPEEDS = st.fractions(Fraction(1, 4), 4, max_denominator=8)


def cell(name: str, speeds: tuple) -> tuple:
    """A schedule of about three devices and six microbatches, its partition and layer times as fractions."""
    if entry(name).separate_cuts:
        p, partition, m = 3, Partition((2, 1), (1, 2, 1), fused=True), 6
    else:
        p, v, m = nearby(name, 3, 2, 6)
        partition = symmetric((1,) * (p * v))
    layers = [Fraction(3 + layer % 3, 2) for layer in range(partition.num_layers)]
    times = LayerTimes(
        layers, layers, [2 * time for time in layers], Fraction(1), Fraction(2), layers, layers, Fraction(1),
        Fraction(1), hop=Fraction(1, 5), speeds=speeds,
    )  # fmt: skip
    shape = Shape(p, len(partition.forward), m, len(partition.backward), fused=partition.fused)
    return entry(name).build(shape).with_partition(partition), partition, times


@pytest.mark.parametrize("name", NAMES)
def test_equal_speeds_change_nothing(name):
    schedule, partition, times = cell(name, ())
    p = schedule.shape.num_ranks
    plain = simulate(schedule, times.table(partition, num_head_shards=schedule.shape.num_head_shards))
    same = simulate(
        schedule,
        replace(times, speeds=(Fraction(1),) * p).table(partition, num_head_shards=schedule.shape.num_head_shards),
    )
    assert (plain.start, plain.main, plain.end) == (same.start, same.main, same.end)
    twice = simulate(
        schedule,
        replace(times, speeds=(Fraction(2),) * p, hop=times.hop / 2).table(
            partition, num_head_shards=schedule.shape.num_head_shards
        ),
    )
    assert [end / 2 for end in plain.end] == twice.end


@pytest.mark.parametrize("name", NAMES)
def test_a_slow_device_takes_longer_over_all_it_does(name):
    schedule, partition, times = cell(name, ())
    p = schedule.shape.num_ranks
    speeds = tuple(Fraction(1, 3) if device == 1 else Fraction(1) for device in range(p))
    slow = simulate(
        schedule, replace(times, speeds=speeds).table(partition, num_head_shards=schedule.shape.num_head_shards)
    )
    plain = simulate(schedule, times.table(partition, num_head_shards=schedule.shape.num_head_shards))
    for before, after in zip(plain.spans(), slow.spans(), strict=True):
        factor = 3 if after.device == 1 else 1
        assert after.end - after.start == factor * (before.end - before.start)


@settings(deadline=None, max_examples=20)
@given(speeds=st.lists(SPEEDS, min_size=4, max_size=4), m=st.integers(4, 9))
def test_speeds_of_bound_stages_are_stages_of_other_lengths(speeds, m):
    """1F1B and GPipe with stage s on device s: the same makespan as equal devices whose stages take as long."""
    layers, stretched = [Fraction(1)] * 4, [1 / speed for speed in speeds]
    for name in ("1f1b", "gpipe"):
        schedule = entry(name).build(Shape(4, 4, m))
        found = LayerTimes(layers, [0] * 4, layers, speeds=tuple(speeds)).table(symmetric((1,) * 4))
        expected = LayerTimes(stretched, [0] * 4, stretched).table(symmetric((1,) * 4))
        assert simulate(schedule, found).makespan == simulate(schedule, expected).makespan


# --- work that goes to whoever is free ----------------------------------------------------------------------


def test_dynamic_dispatch_gives_a_slow_device_less():
    partition = Partition((2, 2, 2, 1), (1,) * 8, fused=True)
    times = LayerTimes([1.0] * 8, [1.0] * 8, [2.0] * 8, speeds=(1.0, 1.0, 0.25, 1.0))
    schedule = entry("roundpipe").build(Shape(4, 4, 24, 8, fused=True), round_size=4).with_partition(partition)
    costs = times.table(partition)
    makespans = {}
    for rule in RULES:
        dealt = deal(schedule, costs, rule)
        check(dealt)
        makespans[rule] = simulate(dealt, costs).makespan
        if rule == "dynamic":
            counts = [len(dealt.compute(device)) for device in range(4)]
    assert makespans["dynamic"] < makespans["earliest_free"] <= makespans["round_robin"]
    assert counts[2] < min(counts[0], counts[1], counts[3]) / 2


# --- warm-up by times ---------------------------------------------------------------------------------------


def stage_costs(forward, backward, hop) -> StageCosts:
    half = tuple(time / 2 for time in backward)
    ones = (1.0,) * len(half)
    return StageCosts(tuple(forward), half, half, hop, ones, ones)


def timed(schedule, forward, backward, hop) -> float:
    p = len(forward)
    return simulate(schedule, LayerTimes(forward, [0] * p, backward, hop=hop).table(symmetric((1,) * p))).makespan


def test_on_equal_devices_with_free_links_it_is_1f1b():
    for p, m in ((1, 1), (3, 2), (4, 9), (16, 64)):
        assert entry("adaptive_1f1b").build(Shape(p, p, m)).rows == entry("1f1b").build(Shape(p, p, m)).rows


def test_the_name_of_before_is_answered_with_the_one_of_now():
    with pytest.raises(ValueError, match="schedule=harp is called schedule=adaptive_1f1b now: the rule is ours"):
        entry("harp")


def test_hops_are_hidden_as_the_eager_order_hides_them():
    """F = 1, B = 2, p = 8, m = 32: bubbles of 55 and 89 under 1F1B, 28 and 35 with depths 2(p - s) - 1."""
    forward, backward = [1.0] * 8, [2.0] * 8
    for hop, plain, eager in ((0.0, 21, 21), (0.5, 55, 28), (1.0, 89, 35)):
        found = entry("adaptive_1f1b").build(Shape(8, 8, 32), stage_costs(forward, backward, hop))
        assert timed(entry("1f1b").build(Shape(8, 8, 32)), forward, backward, hop) - 96 == pytest.approx(plain)
        assert timed(found, forward, backward, hop) - 96 == pytest.approx(eager)


@settings(deadline=None, max_examples=25)
@given(
    speeds=st.lists(st.sampled_from([0.5, 1.0, 1.0, 2.0]), min_size=1, max_size=7),
    m=st.integers(1, 24),
    hop=st.sampled_from([0.0, 0.2, 0.6]),
)
def test_it_is_never_slower_than_1f1b_and_never_deeper_than_the_eager_order(speeds, m, hop):
    p, forward, backward = len(speeds), [1 / speed for speed in speeds], [2 / speed for speed in speeds]
    schedule = entry("adaptive_1f1b").build(Shape(p, p, m), stage_costs(forward, backward, hop))
    check(schedule)
    plain = entry("1f1b").build(Shape(p, p, m))
    assert timed(schedule, forward, backward, hop) <= timed(plain, forward, backward, hop) * (1 + 1e-9)
    for rank, peak in enumerate(peak_in_flight(build_graph(schedule))):
        assert min(p - rank, m) <= peak <= min(2 * (p - rank) - 1, m)


# --- from the command line ----------------------------------------------------------------------------------


def test_the_cluster_says_how_fast_devices_are():
    found = assemble(
        load(["schedule=adaptive_1f1b", "num_devices=3", "cluster.device_speeds=[1,1,0.5]", "num_microbatches=6"])
    )
    assert found.costs.speeds == (1, 1, 0.5)
    kinds = [(members[0][0], device) for members, device in device_slots(found)]
    assert (Kind.F, 2) in kinds
    equal = assemble(load(["num_devices=3", "cluster.device_speeds=[1,1,1]"]))
    assert equal.costs.speeds == ()


def device_slots(found):
    graph = build_graph(found.schedule)
    return [(graph.slots[slot], device) for slot, device in graph.slots_on_devices[1]]


def test_greedy_and_search_give_a_slow_device_fewer_layers():
    request = ["num_devices=4", "cluster.device_speeds=[1,0.5,1,0.25]", "+model.num_layers=22", "num_microbatches=8"]
    for method in ("greedy", "search"):
        for name in ("1f1b", "adaptive_1f1b"):
            found = assemble(load([*request, f"schedule={name}", f"partition={method}"]))
            layers = found.choice.partition.forward
            assert min(layers[0], layers[2]) > layers[1] > layers[3]
            even = assemble(load([*request, f"schedule={name}"]))
            graphs = build_graph(found.schedule), build_graph(even.schedule)
            makespans = [simulate_graph(g, a.costs).makespan for g, a in zip(graphs, (found, even), strict=True)]
            assert makespans[0] < makespans[1] / 2


@pytest.mark.parametrize(
    "override, message",
    [
        ("cluster.device_speeds=[1,2]", "has 2 numbers, the run 8 devices: give one for each"),
        ("cluster.device_speeds=[]", "a list of finite numbers above 0"),
        ("cluster.device_speeds=[1,0,1,1,1,1,1,1]", "a list of finite numbers above 0"),
        ("cluster.device_speeds=fast", "a list of finite numbers above 0"),
        ("cost.overlap_gain=1.5", "overlap_gain=1.5: a fraction, from 0"),
    ],
)
def test_speeds_that_cannot_be_are_refused(override, message):
    with pytest.raises((ConfigError, ValueError), match=message):
        assemble(load([override]))


def test_a_cluster_keeps_its_speeds():
    assert Machine("two", device_speeds=[1, 2.5]).speeds_of(2) == (1, 2.5)
    assert Machine("two").speeds_of(2) == ()
