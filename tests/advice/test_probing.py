"""Probing: a plan that one has found is no worse for who takes it over, and who does not accept it stays as it is."""

from contest_terms import small

from rpbench.advice.probing import Kind, Loan, borrow, kind_of, known_plans, leading, loan_of
from rpbench.advice.ranking import Misfit
from rpbench.advice.side_searches import Share
from rpbench.ir.partition import symmetric
from rpbench.plan.contest.contender import contender, space_of
from rpbench.plan.contest.plans import Budget
from rpbench.plan.contest.search import Search

BUDGET = Budget(60, 100_000)
STAYS = Kind(moves=False, moves_each_time=False, separate_cuts=False, overlaps=False)  # a pipeline that is drained
SHARDED = STAYS._replace(moves=True, moves_each_time=True)


def lent(pace, cut, *, size=1, chunks=1, recompute="all", kind=STAYS, placement=()):
    values = (("microbatch_sequences", size), ("chunks_per_device", chunks), ("recompute", recompute))
    return Loan(pace, values, cut, kind, placement)


def looked(name, case):
    search = Search(contender(name), case, BUDGET, is_over=lambda: False)
    search.look()
    return search


def test_a_borrower_is_as_fast_as_the_same_schedule_was_that_lent_its_plan():
    case = small(sequences_per_step=8, microbatches=(1, 2, 4))
    lender, space = looked("1f1b", case), space_of(contender("1f1b"), case)
    lender.finish()
    loan = loan_of(lender)
    other = next(size for size in (4, 1) if size != dict(loan.values)["microbatch_sequences"])
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
    borrow(search, lent(9e9, symmetric((1,)), size=7, chunks=5, recompute="nothing"), BUDGET.work)  # nobody's
    assert search.best() == before
    assert search.num_timed == timed


def test_of_each_placement_of_stages_the_fastest_plans_of_several_kinds_lead():
    four, eight, a_v = symmetric((1,) * 4), symmetric((1,) * 8), ((0,), (1,), (1,), (0,))
    fast, alike, slow, third = (lent(pace, four, size=size) for pace, size in ((9.0, 1), (8.0, 1), (7.0, 2), (6.0, 4)))
    other, turning = lent(1.0, eight, chunks=2), lent(5.0, four, placement=a_v)
    moved = lent(2.0, four, size=8, kind=SHARDED)
    assert leading([None, other, third, moved, turning, slow, alike, fast]) == [fast, slow, turning, moved, other]


def test_a_plan_is_lent_to_its_own_kind():
    """Small microbatches fill pipelines and have ZeRO-3 gather more often: what is good for one is not tried there."""
    case = small(sequences_per_step=8, microbatches=(1, 2, 4))
    pipeline, sharded = looked("1f1b", case), looked("zero_3", case)
    assert loan_of(pipeline).kind == STAYS
    assert kind_of(sharded) == kind_of(looked("zero_infinity", case)) == SHARDED
    assert kind_of(looked("mobius", case)) == STAYS._replace(moves=True)
    assert kind_of(looked("roundpipe", case)) == STAYS._replace(separate_cuts=True)
    assert kind_of(looked("pipedream_2bw", case)) == STAYS._replace(overlaps=True)
    assert kind_of(looked("pipemare", case)) == STAYS._replace(overlaps=True, steps_often=True)
    assert kind_of(looked("superoffload", case)) == SHARDED  # steps are undone, and none begins before
    timed = sharded.num_timed
    borrow(sharded, loan_of(pipeline), BUDGET.work)
    assert sharded.num_timed == timed


def test_plans_that_step_as_often_are_begun_near_first():
    case = small(sequences_per_step=8, microbatches=(1, 2, 4))
    late = STAYS._replace(overlaps=True)
    search, often = looked("spectrain", case), late._replace(steps_often=True)
    place, cut = search.sketcher.placement(search.best().setting), search.best().cut
    loans = [lent(pace, cut, kind=kind, placement=place) for pace, kind in ((9.0, late), (5.0, often), (4.0, often))]
    assert [plan.pace for plan in known_plans(search, [*loans, lent(8.0, cut, placement=place)])] == [5.0, 9.0]


def test_what_a_share_has_found_is_tried_for_all_of_it_and_what_comes_from_elsewhere(monkeypatch):
    case, tried = small(), []
    monkeypatch.setattr("rpbench.advice.side_searches.borrow", lambda search, loan, work: tried.append(loan))
    share = Share(
        [contender("1f1b"), contender("gpipe")], [0, 1], case, BUDGET, lambda plan, frames: Misfit(plan, 0, 0, False)
    )
    share.look(1e9)
    elsewhere = lent(1e9, symmetric((1,) * case.num_devices))
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


def test_a_look_near_known_plans_begins_with_their_cuts_and_switches_its_method_off():
    """PipeOffload that moves nothing, and Seq1F1B of whole sequences, are 1F1B; a V begins with the cut of a V."""
    case = small(sequences_per_step=16, microbatches=(1, 2))
    lenders = [looked(name, case) for name in ("1f1b", "interleaved_1f1b", "dualpipe_v")]
    loans = leading(map(loan_of, lenders))
    plain = next(loan for loan in loans if len(loan.cut.backward) == case.num_devices)
    for name, option, value in (("pipe_offload", "share", 0.0), ("seq1f1b", "num_segments", 1)):
        search = Search(contender(name), case, BUDGET, is_over=lambda: False)
        assert search.look(known_plans(search, loans)).tokens_per_s >= plain.pace * (1 - 1e-3)
        off = [each for each in search.tried.values() if each.outcome and dict(each.setting.options)[option] == value]
        assert off
        assert max(each.score for each in off) == search.best_pace()
    a_v = Search(contender("zb_v"), case, BUDGET)
    known = known_plans(a_v, loans)
    assert [plan.cut for plan in known] == [lenders[2].best().cut, lenders[1].best().cut]
    assert known_plans(Search(contender("zero_3"), case, BUDGET), loans) == []


def test_plans_that_nobody_can_take_over_leave_the_first_look_as_it_is():
    case = small(microbatches=(1,))
    search, alone = looked("1f1b", case), looked("1f1b", case)
    loans = [lent(9e9, symmetric((1,) * 5)), lent(9e9, symmetric((3, 3)), kind=SHARDED)]
    search = Search(contender("1f1b"), case, BUDGET, is_over=lambda: False)
    search.look(known_plans(search, loans))
    assert search.best() == alone.best()
    assert search.num_timed == alone.num_timed
