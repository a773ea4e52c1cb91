"""One pass that checks a schedule and makes its graph says what the two say apart."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nearby import nearby
from staleness import staleness_of_stages

from rpbench.ir.checks.check import check
from rpbench.ir.schedule import ScheduleError, Shape, from_text
from rpbench.passes.lower import add_steps
from rpbench.registry import entries
from rpbench.sim.checked import checked_graph
from rpbench.sim.graph import build_graph


@settings(deadline=None, max_examples=40)
@given(
    name=st.sampled_from(sorted(name for name, found in entries().items() if not found.separate_cuts)),
    p=st.integers(1, 4),
    v=st.integers(1, 3),
    m=st.integers(1, 6),
    steps=st.integers(1, 2),
    stepped=st.booleans(),
)
def test_versions_and_graph_are_those_made_apart(name, p, v, m, steps, stepped):
    p, v, m = nearby(name, p, v, m)
    schedule = entries()[name].build(Shape(p, p * v, m, num_steps=steps))
    schedule = add_steps(schedule) if stepped else schedule
    graph, versions = checked_graph(schedule)
    assert versions == check(schedule)
    assert (graph.order == build_graph(schedule).order).all()
    assert versions.max_staleness == max(staleness_of_stages(versions))


def test_lanes_that_wait_for_each_other_are_shown_with_the_table():
    text = str(entries()["1f1b"].build(Shape(2, 2, 2))).replace("1F0 1B0", "1B0 1F0")
    with pytest.raises(ScheduleError, match="no rank can move") as apart:
        check(from_text(text))
    with pytest.raises(ScheduleError) as together:
        checked_graph(from_text(text))
    assert str(together.value) == str(apart.value)
