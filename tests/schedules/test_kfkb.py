"""kFkB: groups of microbatches as the unit of 1F1B; what a slow link costs, what it holds, which k times choose."""

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rpbench.cost.constant import constant_times
from rpbench.ir.checks.check import check
from rpbench.ir.costs import StageCosts
from rpbench.ir.partition import symmetric
from rpbench.ir.schedule import Schedule, Shape
from rpbench.registry import entry
from rpbench.sim.graph import build_graph
from rpbench.sim.longest_path import simulate
from rpbench.sim.memory import peak_in_flight

TIMES = st.fractions(Fraction(1, 10), 10, max_denominator=20)

# Worked out by hand from the rule (arXiv 2303.01675, abstract): 3 ranks, 6 microbatches, groups of 2.
GOLDEN = """
    0F0 0F1 0F2 0F3 0F4 0F5 0B0 0B1 0B2 0B3 0B4 0B5
    1F0 1F1 1F2 1F3 1B0 1B1 1F4 1F5 1B2 1B3 1B4 1B5
    2F0 2F1 2B0 2B1 2F2 2F3 2B2 2B3 2F4 2F5 2B4 2B5
"""


def build(p: int, m: int, k: int, costs: StageCosts | None = None, **options) -> Schedule:
    return entry("kfkb").build(Shape(p, p, m), costs, group_size=k, **options)


def bubble(schedule: Schedule, f=Fraction(1), b=Fraction(2), hop=Fraction(0)) -> Fraction:
    p, m = schedule.shape.num_ranks, schedule.shape.num_microbatches
    times = constant_times(p, p, forward_ms=f, input_grad_ms=b, weight_grad_ms=Fraction(0), hop_ms=hop)
    return simulate(schedule, times.table(symmetric((1,) * p))).makespan - m * (f + b)


def test_order():
    rows = [" ".join(map(str, build(3, 6, 2).compute(rank))) for rank in range(3)]
    assert rows == [line.strip() for line in GOLDEN.strip().splitlines()]


@settings(deadline=None, max_examples=20)
@given(p=st.integers(1, 6), groups=st.integers(1, 5), k=st.integers(1, 4), f=TIMES, b=TIMES)
def test_the_bubble_is_that_of_1f1b_and_k_times_as_much_is_held(p, groups, k, f, b):
    m = groups * k
    schedule = build(p, m, k)
    assert bubble(schedule, f, b) == (p - 1) * (f + b)
    assert peak_in_flight(build_graph(schedule)) == [min(k * (p - rank), m) for rank in range(p)]


@pytest.mark.parametrize("p, m", [(3, 7), (4, 6)])
def test_its_ends_are_1f1b_and_gpipe(p, m):
    assert build(p, m, 1).rows == entry("1f1b").build(Shape(p, p, m)).rows
    assert build(p, m, m).rows == entry("gpipe").build(Shape(p, p, m)).rows
    check(build(p, m, 4))  # the last group is smaller


# Bubble with F = 1, B = 2 and hops of 0, 1/2, 1 and 2; worked out apart from this code by relaxing the rule's rows.
SLOW_LINKS = {
    (4, 16, 1): (9, 23, 37, 65),
    (4, 16, 2): (9, 12, 15, 26),
    (4, 16, 4): (9, 12, 15, 21),
    (8, 32, 1): (21, 55, 89, 157),
    (8, 32, 2): (21, 28, 35, 62),
    (8, 32, 4): (21, 28, 35, 49),
}


@pytest.mark.parametrize("shape", SLOW_LINKS)
def test_what_groups_hide_of_a_slow_link(shape):
    hops = (Fraction(0), Fraction(1, 2), Fraction(1), Fraction(2))
    assert tuple(bubble(build(*shape), hop=hop) for hop in hops) == SLOW_LINKS[shape]


@settings(deadline=None, max_examples=15)
@given(p=st.integers(2, 5), groups=st.integers(2, 4), k=st.integers(2, 4), share=st.fractions(0, 1, max_denominator=8))
def test_groups_pay_for_hops_at_the_ends_alone(p, groups, k, share):
    """2(p - 1)c while c <= (k - 1)F, with B = 2F."""
    hop = share * (k - 1)
    assert bubble(build(p, groups * p * k, k), hop=hop) == 3 * (p - 1) + 2 * (p - 1) * hop


def costs(p: int, hop: float) -> StageCosts:
    forward, backward, none, ones = (1.0,) * p, (2.0,) * p, (0.0,) * p, (1.0,) * p
    return StageCosts(forward, backward, none, hop, ones, ones)


@pytest.mark.parametrize("hop, k", [(0.0, 1), (0.5, 2), (1.0, 2), (2.0, 4)])
def test_times_choose_the_smallest_group_that_ends_first(hop, k):
    assert build(4, 16, 0, costs(4, hop)).rows == build(4, 16, k).rows


def test_memory_bounds_the_choice():
    assert build(4, 16, 0, costs(4, 2.0), in_flight=8).rows == build(4, 16, 2).rows


@pytest.mark.parametrize(
    "shape, options, message",
    [
        (Shape(4, 8, 8), {}, "one stage on each rank, got 8 stages on 4 ranks; set chunks_per_device=1"),
        (Shape(4, 4, 8), {"group_size": -1}, "group_size=-1: a group holds at least 1"),
        (Shape(4, 4, 8), {"in_flight": 8}, "in_flight=8 with schedule.group_size=2: .* take schedule.group_size=0"),
        (Shape(4, 4, 8), {"group_size": 0, "in_flight": 3}, "at least as many .* 4"),
    ],
)
def test_what_cannot_be_is_refused(shape, options, message):
    with pytest.raises(ValueError, match=message):
        entry("kfkb").build(shape, **options)
