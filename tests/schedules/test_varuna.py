"""Varuna: the order of its released rule, and how long it takes."""

from fractions import Fraction

import pytest

from rpbench.cost.table import LayerTimes
from rpbench.ir.checks.check import check
from rpbench.ir.partition import symmetric
from rpbench.ir.schedule import Schedule, Shape
from rpbench.registry import entry
from rpbench.sim.longest_path import simulate

# Worked out by hand from the released rule: 4 ranks, 6 microbatches.
DEEP = "F0 F1 F2 F3 F4 F5 R0 B0 R1 B1 R2 B2 R3 B3 R4 B4 R5 B5"
GOLDEN = [
    DEEP,
    DEEP,
    "F0 F1 F2 R0 B0 R1 B1 R2 B2 F3 F4 F5 R3 B3 R4 B4 R5 B5",
    "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5",
]


def build(p: int, m: int) -> Schedule:
    return entry("varuna").build(Shape(p, p, m))


def test_order():
    rows = [" ".join(f"{a.kind.name}{a.microbatch}" for a in build(4, 6).compute(rank)) for rank in range(4)]
    assert rows == GOLDEN


@pytest.mark.parametrize("p, m, slots", [(4, 6, 30), (4, 8, 39), (4, 16, 72), (8, 32, 147)])
def test_slots_of_a_step(p, m, slots):
    """With F = R = 1 and B = 2, where the last stage recomputes nothing; worked out apart from this code."""
    schedule = build(p, m)
    check(schedule)
    times = LayerTimes(*([Fraction(time)] * p for time in (1, 1, 2)))
    assert simulate(schedule, times.table(symmetric((1,) * p), recompute_ahead=True, keeps_last=True)).makespan == slots


def test_several_stages_on_a_rank_are_refused():
    with pytest.raises(ValueError, match="one stage on each rank, got 8 stages on 4 ranks; set chunks_per_device=1"):
        entry("varuna").build(Shape(4, 8, 8))
