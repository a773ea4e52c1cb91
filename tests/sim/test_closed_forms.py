"""The simulator against textbook formulas: exact, with fractions, over random shapes and costs."""

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rpbench.cost.constant import constant_times
from rpbench.ir.partition import symmetric
from rpbench.ir.schedule import Shape
from rpbench.registry import entry
from rpbench.sim.longest_path import simulate

times = st.fractions(Fraction(1, 10), 10, max_denominator=20)
ranks = st.integers(1, 7)


def makespan_of(name, p, m, *, v=1, f, b, c=Fraction(0), **options):
    costs = constant_times(p * v, p, forward_ms=f, input_grad_ms=b, weight_grad_ms=Fraction(0), hop_ms=c)
    partition = symmetric((1,) * (p * v))
    schedule = entry(name).build(Shape(p, p * v, m), **options).with_partition(partition)
    return simulate(schedule, costs.table(partition)).makespan


@settings(deadline=None, max_examples=40)
@given(p=ranks, m=st.integers(1, 20), f=times, b=times)
def test_gpipe_and_1f1b_take_m_plus_p_minus_1_slots(p, m, f, b):
    expected = (m + p - 1) * (f + b)
    assert makespan_of("gpipe", p, m, f=f, b=b) == expected
    assert makespan_of("1f1b", p, m, f=f, b=b) == expected
    for early in (False, True):
        assert makespan_of("dapple", p, m, f=f, b=b, early_warmup=early) == expected


@settings(deadline=None, max_examples=25)
@given(p=st.integers(2, 6), groups=st.integers(1, 4), f=times, b=times)
def test_1f1b_exposes_two_hops_per_microbatch(p, groups, f, b):
    """For m a multiple of p and hops small against F and B: (m+p-1)(F+B) + c(2(p-1)m/p + 2(p-2))."""
    m, c = groups * p, min(f, b) / 100
    expected = (m + p - 1) * (f + b) + c * (2 * (p - 1) * groups + 2 * (p - 2))
    assert makespan_of("1f1b", p, m, f=f, b=b, c=c) == expected


@settings(deadline=None, max_examples=25)
@given(p=st.integers(2, 6), groups=st.integers(1, 4), f=times, b=times)
def test_a_longer_warmup_pays_for_hops_only_at_the_ends(p, groups, f, b):
    """Policy A of DAPPLE is plain 1F1B; policy B is never slower, and pays for at most two hops a rank."""
    m, c = groups * p, min(f, b) / 100
    plain, early = (makespan_of("dapple", p, m, f=f, b=b, c=c, early_warmup=early) for early in (False, True))
    assert plain == makespan_of("1f1b", p, m, f=f, b=b, c=c)
    assert early == (m + p - 1) * (f + b) + 2 * (p - 1) * c


@pytest.mark.parametrize("hop, plain, early", [(Fraction(0), 21, 21), (Fraction(1, 2), 55, 28), (Fraction(1), 89, 35)])
def test_what_a_longer_warmup_hides(hop, plain, early):
    """Bubble of p = 8, m = 32, F = 1, B = 2."""
    for early_warmup, bubble in ((False, plain), (True, early)):
        found = makespan_of("dapple", 8, 32, f=Fraction(1), b=Fraction(2), c=hop, early_warmup=early_warmup)
        assert found - 32 * 3 == bubble


@settings(deadline=None, max_examples=25)
@given(p=st.integers(1, 5), v=st.integers(1, 4), groups=st.integers(1, 3), f=times, b=times)
def test_interleaving_divides_the_bubble_by_the_chunks(p, v, groups, f, b):
    m = groups * p
    expected = m * (f + b) + (p - 1) * (f + b) / v
    assert makespan_of("interleaved_1f1b", p, m, v=v, f=f, b=b) == expected


@settings(deadline=None, max_examples=25)
@given(p=st.integers(1, 5), v=st.integers(1, 4), m=st.integers(5, 12), f=times, b=times)
def test_breadth_first_divides_the_bubble_by_the_chunks(p, v, m, f, b):
    expected = m * (f + b) + (p - 1) * (f + b) / v
    assert makespan_of("looped_bfs", p, m, v=v, f=f, b=b) == expected


@settings(deadline=None, max_examples=25)
@given(m=st.integers(2, 6), f=times, b=times)
def test_a_lone_device_never_idles(m, f, b):
    for name in ("gpipe", "1f1b", "interleaved_1f1b", "looped_bfs"):
        assert makespan_of(name, 1, m, f=f, b=b) == m * (f + b)
