"""GIS: the released grid, what its groups wait, and what they hold."""

from fractions import Fraction

import pytest

from rpbench.cost.constant import constant_times
from rpbench.ir.action import Kind
from rpbench.ir.checks.check import check
from rpbench.ir.partition import symmetric
from rpbench.ir.schedule import Schedule, Shape
from rpbench.registry import entry
from rpbench.sim.graph import build_graph
from rpbench.sim.longest_path import simulate
from rpbench.sim.memory import peak_in_flight

# The first passes of 4 ranks with 8 microbatches and 2 chunks, worked out by hand from the slots of the released rule:
# group size -> rank -> chunk.microbatch.
GOLDEN = {
    4: {
        0: "F0.0 F0.1 F0.2 F0.3 F1.0 F1.1 F1.2 F1.3 B1.0 F0.4 B1.1 F0.5 B1.2 F0.6 B1.3 F0.7",
        3: "F0.0 F0.1 F0.2 F0.3 F1.0 B1.0 F1.1 B1.1 F1.2 B1.2 F1.3 B1.3 F0.4 B0.0 F0.5 B0.1",
    },
    2: {0: "F0.0 F0.1 F1.0 F1.1 F0.2 F0.3 B1.0 F1.2 B1.1 F1.3 B0.0 F0.4 B0.1 F0.5"},
}


def build(p: int, m: int, v: int, g: int | None = None) -> Schedule:
    return entry("gis").build(Shape(p, p * v, m), group_size=g)


@pytest.mark.parametrize("g", GOLDEN)
def test_order(g):
    names = {Kind.F: "F", Kind.I: "B"}
    for rank, golden in GOLDEN[g].items():
        row = [action for action in build(4, 8, 2, g).compute(rank) if action.kind in names]
        tokens = [f"{names[action.kind]}{action.stage // 4}.{action.microbatch}" for action in row]
        assert " ".join(tokens[: len(golden.split())]) == golden


# Bubble in slots with F = I = W = 1, and the chunks that ranks hold; worked out apart from this code.
GROUPS = {
    (4, 8, 2, 4): (6, (8, 5)),
    (4, 8, 2, 2): (8, (6, 3)),
    (8, 32, 2, 8): (14, (16, 9)),
    (8, 32, 2, 4): (18, (12, 5)),
    (8, 32, 4, 8): (14, (32, 25)),
    (8, 32, 4, 4): (26, (20, 13)),
}


@pytest.mark.parametrize("shape", GROUPS)
def test_smaller_groups_wait_longer_and_hold_less(shape):
    p, m, v, _ = shape
    schedule, one = build(*shape), Fraction(v)
    times = constant_times(p * v, p, forward_ms=one, input_grad_ms=one, weight_grad_ms=one, hop_ms=Fraction(0))
    waits, (first, last) = GROUPS[shape]
    assert simulate(schedule, times.table(symmetric((1,) * (p * v)))).makespan - 3 * m * v == waits
    assert peak_in_flight(build_graph(schedule)) == list(range(first, last - 1, -1))


@pytest.mark.parametrize("p, m, v, g", [(4, 8, 2, 1), (5, 7, 3, 2), (1, 3, 2, 1), (4, 6, 2, None), (6, 12, 1, 6)])
def test_every_group_size_runs(p, m, v, g):
    check(build(p, m, v, g))


def test_it_holds_less_than_interleaved_1f1b():
    ours, theirs = (
        max(peak_in_flight(build_graph(entry(name).build(Shape(8, 16, 32))))) for name in ("gis", "interleaved_1f1b")
    )
    assert (ours, theirs) == (16, 23)


@pytest.mark.parametrize("size", [0, 5, 2.0])
def test_a_group_that_cannot_be_is_refused(size):
    with pytest.raises(ValueError, match=rf"group_size={size}: microbatches of a group, from 1 to 4"):
        build(4, 8, 2, size)
