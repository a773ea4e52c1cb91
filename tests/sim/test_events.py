"""Dealing streamed work anew: the artifact's rule, and the work-conserving pool."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rpbench.cost.table import LayerTimes
from rpbench.ir.partition import Partition, symmetric
from rpbench.ir.schedule import Shape
from rpbench.passes.lower import add_steps
from rpbench.registry import entry
from rpbench.sim.events import _Floor, deal
from rpbench.sim.longest_path import simulate
from tests.sim.conftest import MODELS


@pytest.mark.parametrize("model", MODELS)
def test_earliest_free_and_plain_rotation_agree_on_the_published_plans(model, published_cell):
    schedule, costs = published_cell("roundpipe", model)
    assert deal(schedule, costs, "earliest_free") == schedule


@st.composite
def streamed(draw):
    layers = draw(st.integers(1, 8))
    times = [draw(st.lists(st.floats(0.1, 3), min_size=layers, max_size=layers)) for _ in range(3)]
    ones = (1,) * layers
    partition = Partition(ones, (*ones, 0), fused=True)
    p, m = draw(st.integers(1, 5)), draw(st.integers(1, 9))
    size = draw(st.integers(1, m))
    shape = Shape(p, layers, m, layers + 1, fused=True, num_steps=draw(st.integers(1, 4)))
    order = entry("roundpipe").build(shape, round_size=size, asynchronous=draw(st.booleans()))
    schedule = order.with_partition(partition)
    head = draw(st.floats(0.1, 9))
    costs = LayerTimes(*times, head_forward=head, head_backward=2 * head, hop=draw(st.floats(0, 0.5)))
    ahead = {name: draw(st.booleans()) for name in ("recompute_ahead", "fused_ahead")}
    return schedule, costs.table(partition, **ahead)


@settings(deadline=None, max_examples=60)
@given(cell=streamed(), rule=st.sampled_from(["earliest_free", "dynamic"]))
def test_dealing_keeps_every_action_and_can_run(cell, rule):
    schedule, costs = cell
    dealt = deal(schedule, costs, rule)
    before = Counter(action for _, _, row in schedule.items() for action in row)
    assert Counter(action for _, _, row in dealt.items() for action in row) == before
    assert simulate(add_steps(dealt), costs).makespan > 0  # no round before the weights that it reads


@settings(deadline=None, max_examples=30)
@given(cell=streamed())
def test_whoever_deals_counts_with_the_times_that_come_about(cell):
    schedule, costs = cell
    floor, dealt = _Floor(schedule, costs), deal(schedule, costs, "dynamic")
    of_row = [iter(dealt.compute(device)) for device in range(schedule.shape.num_ranks)]
    timeline = simulate(dealt, costs)
    ends = dict(zip((a for row in of_row for a in row), timeline.end, strict=True))
    for action in sorted(ends, key=lambda action: (ends[action], action.kind.name)):
        device = next(rank for rank in range(schedule.shape.num_ranks) if action in dealt.compute(rank))
        assert floor.run((action,), device) == pytest.approx(ends[action], rel=1e-9), action


def test_a_pool_cures_the_heavy_head_that_rotation_does_not():
    """One layer of work below a head twice as heavy: in rotation the head's turn holds everybody up."""
    partition = Partition((1, 1, 1, 1), (1, 1, 1, 1, 0), fused=True)
    times = LayerTimes([1.0] * 4, [1.0] * 4, [2.0] * 4, head_forward=10.0, head_backward=20.0)
    costs = times.table(partition, recompute_ahead=True)
    schedule = entry("roundpipe").build(Shape(2, 4, 8, 5, fused=True), round_size=1).with_partition(partition)
    rotation, pool = (
        float(simulate(deal(schedule, costs, rule), costs).makespan) for rule in ("round_robin", "dynamic")
    )
    work = 8 * (4 * (1 + 1 + 2) + 30)
    assert pool <= 1.1 * work / 2 < rotation


def test_bound_stages_cannot_be_dealt():
    schedule = entry("1f1b").build(Shape(2, 2, 2))
    costs = LayerTimes([1.0] * 2, [1.0] * 2, [1.0] * 2).table(symmetric((1, 1)))
    with pytest.raises(ValueError, match="bound to their devices"):
        deal(schedule, costs, "dynamic")


def test_an_unknown_rule_is_answered_with_the_known_ones():
    schedule = entry("roundpipe").build(Shape(2, 2, 2, 2, fused=True))
    with pytest.raises(ValueError, match=r"did you mean dynamic\?"):
        deal(schedule, LayerTimes([1.0], [1.0], [1.0]).table(symmetric((1,))), "dynamc")
