"""Combined 1F1B: pairs that run together, one forward more ahead of them."""

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rpbench.cost.constant import constant_times
from rpbench.ir.checks.check import check
from rpbench.ir.partition import symmetric
from rpbench.ir.schedule import Schedule, Shape
from rpbench.registry import entry
from rpbench.sim.graph import build_graph
from rpbench.sim.longest_path import simulate
from rpbench.sim.memory import peak_in_flight

TIMES = st.fractions(Fraction(1, 10), 10, max_denominator=20)

# Worked out by hand from the rule: one device as described there, and 2 ranks with 2 chunks.
GOLDEN = {
    Shape(1, 1, 3): ["0F0 (0F1;0B0)OVERLAP (0F2;0B1)OVERLAP 0B2"],
    Shape(2, 4, 4): [
        "0F0 0F1 2F0 2F1 0F2 (0F3;2B0)OVERLAP (2F2;2B1)OVERLAP (2F3;0B0)OVERLAP 0B1 2B2 2B3 0B2 0B3",
        "1F0 1F1 3F0 (3F1;3B0)OVERLAP (1F2;3B1)OVERLAP (1F3;1B0)OVERLAP (3F2;1B1)OVERLAP (3F3;3B2)OVERLAP 3B3 1B2 1B3",
    ],
}


def build(p: int, m: int, v: int) -> Schedule:
    return entry("combined_1f1b").build(Shape(p, p * v, m))


def makespan(schedule: Schedule, f: Fraction, b: Fraction, gain: Fraction) -> Fraction:
    """With these times of a rank's whole share."""
    p, stages = schedule.shape.num_ranks, schedule.shape.num_stages
    times = constant_times(
        stages, p, forward_ms=f, input_grad_ms=b, weight_grad_ms=Fraction(0), hop_ms=Fraction(0), overlap_gain=gain
    )
    return simulate(schedule, times.table(symmetric((1,) * stages))).makespan


@pytest.mark.parametrize("shape", GOLDEN)
def test_order(shape):
    schedule = entry("combined_1f1b").build(shape)
    assert [" ".join(map(str, schedule.compute(rank))) for rank in range(shape.num_ranks)] == GOLDEN[shape]


@settings(deadline=None, max_examples=20)
@given(m=st.integers(1, 9), f=TIMES, b=TIMES, gain=st.sampled_from([Fraction(0), Fraction(1, 3), Fraction(1)]))
def test_one_device_hides_a_part_of_every_forward_but_the_first(m, f, b, gain):
    assert makespan(build(1, m, 1), f, b, gain) == m * (f + b) - (m - 1) * gain * min(f, b)


@pytest.mark.parametrize("p, v", [(2, 1), (4, 1), (4, 2), (3, 3)])
def test_pairs_do_not_wait_for_each_other(p, v):
    """In the steady phase a microbatch takes one pair of a rank's share: longer steps grow by exactly that."""
    one, gain = Fraction(1), Fraction(1)
    steps = [makespan(build(p, rounds * p, v), one, 2 * one, gain) for rounds in (4, 5, 6)]
    assert steps[2] - steps[1] == steps[1] - steps[0] == p * 2  # a forward is hidden behind its backward of 2


@pytest.mark.parametrize("p, m, v", [(2, 8, 2), (4, 12, 2), (4, 8, 3), (4, 8, 1)])
def test_one_chunk_more_is_in_flight(p, m, v):
    peaks, plain = (
        peak_in_flight(build_graph(entry(name).build(Shape(p, p * v, m))))
        for name in ("combined_1f1b", "interleaved_1f1b")
    )
    assert [mine - theirs for mine, theirs in zip(peaks, plain, strict=True)] == [1] * p
    check(build(p, m, v), max_in_flight=peaks)


def test_microbatches_that_do_not_go_through_evenly_are_refused():
    with pytest.raises(
        ValueError, match=r"combined_1f1b sends 7 microbatches through 3 ranks in 2 rounds of equal size"
    ):
        build(3, 7, 2)
