"""Orders by priority on a V: slot by slot by hand, within the room they are given, and where no rank can go on."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_tuned_orders import PUBLISHED, alike, measured

from baselines.zero_bubble.v_block import order_by_priority
from rpbench.ir.action import Kind
from rpbench.ir.checks.check import check
from rpbench.ir.schedule import Shape
from rpbench.registry import entry

# Two ranks and two microbatches by the rule, by hand, with room for 4 chunks, 2 of them of the lower stage.
#     slot       0   1   2   3   4   5   6   7   8   9
#     rank 0   0F0 0F1     3F0 3I0 3F1 3I1 0I0     0I1
#     rank 1       1F0 2F0 1F1 2F1 2I0 1I0 2I1 1I1
BY_HAND = """
    0F0 0F1 3F0 3I0 3F1 3I1 0I0 0I1
    1F0 2F0 1F1 2F1 2I0 1I0 2I1 1I1
"""


def test_order_of_two_ranks():
    orders = order_by_priority(2, 2, 4, 2)
    found = [" ".join(f"{stage}{kind.name}{microbatch}" for kind, stage, microbatch in row) for row in orders]
    assert found == [" ".join(line.split()) for line in BY_HAND.strip().splitlines()]


def test_a_rank_full_of_its_lower_chunk_lets_nobody_turn():
    """With all room for the lower chunk, no microbatch comes up again."""
    assert order_by_priority(3, 8, 2, 2) is None
    assert order_by_priority(3, 8, 3, 2) is not None


@settings(max_examples=40, deadline=None)
@given(p=st.integers(1, 8), m=st.integers(1, 20), limit=st.integers(2, 9))
def test_every_pass_comes_once_and_the_room_is_kept(p, m, limit):
    orders = order_by_priority(p, m, limit, limit - 1)
    assert orders is not None
    for rank, row in enumerate(orders):
        own = {rank, 2 * p - 1 - rank}
        assert sorted(row) == sorted((kind, stage, mb) for kind in (Kind.F, Kind.I) for stage in own for mb in range(m))
        held = 0
        for kind, _, _ in row:  # with every W as soon as can be
            held += 1 if kind is Kind.F else -1
            assert held <= limit


@pytest.mark.parametrize("p, m", [(2, 5), (5, 13), (8, 17), (8, 3)])
def test_v_min_by_priority_is_sound(p, m):
    schedule = entry("v_min").build(Shape(p, 2 * p, m, num_steps=2), by_priority=True)
    check(schedule)
    check(entry("v_min").build(Shape(p, 2 * p, m), by_priority=True), max_in_flight=min(2 * m, 2 * ((p + 4) // 3)))


def test_v_min_by_priority_with_measured_times():
    """The 6.2B model's times, 8 devices, 24 microbatches: the block's order idles .2613 of the span."""
    costs = alike(16, *PUBLISHED)
    span, _, held = measured(entry("v_min").build(Shape(8, 16, 24), costs, by_priority=True), costs)
    assert round(1 - 24 * 2 * sum(PUBLISHED[:3]) / span, 4) == 0.2507
    assert held == 8
