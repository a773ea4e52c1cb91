"""Probing: a plan that one has found is no worse for who takes it over, and who does not accept it stays as it is."""

from contest_terms import small

from rpbench.advice.probing import Loan, borrow, kind_of, leading, loan_of
from rpbench.advice.ranking import Misfit
from rpbench.advice.side_searches import Share
from rpbench.ir.partition import symmetric
from rpbench.plan.contest.contender import contender, space_of
from rpbench.plan.contest.plans import Budget
from rpbench.plan.contest.search import Search

BUDGET = Budget(60, 100_000)
STAYS = (False, False, False)  # the kind of a pipeline whose weights stay


def looked(name, case):
    search = Search(contender(name), case, BUDGET, is_over=lambda: False)
    search.look()
    return search


def test_a_borrower_is_as_fast_as_the_same_schedule_was_that_lent_its_plan():
    case = small(sequences_per_step=8, microbatches=(1, 2, 4))
    lender, space = looked("1f1b", case), space_of(contender("1f1b"), case)
    lender.finish()
    loan = loan_of(lender)
    other = next(size for size in (4, 1) if size != loan.values[0])
    borrower = Search(contender("1f1b"), case, BUDGET, space.restricted(microbatch_sequences=[other]))
    borrower.look()
    borrower.space = space
    assert borrower.best_pace() < loan.pace  # or the test says nothing
    borrow(borrower, loan, BUDGET.work)
    assert borrower.best_pace() >= loan.pace * (1 - 1e-4)


def test_what_is_not_to_be_had_changes_nothing():
    case = small(microbatches=(1,))
    search = looked("1f1b", case)
    before, timed = search.best(), search.num_timed
    borrow(search, loan_of(search), BUDGET.work)  # its own
    borrow(search, Loan(9e9, (7, 5, "nothing"), symmetric((1,)), STAYS), BUDGET.work)  # nobody's
    assert search.best() == before
    assert search.num_timed == timed


def test_of_each_number_of_stages_the_fastest_plans_of_several_kinds_lead():
    four, eight = symmetric((1,) * 4), symmetric((1,) * 8)
    fast, alike, slow, third = (
        Loan(pace, (size, 1, "all"), four, STAYS) for pace, size in ((9.0, 1), (8.0, 1), (7.0, 2), (6.0, 4))
    )
    other = Loan(1.0, (1, 2, "all"), eight, STAYS)
    moved = Loan(2.0, (8, 1, "all"), four, (True, True, False))
    assert leading([None, other, third, moved, slow, alike, fast]) == [fast, slow, moved, other]


def test_a_plan_is_lent_to_its_own_kind():
    """Small microbatches fill pipelines and have ZeRO-3 gather more often: what is good for one is not tried there."""
    case = small(sequences_per_step=8, microbatches=(1, 2, 4))
    pipeline, sharded = looked("1f1b", case), looked("zero_3", case)
    assert loan_of(pipeline).kind == STAYS
    assert kind_of(sharded) == kind_of(looked("zero_infinity", case)) == (True, True, False)
    assert kind_of(looked("mobius", case)) == (True, False, False)
    assert kind_of(looked("roundpipe", case)) == (False, False, True)
    timed = sharded.num_timed
    borrow(sharded, loan_of(pipeline), BUDGET.work)
    assert sharded.num_timed == timed


def test_what_a_share_has_found_is_tried_for_all_of_it_and_what_comes_from_elsewhere(monkeypatch):
    case, tried = small(), []
    monkeypatch.setattr("rpbench.advice.side_searches.borrow", lambda search, loan, work: tried.append(loan))
    share = Share(
        [contender("1f1b"), contender("gpipe")], [0, 1], case, BUDGET, lambda plan, frames: Misfit(plan, 0, 0, False)
    )
    share.look(1e9)
    elsewhere = Loan(1e9, (1, 1, "all"), symmetric((1,) * case.num_devices), STAYS)
    loans = share.go_by_turns([0, 1], None, 1e9, [elsewhere])
    assert loans == leading(map(loan_of, share.searches.values()))
    assert tried.count(elsewhere) >= 1
    share.finish(None, [elsewhere])
    assert tried.count(elsewhere) == 2  # once for each, whatever the part


def test_a_schedule_that_is_another_with_one_option_is_as_fast_with_its_plan():
    """DAPPLE's policy A, without early warmup, has one forward ahead for each rank downstream: 1F1B."""
    case = small(sequences_per_step=8, microbatches=(1,))
    lender, borrower = looked("1f1b", case), looked("dapple", case)
    lender.finish()
    loan = loan_of(lender)
    borrow(borrower, loan, BUDGET.work)
    assert borrower.best_pace() >= loan.pace * (1 - 1e-3)
