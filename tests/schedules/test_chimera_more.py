"""Chimera with more than two pipelines, and with forwards of two microbatches."""

from fractions import Fraction

import pytest

from rpbench.cost.table import LayerTimes
from rpbench.ir.action import Kind, parts_of
from rpbench.ir.checks.check import check
from rpbench.ir.partition import symmetric
from rpbench.ir.schedule import Schedule, Shape
from rpbench.passes.lower import add_steps
from rpbench.registry import entry
from rpbench.sim.graph import build_graph
from rpbench.sim.longest_path import simulate
from rpbench.sim.memory import peak_in_flight

# Li and Hoefler, SC'21, section 3.6: four pipelines through 4 ranks, worked out by hand from the placement of the
# released code; a and b go down, c and d up, a microbatch each.
FOUR = """
F0a F1d F2b F3c B3c B2b B1d B0a
F0d F1a F2c F3b B3b B2c B1a B0d
F0b F1c F2a F3d B3d B2a B1c B0b
F0c F1b F2d F3a B3a B2d B1b B0c
"""

# Forward doubling, rank 0 of 4 with 8 microbatches, worked out by hand; d down, u up, then the microbatches together.
DOUBLED = "F0d01 F0d23 F3u01 B3u0 B3u1 F3u23 B3u2 B3u3 B0d0 B0d1 B0d2 B0d3"


def build(p: int, m: int, **options) -> Schedule:
    return entry("chimera").build(Shape(p, p, m), **options)


def bubble(schedule: Schedule, backward: int) -> Fraction:
    p, m = schedule.shape.num_ranks, schedule.shape.num_microbatches
    times = LayerTimes(*([Fraction(time)] * p for time in (1, 0, backward)))
    return simulate(schedule, times.table(symmetric((1,) * p))).makespan - m * (1 + backward)


def test_four_pipelines():
    schedule = build(4, 4, pipelines=4)
    rows = [
        " ".join(f"{action.kind.name}{action.stage}{'abcd'[action.microbatch]}" for action in schedule.compute(rank))
        for rank in range(4)
    ]
    assert rows == FOUR.strip().splitlines()


@pytest.mark.parametrize("p, pipelines", [(4, 4), (8, 4), (8, 8), (16, 4), (16, 8), (12, 6)])
def test_the_bubble_shrinks_with_the_pipelines(p, pipelines):
    """D/f - 2 slots with 2f pipelines, F = B and as many microbatches as ranks."""
    schedule = build(p, p, pipelines=pipelines)
    check(schedule)
    assert bubble(schedule, 1) == p // (pipelines // 2) - 2
    assert all(len(set(holders)) == pipelines for holders in schedule.placement)


@pytest.mark.parametrize("pipelines, low, high", [(2, 5, 8), (4, 7, 8), (8, 8, 8)])
def test_more_pipelines_hold_more_at_the_ends(pipelines, low, high):
    peaks = peak_in_flight(build_graph(build(8, 8, pipelines=pipelines)))
    assert (min(peaks), max(peaks)) == (low, high)


def test_all_copies_of_a_stage_give_gradients_to_one_step():
    schedule = add_steps(entry("chimera").build(Shape(4, 4, 8, num_steps=2), pipelines=4))
    check(schedule)
    steps = [action for _, _, row in schedule.items() for action in row if action.kind is Kind.STEP]
    assert len(steps) == 8


def test_forwards_of_two_microbatches():
    def token(action) -> str:
        parts = parts_of(action)
        base = 0 if parts[0].microbatch < 4 else 4
        numbers = "".join(str(part.microbatch - base) for part in parts)
        return f"{parts[0].kind.name}{action.stage}{'du'[base > 0]}{numbers}"

    assert " ".join(map(token, build(4, 8, forward_doubling=True).compute(0))) == DOUBLED


@pytest.mark.parametrize("p", [4, 6, 8])
@pytest.mark.parametrize("backward, factor", [(2, 2), (3, 3)])
def test_what_doubled_forwards_wait(p, backward, factor):
    """2(D - 2) forwards for B = 2F and N = 2D; 3(D - 2) where the forward is run again."""
    schedule = build(p, 2 * p, forward_doubling=True)
    check(schedule)
    assert bubble(schedule, backward) == factor * (p - 2)


@pytest.mark.parametrize(
    "m, options, message",
    [
        (8, {"pipelines": 3}, "pipelines=3: an even number, of which 8 ranks must be a multiple; try 2"),
        (8, {"pipelines": 16}, "pipelines=16"),
        (8, {"forward_doubling": True}, "units of 2 for each rank: they must be a multiple of 16; .*=16"),
        (16, {"forward_doubling": True, "pipelines": 4}, "pipelines=4 with .* take one of the two"),
    ],
)
def test_what_cannot_be_is_refused(m, options, message):
    with pytest.raises(ValueError, match=message):
        build(8, m, **options)
