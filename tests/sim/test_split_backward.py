"""Schedules that split backward, timed: bubbles in unit slots, and closed forms with fractions.

Unit slots (F = I = W = 1 for a chunk) of ZB-V and the building blocks are those of the schedulers released with Qi
et al., "Pipeline Parallelism with Controllable Memory", NeurIPS'24, and those of InterleavedZeroBubble of
torch.distributed.pipelining 2.13.
"""

from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rpbench.cost.constant import constant_times
from rpbench.ir.partition import symmetric
from rpbench.ir.schedule import Shape
from rpbench.registry import entry
from rpbench.sim.graph import build_graph
from rpbench.sim.longest_path import simulate_graph
from rpbench.sim.memory import peak_in_flight

times = st.fractions(Fraction(1, 10), 10, max_denominator=20)

# (schedule, p, m): makespan less work, longest device-local span less work, most chunks in flight.
UNIT_SLOTS = {
    ("interleaved_zb", 4, 8): (3, 3, 8),
    ("interleaved_zb", 8, 32): (7, 7, 16),
    ("zb_v", 4, 8): (3, 0, 8),
    ("zb_v", 6, 24): (5, 0, 12),
    ("zb_v", 8, 32): (7, 0, 16),
    ("v_min", 4, 8): (11, 11, 4),
    ("v_min", 6, 24): (17, 17, 6),
    ("v_min", 8, 32): (27, 27, 8),
    ("v_half", 4, 8): (5, 5, 6),
    ("v_half", 6, 24): (11, 11, 8),
    ("v_half", 8, 32): (17, 17, 10),
}


def bubbles(name, p, m, *, v=1, f=1, i=1, w=1, hop=0, **options):
    """Makespan and longest device-local span, both less the work of a device, and the most in flight.

    Times are those of one microbatch on a device's whole share.
    """
    stages = p * v
    layers = constant_times(stages, p, forward_ms=f, input_grad_ms=i, weight_grad_ms=w, hop_ms=hop)
    partition = symmetric((1,) * stages)
    graph = build_graph(entry(name).build(Shape(p, stages, m), **options).with_partition(partition))
    timeline = simulate_graph(graph, layers.table(partition))
    work, ends = m * (f + i + w), graph.columns.lane_start.tolist()
    spans = [max(timeline.end[a:b]) - min(timeline.start[a:b]) for a, b in pairwise(ends)]
    return timeline.makespan - work, max(spans) - work, max(peak_in_flight(graph))


@pytest.mark.parametrize("name, p, m", UNIT_SLOTS)
def test_bubbles_in_unit_slots(name, p, m):
    two = Fraction(2)
    assert bubbles(name, p, m, v=2, f=two, i=two, w=two) == UNIT_SLOTS[name, p, m]


@pytest.mark.parametrize("p, m, slots", [(2, 8, 1), (5, 24, 11), (8, 16, 25), (8, 32, 25), (4, 8, 11), (6, 24, 17)])
def test_v_min_by_priority_ends_earlier_where_the_block_leaves_room(p, m, slots):
    """In the room of the block, 2 * ((p + 4) // 3) chunks; another released scheduler takes 26 for 8 ranks."""
    two = Fraction(2)
    found = bubbles("v_min", p, m, v=2, f=two, i=two, w=two, by_priority=True)
    assert found == (slots, slots, 2 * ((p + 4) // 3))
    assert found <= bubbles("v_min", p, m, v=2, f=two, i=two, w=two)


@settings(deadline=None, max_examples=40)
@given(p=st.integers(1, 7), rounds=st.integers(2, 4), f=times, i=times, w=times)
def test_handcrafted_zero_bubble(p, rounds, f, i, w):
    """(p-1)(F+I-W) and (p-1)(F+I-2W) of the span, where F and I are not below W."""
    f, i, m = f + w, i + w, 2 * rounds * p
    assert bubbles("zb_h1", p, m, f=f, i=i, w=w)[1] == (p - 1) * (f + i - w)
    assert bubbles("zb_h2", p, m, f=f, i=i, w=w)[1] == (p - 1) * (f + i - 2 * w)


@settings(deadline=None, max_examples=40)
@given(p=st.integers(1, 7), m=st.integers(1, 20), f=times, i=times, w=times, base=st.sampled_from(["gpipe", "1f1b"]))
def test_2bp_takes_weight_gradients_out_of_the_bubble(p, m, f, i, w, base):
    assert bubbles("two_bp", p, m, f=f, i=i, w=w, base=base)[0] == (p - 1) * (f + i)


@settings(deadline=None, max_examples=25)
@given(p=st.integers(1, 6), v=st.integers(2, 4), rounds=st.integers(1, 3), time=times)
def test_interleaved_zero_bubble_with_equal_passes(p, v, rounds, time):
    """(p-1)(F+I-W)/v."""
    assert bubbles("interleaved_zb", p, rounds * p, v=v, f=time, i=time, w=time)[0] == (p - 1) * time / v


@settings(deadline=None, max_examples=25)
@given(p=st.integers(1, 8), more=st.integers(0, 12), time=times)
def test_v_placement_without_bubble(p, more, time):
    assert bubbles("zb_v", p, 2 * p - 1 + more, v=2, f=time, i=time, w=time)[:2] == ((p - 1) * time / 2, 0)


def test_v_min_with_measured_times():
    """The 6.2B model's times on every chunk, 8 devices, 24 microbatches: rate .2613 of the span."""
    f, i, w = 2 * 29.718, 2 * 29.444, 2 * 19.927
    _, span, _ = bubbles("v_min", 8, 24, v=2, f=f, i=i, w=w, hop=0.527)
    work = 24 * (f + i + w)
    assert round(span / (span + work), 4) == 0.2613
