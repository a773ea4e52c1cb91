"""Copies in groups: who holds what, and how likely a state outlives failures, against every set of failures."""

from fractions import Fraction
from itertools import combinations
from math import comb

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rpbench.failures.copies import groups, holders, is_recoverable, recoverable_probability

# By hand: the groups of small numbers of ranks and copies.
GROUPS = {
    (4, 2): ((0, 1), (2, 3)),
    (5, 2): ((0, 1), (2, 3, 4)),
    (6, 3): ((0, 1, 2), (3, 4, 5)),
    (7, 3): ((0, 1, 2), (3, 4, 5, 6)),
    (3, 2): ((0, 1, 2),),
    (3, 1): ((0,), (1,), (2,)),
}


@pytest.mark.parametrize("sizes", GROUPS, ids=str)
def test_groups(sizes):
    assert groups(*sizes) == GROUPS[sizes]


def test_holders_in_a_group_and_in_the_ring():
    assert [holders(rank, 5, 2) for rank in range(5)] == [(0, 1), (1, 0), (2, 3), (3, 4), (4, 2)]


@pytest.mark.parametrize("num_copies", range(1, 5))
@pytest.mark.parametrize("num_ranks", range(4, 10))
def test_probability_is_that_of_all_sets_of_failures(num_ranks, num_copies):
    for num_failures in range(num_ranks + 1):
        sets = list(combinations(range(num_ranks), num_failures))
        sound = sum(is_recoverable(lost, num_ranks, num_copies) for lost in sets)
        found = recoverable_probability(num_ranks, num_copies, num_failures)
        assert found == Fraction(sound, len(sets)), num_failures


@pytest.mark.parametrize("num_ranks, num_copies", [(4, 2), (16, 2), (1024, 2), (12, 3), (128, 4)])
def test_the_closed_form_where_copies_divide_ranks(num_ranks, num_copies):
    expected = 1 - Fraction(num_ranks // num_copies, comb(num_ranks, num_copies))
    assert recoverable_probability(num_ranks, num_copies, num_copies) == expected
    if num_copies == 2:
        assert expected == 1 - Fraction(1, num_ranks - 1)


def test_five_ranks_two_copies_by_hand():
    """0 1 | 2 3 4: the pairs 01, 23, 34 and 42 lose a state, 6 of 10 do not."""
    assert recoverable_probability(5, 2, 2) == Fraction(6, 10)


@given(st.integers(2, 12), st.data())
def test_as_many_failures_as_there_are_copies_to_lose(num_ranks, data):
    num_copies = data.draw(st.integers(1, num_ranks))
    assert recoverable_probability(num_ranks, num_copies, num_copies - 1) == 1
    assert recoverable_probability(num_ranks, num_copies, num_ranks) == 0


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.data())
def test_more_copies_never_recover_less_where_groups_join(num_copies, times, num_groups, data):
    """Groups of c that become groups of a multiple of c: who loses all of the larger has lost all of a smaller."""
    num_ranks = num_copies * times * num_groups
    num_failures = data.draw(st.integers(0, num_ranks))
    more = recoverable_probability(num_ranks, num_copies * times, num_failures)
    assert more >= recoverable_probability(num_ranks, num_copies, num_failures)


def test_one_copy_more_may_recover_less_where_it_makes_a_ring():
    """16 ranks, 10 failures, of C(16, 10) = 8008 sets.

    8 copies, two groups: 2 * C(8, 2) = 56 sets lose one. 9 copies, a ring of 16: 16 runs of ten, and 16 runs of nine
    with one of the 5 ranks that touch neither end: 96 sets.
    """
    assert recoverable_probability(16, 8, 10) == 1 - Fraction(56, 8008)
    assert recoverable_probability(16, 9, 10) == 1 - Fraction(96, 8008)


def test_copies_that_cannot_be_placed():
    with pytest.raises(ValueError, match=r"copies=5: .* there are 4; take 1 to 4"):
        groups(4, 5)
    with pytest.raises(ValueError, match="num_failures=5: of 4 ranks"):
        recoverable_probability(4, 2, 5)
