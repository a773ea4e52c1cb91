"""BitPipe: the order of its released code, what it waits and what it holds."""

from fractions import Fraction

import pytest

from rpbench.cost.constant import constant_times
from rpbench.ir.checks.check import check
from rpbench.ir.partition import symmetric
from rpbench.ir.schedule import Schedule, Shape
from rpbench.passes.lower import add_steps
from rpbench.registry import entry
from rpbench.sim.graph import build_graph
from rpbench.sim.longest_path import simulate
from rpbench.sim.memory import peak_in_flight

# Worked out by hand from the phases of the released code: 4 ranks, 4 microbatches; d down, u up, then the number
# of the microbatch in its direction.
GOLDEN = """
F0d0 F0d1 F3u0 F4u0 F3u1 F4u1 F7d0 B7d0 F7d1 B7d1 B4u0 B3u0 B4u1 B3u1 B0d0 B0d1
F1d0 F2u0 F1d1 F2u1 F5u0 F6d0 F5u1 F6d1 B6d0 B5u0 B6d1 B5u1 B2u0 B1d0 B2u1 B1d1
F1u0 F2d0 F1u1 F2d1 F5d0 F6u0 F5d1 F6u1 B6u0 B5d0 B6u1 B5d1 B2d0 B1u0 B2d1 B1u1
F0u0 F0u1 F3d0 F4d0 F3d1 F4d1 F7u0 B7u0 F7u1 B7u1 B4d0 B3d0 B4d1 B3d1 B0u0 B0u1
"""


def build(p: int, m: int, **more) -> Schedule:
    return entry("bitpipe").build(Shape(p, 2 * p, m, **more))


def bubble(schedule: Schedule, backward: int) -> Fraction:
    """In forwards of one chunk."""
    p, m = schedule.shape.num_ranks, schedule.shape.num_microbatches
    times = constant_times(
        2 * p, p, forward_ms=Fraction(2), input_grad_ms=Fraction(2 * backward), weight_grad_ms=Fraction(0)
    )
    return simulate(schedule, times.table(symmetric((1,) * (2 * p)))).makespan - 2 * m * (1 + backward)


def test_order():
    def token(action) -> str:
        way, number = ("d", action.microbatch) if action.microbatch < 2 else ("u", action.microbatch - 2)
        return f"{action.kind.name}{action.stage}{way}{number}"

    rows = [" ".join(map(token, build(4, 4).compute(rank))) for rank in range(4)]
    assert rows == GOLDEN.strip().splitlines()


@pytest.mark.parametrize("p, m", [(2, 2), (4, 4), (4, 16), (8, 8), (8, 32), (6, 12)])
def test_it_waits_p_minus_2_slots_where_forward_is_as_long_as_backward(p, m):
    assert bubble(build(p, m), 1) == p - 2


@pytest.mark.parametrize("p", [4, 8])
def test_each_further_unit_waits_where_backward_is_twice_as_long(p):
    assert [bubble(build(p, m), 2) for m in (p, 2 * p, 4 * p)] == [(p - 2) * (units + 1) for units in (1, 2, 4)]


@pytest.mark.parametrize(
    "p, peaks", [(4, [7, 8, 8, 7]), (8, [13, 14, 15, 16, 16, 15, 14, 13])], ids=["4 ranks", "8 ranks"]
)
def test_a_rank_holds_no_more_than_p_microbatches(p, peaks):
    assert peak_in_flight(build_graph(build(p, p))) == peaks
    check(build(p, 3 * p), max_in_flight=2 * p)


def test_both_copies_of_a_stage_give_gradients_to_one_step():
    schedule = add_steps(build(4, 8, num_steps=2))
    check(schedule)
    assert schedule.placement == ((0, 3), (1, 2), (2, 1), (3, 0), (3, 0), (2, 1), (1, 2), (0, 3))


@pytest.mark.parametrize(
    "shape, message",
    [
        (Shape(4, 4, 8), "4 stages on 4 ranks: there must be two on each; set chunks_per_device=2"),
        (Shape(3, 6, 6), "the 3 ranks must be an even number; take num_devices=4"),
        (Shape(4, 8, 6), "6 microbatches .* multiple of 4; take num_microbatches=8"),
    ],
)
def test_a_shape_that_cannot_be_is_refused(shape, message):
    with pytest.raises(ValueError, match=message):
        entry("bitpipe").build(shape)
