"""Plans timed in batches, against the simulator one by one."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nearby import nearby

from rpbench.cost.constant import constant_times
from rpbench.cost.published import published_partition, published_times
from rpbench.cost.table import LayerTimes
from rpbench.ir.partition import Partition, symmetric
from rpbench.ir.schedule import ScheduleError, Shape
from rpbench.passes.lower import split_backward
from rpbench.registry import entries, entry
from rpbench.sim import batch, kernels
from rpbench.sim.batch import PlanBatch, stage_sums
from rpbench.sim.graph import build_graph
from rpbench.sim.longest_path import simulate_graph

PLANS = 3


def one_by_one(graph, times, partitions, **ahead):
    makespans = []
    for partition in partitions:
        timeline = simulate_graph(
            graph, times.table(partition, **ahead, num_head_shards=graph.schedule.shape.num_head_shards)
        )
        ends = zip(timeline.start, timeline.end, strict=True)
        makespans.append(max((end for start, end in ends if end > start), default=0))
    return makespans


def together(graph, times, partitions, **ahead):
    cuts = [[getattr(p, way) for p in partitions] for way in ("forward", "backward")]
    return PlanBatch(graph, times, **ahead).makespans(*map(np.array, cuts))


def cuts(draw, layers, stages):
    """A random cut into stages that may be empty."""
    ends = sorted(draw(st.lists(st.integers(0, layers), min_size=stages - 1, max_size=stages - 1)))
    return tuple(stop - start for start, stop in zip([0, *ends], [*ends, layers], strict=True))


@st.composite
def batches(draw):
    """A registered schedule, random layer times, and a few partitions with the same numbers of stages."""
    name = draw(st.sampled_from(sorted(entries())))
    generator = entries()[name]
    p, layers = draw(st.integers(1, 4)), draw(st.integers(1, 9))
    m = draw(st.integers(1, 6))
    if generator.separate_cuts:
        up, down, fused = draw(st.integers(1, 4)), draw(st.integers(1, 5)), draw(st.integers(0, layers))
        below = layers - fused
        partitions = [Partition(cuts(draw, below, up), (*cuts(draw, below, down), fused), True) for _ in range(PLANS)]
    else:
        p, v, m = nearby(name, p, draw(st.integers(1, 3)), m)
        stages = p * v
        partitions = [symmetric(cuts(draw, layers, stages)) for _ in range(PLANS)]
    time = st.floats(0, 5)
    per_layer = [draw(st.lists(time, min_size=layers, max_size=layers)) for _ in range(5)]
    ends = {name: draw(time) for name in ("head_forward", "head_backward", "hop")}
    ends |= {"head_input_grad": draw(time), "head_weight_grad": draw(time)}
    ends |= {"input_grad": per_layer[3], "weight_grad": per_layer[4], "overlap_gain": draw(st.floats(0, 1))}
    if draw(st.booleans()):
        ends["speeds"] = tuple(draw(st.lists(st.floats(0.25, 4), min_size=p, max_size=p)))
    ahead = {name: draw(st.booleans()) for name in ("recompute_ahead", "fused_ahead")}
    shape = Shape(p, len(partitions[0].forward), m, len(partitions[0].backward), fused=partitions[0].fused)
    return build_graph(generator.build(shape)), LayerTimes(*per_layer[:3], **ends), partitions, ahead


@settings(deadline=None, max_examples=80)
@given(case=batches())
def test_a_batch_gives_the_makespans_of_single_simulations(case):
    graph, times, partitions, ahead = case
    found = together(graph, times, partitions, **ahead)
    assert found == pytest.approx(one_by_one(graph, times, partitions, **ahead), rel=1e-9, abs=1e-9)


@settings(deadline=None, max_examples=30)
@given(case=batches())
def test_the_plain_kernel_gives_the_same_bits_as_the_compiled_one(case):
    graph, times, partitions, ahead = case
    compiled = together(graph, times, partitions, **ahead)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "compiled", lambda kernel: kernel)
        plain = together(graph, times, partitions, **ahead)
    assert plain.tolist() == compiled.tolist()


@pytest.mark.parametrize("name", ["1f1b", "interleaved_1f1b", "roundpipe"])
def test_equal_layers_give_the_same_bits_as_a_single_simulation(name):
    partition, times, generator = (
        published_partition(name, "qwen3-1.7b"),
        published_times("qwen3-1.7b"),
        entry(name),
    )
    ahead = {"recompute_ahead": generator.recompute_ahead, "fused_ahead": partition.fused}
    shape = Shape(8, len(partition.forward), 16, len(partition.backward), fused=partition.fused)
    graph = build_graph(generator.build(shape))
    assert together(graph, times, [partition], **ahead).tolist() == one_by_one(graph, times, [partition], **ahead)


def test_more_plans_than_fit_side_by_side_are_timed_each():
    times = constant_times(9, 3, forward_ms=1, input_grad_ms=1, weight_grad_ms=1, recompute_ms=1, hop_ms=0.1)
    graph = build_graph(entry("1f1b").build(Shape(3, 3, 4)))
    partitions = [symmetric((i, j, 9 - i - j)) for i in range(10) for j in range(10 - i)] * 20
    assert len(partitions) > batch.BLOCK > batch.WIDTH
    found = together(graph, times, partitions)
    assert found.tolist() == one_by_one(graph, times, partitions)
    assert len(set(found.tolist())) > 10


def test_a_graph_that_fills_the_cache_is_timed_in_narrow_batches(monkeypatch):
    monkeypatch.setattr(batch, "ENDS_IN_CACHE", 1)
    times = constant_times(9, 3, forward_ms=1, input_grad_ms=1, weight_grad_ms=1, recompute_ms=1, hop_ms=0.1)
    graph = build_graph(entry("1f1b").build(Shape(3, 3, 4)))
    partitions = [symmetric((i, 5 - i, 4)) for i in range(6)] * 3
    assert len(partitions) > batch.LEAST_WIDTH
    assert together(graph, times, partitions).tolist() == one_by_one(graph, times, partitions)


def test_backward_in_two_pieces_is_timed_by_its_halves():
    times = constant_times(6, 3, forward_ms=2, input_grad_ms=1.5, weight_grad_ms=0.5, hop_ms=0.25)
    graph = build_graph(split_backward(entry("gpipe").build(Shape(3, 3, 4))))
    partitions = [symmetric(counts) for counts in ((2, 2, 2), (1, 2, 3), (0, 6, 0))]
    assert together(graph, times, partitions) == pytest.approx(one_by_one(graph, times, partitions), rel=1e-12)


def test_halves_of_backward_without_times_are_refused():
    times = LayerTimes([1.0] * 2, [0.0] * 2, [2.0] * 2)
    graph = build_graph(split_backward(entry("gpipe").build(Shape(2, 2, 2))))
    with pytest.raises(ScheduleError, match="no time is known for its halves"):
        PlanBatch(graph, times)


@pytest.mark.parametrize("p", [1, 2, 4])
def test_a_head_in_shares_takes_its_part_on_every_device_and_nothing_in_a_stage(p):
    """One microbatch runs through all layers and the head in p equal shares, one thing after another."""
    times = constant_times(8, 8, forward_ms=2, input_grad_ms=3, weight_grad_ms=1)
    times = replace(times, head_forward=4.0, head_backward=8.0)
    graph = build_graph(entry("vocab_parallel").build(Shape(p, p, 1)))
    assert together(graph, times, [symmetric((8 // p,) * p)]) == pytest.approx([8 * (2 + 3 + 1) + (4 + 8) / p])


def test_stage_sums_of_unequal_layers():
    sums = stage_sums([1, 10, 100, 1000], np.array([[1, 3], [4, 0], [0, 4], [2, 2]]))
    assert sums.tolist() == [[1, 1110], [1111, 0], [0, 1111], [11, 1100]]
