"""Limits: the largest value with a plan is found by halving, and what a bound excludes is said to be proven."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rpbench.advice.limits import FINENESS, largest


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


@pytest.mark.parametrize("limit, expected", [(0, 0), (9_999, 512)])
def test_nothing_and_everything(limit, expected):
    assert largest("any", lambda value: True if value <= limit else None, 64, 575).value == expected
