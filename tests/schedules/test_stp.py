"""STP: the released order, its wait, and what it holds."""

from fractions import Fraction

import pytest

from rpbench.cost.constant import constant_times
from rpbench.ir.action import parts_of
from rpbench.ir.checks.check import check
from rpbench.ir.partition import symmetric
from rpbench.ir.schedule import Schedule, Shape
from rpbench.registry import entry
from rpbench.sim.graph import build_graph
from rpbench.sim.longest_path import simulate
from rpbench.sim.memory import peak_in_flight

# Worked out by hand from the phases of the released code: 2 ranks, 6 microbatches; chunk.microbatch, W without.
GOLDEN = """
F0.0 F0.1 F0.2 F1.0 F0.3 (F1.1&I1.0) (F0.4&W) (F1.2&B1.1) (F0.5&B0.0) (F1.3&B1.2) B0.1 (F1.4&I1.3) B0.2 (F1.5&I1.4) \
B0.3 B1.5 B0.4 W W B0.5
F0.0 F1.0 F0.1 F1.1 (F0.2&F0.3) (F1.2&B1.0) (F0.4&B0.0) (F1.3&B1.1) (F0.5&B0.1) (F1.4&I1.2) B0.2 (F1.5&I1.3) \
B0.3 B1.4 B0.4 B1.5 B0.5 W W
"""


def build(p: int, m: int, **more) -> Schedule:
    return entry("stp").build(Shape(p, 2 * p, m, **more))


def test_order():
    def token(action) -> str:
        found = [
            part.kind.name + ("" if part.kind.name == "W" else f"{int(part.stage > 1)}.{part.microbatch}")
            for part in parts_of(action)
        ]
        return f"({'&'.join(found)})" if action.sub else found[0]

    rows = [" ".join(map(token, build(2, 6).compute(rank))) for rank in range(2)]
    assert rows == GOLDEN.strip().splitlines()


def makespan(schedule: Schedule, gain: Fraction) -> Fraction:
    p = schedule.shape.num_ranks
    two = Fraction(2)  # of a rank's two chunks
    times = constant_times(
        2 * p, p, forward_ms=two, input_grad_ms=two, weight_grad_ms=two, hop_ms=Fraction(0), overlap_gain=gain
    )
    return simulate(schedule, times.table(symmetric((1,) * (2 * p)))).makespan


@pytest.mark.parametrize("p, m", [(2, 6), (2, 5), (4, 12), (4, 20), (8, 24)])
def test_it_waits_p_minus_1_slots(p, m):
    assert makespan(build(p, m), Fraction(0)) == 6 * m + p - 1
    assert makespan(build(p, m), Fraction(1, 2)) < 6 * m


@pytest.mark.parametrize("p, peaks", [(4, [13, 13, 14, 15])])
def test_activations_until_their_weight_gradient(p, peaks):
    schedule = build(p, 3 * p)
    assert peak_in_flight(build_graph(schedule)) == peaks
    check(schedule, max_in_flight=4 * p - 1)


@pytest.mark.parametrize(
    "shape, message",
    [
        (Shape(4, 4, 12), "4 stages on 4 ranks: there must be two on each; set chunks_per_device=2"),
        (Shape(4, 8, 10), "10 microbatches through 4 ranks: there must be at least 11; take num_microbatches=11"),
    ],
)
def test_a_shape_that_cannot_be_is_refused(shape, message):
    with pytest.raises(ValueError, match=message):
        entry("stp").build(shape)
