"""Limits: the largest value with a plan is found by halving, and what a bound excludes is said to be proven."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rpbench.advice.limits import FINENESS, More, largest, least_more
from rpbench.advice.rows import Misfit
from rpbench.plan.contest.terms import Limits


@given(st.integers(0, 5000), st.sampled_from([1, 64]), st.integers(64, 5000))
def test_the_largest_value_that_holds_is_met_within_its_fineness(limit, step, most):
    found = largest("any", lambda value: "plan" if value <= limit else None, step, most)
    top = most // step * step
    assert found.value <= min(limit, top)
    if found.beyond is None:
        assert found.value == top <= limit
    else:
        assert found.beyond > limit
        assert found.beyond - found.value <= max(step, found.value // FINENESS) + step
    assert (found.found is None) == (found.value == 0)
    assert not found.is_proven or found.value == 0


@given(st.integers(1, 5000), st.integers(0, 5000))
def test_a_bound_spares_the_search_and_proves_what_is_beyond(limit, slack):
    """The bound excludes nothing that holds; where both agree, the search is asked once."""
    asked = []

    def held(value):
        asked.append(value)
        return "plan" if value <= limit else None

    found = largest("any", held, 1, 10_000, lambda value: value <= limit + slack)
    assert found.value <= limit
    assert all(value <= limit + slack for value in asked)
    if found.is_proven:
        assert found.beyond > limit + slack
        assert asked == [found.value]


def misfit(name, device, host, limits):
    outcome = SimpleNamespace(peak_bytes=device, host_bytes=host, misfit=2.0)
    plan = SimpleNamespace(outcome=outcome, least_bytes=0, least_host_bytes=0, contender=SimpleNamespace(name=name))
    lacks = max(0, device - limits.device_memory_bytes), max(0, host - limits.host_memory_bytes)
    return Misfit(plan, *lacks, False)


def test_what_a_plan_is_known_to_need_is_enough_though_there_is_no_time_to_look_for_less():
    """Of plans that lack one memory alone, each memory's least; the smaller change first."""
    limits = Limits(24, 800)
    needs = {"whole": (1300, 0), "pipeline": (143, 100), "streamed": (20, 1140), "both": (30, 900)}
    rows = [misfit(name, *each, limits) for name, each in needs.items()]
    found = least_more(rows, SimpleNamespace(limits=limits), -1.0)
    assert found == [More("device_memory_bytes", 119, "pipeline"), More("host_memory_bytes", 340, "streamed")]


@pytest.mark.parametrize("limit, expected", [(0, 0), (9_999, 512)])
def test_nothing_and_everything(limit, expected):
    assert largest("any", lambda value: True if value <= limit else None, 64, 575).value == expected
