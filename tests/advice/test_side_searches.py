"""Side searches: time ends them between steps, what was found counts, and what is hopeless is passed over."""

from itertools import count
from types import SimpleNamespace

import pytest
from contest_terms import read, small

from rpbench.advice.ranking import Misfit, advise
from rpbench.advice.side_searches import Clock, Share
from rpbench.cost.hardware.basis import make_basis
from rpbench.plan.contest.contender import contender, space_of
from rpbench.plan.contest.frame import Frame, Frames
from rpbench.plan.contest.plans import Budget
from rpbench.plan.contest.search import OUT_OF_TIME, Search, tune
from rpbench.plan.contest.sketch import Sketch, Sketcher

BUDGET = Budget(60, 100_000)


def basis_of(case):
    costs = read("cost/analytic.yaml")
    return make_basis(case.cluster, costs["constants"], costs["declared"])


def after(questions):
    """Says that time is over from the so many-th question on."""
    asked = count(1)
    return lambda: next(asked) > questions


@pytest.mark.parametrize("questions", [0, 1, 2, 3, 5, 8, 13])
def test_a_search_that_is_cut_short_has_a_plan_and_says_so(questions):
    case = small()
    whole = tune(contender("interleaved_1f1b"), case, BUDGET, is_over=lambda: False)
    cut = tune(contender("interleaved_1f1b"), case, BUDGET, is_over=after(questions))
    assert whole.is_whole
    assert not cut.is_whole
    assert cut.num_steps == 2  # nobody ran all of them
    assert cut.work <= whole.work
    assert 0 < cut.outcome.tokens_per_s <= 1.001 * whole.outcome.tokens_per_s


def test_what_was_sketched_is_timed_though_time_ended():
    """Two microbatches of two sequences are faster here than four of one, by their sketches and by their timelines."""
    case, sketches = small(sequences_per_step=4), 1_000
    space = space_of(contender("1f1b"), case)
    one = space.restricted(microbatch_sequences=[1])
    search = Search(contender("1f1b"), case, BUDGET, one, is_over=lambda: len(search.sketcher._known) > sketches)
    search.look()
    search.space = space
    first, before, sketches = search.best().setting, search.best_pace(), len(search.sketcher._known)
    search.finish()
    assert first.microbatch_sequences == 1
    assert search.best().setting == first.changed("microbatch_sequences", 2)
    assert search.best_pace() > before
    assert not search.has_ended


@pytest.mark.parametrize(
    ("paces", "promised"),
    [
        ({1: 3, 2: 2, 4: 1, 8: 1}, [1, 2]),  # the smaller is faster: no larger one is sketched
        ({1: 1, 2: 1, 4: 2, 8: 3}, [8, 2]),  # slower: none that is smaller still
        ({1: 1, 2: 0, 4: 0, 8: 0}, [1, 2]),  # nothing fits: smaller ones only
    ],
)
def test_sizes_are_sketched_as_long_as_they_get_faster(monkeypatch, paces, promised):
    case = small(sequences_per_step=32)
    who = contender("1f1b")
    sketcher, space = Sketcher(who, case, 1_000), space_of(who, case).restricted(microbatch_sequences=[4, 8, 2, 1])
    sketch = Sketch((), 1.0)
    monkeypatch.setattr(
        sketcher, "of", lambda setting: sketch._replace(tokens_per_s=paces[setting.microbatch_sequences])
    )
    found = sketcher.by_promise(space.first, space)
    assert [each.microbatch_sequences for each in found] == promised


def test_where_time_counts_the_first_timeline_is_of_the_size_that_sketches_best():
    search = Search(contender("1f1b"), small(sequences_per_step=4), BUDGET, is_over=lambda: False)
    search.look()
    assert search.best().setting.microbatch_sequences == 2
    assert search.frames.num_made == 1


def test_a_look_that_time_cut_short_is_done_again():
    """Of a cut that does not fit, layers go to other stages once there is time: what is known by then is no verdict."""
    is_over, case = True, small(2_000_000_000)
    search = Search(contender("v_half"), case, BUDGET, is_over=lambda: is_over)
    setting = search.space.first.changed("recompute", "all")
    assert not search._look_at(setting).outcome.fits
    timed, is_over = search.num_timed, False
    search._look_at(setting)
    assert search.num_timed > timed
    timed = search.num_timed
    search._look_at(setting)
    assert search.num_timed == timed


@pytest.mark.parametrize("work", [60, 6_000])
def test_what_time_cut_short_keeps_its_outcome_whatever_rules_it_out_later(monkeypatch, work):
    """A spent budget, a bound, or a refusal of others with the same options: none tells how much it lacks."""
    is_over, case = True, small(2_000_000_000)
    search = Search(contender("v_half"), case, Budget(work, 100_000), is_over=lambda: is_over)
    setting, other = (search.space.first.changed("recompute", each) for each in ("all", "none"))
    known = search._look_at(setting)
    assert not known.outcome.fits
    is_over = False
    search._look_at(other)
    monkeypatch.setattr(search.bounds, "pace", lambda setting: -1.0)
    assert search.is_spent() == (work == 60)
    assert [search._is_worth(setting, other) for _ in range(2)] == [False, False]
    assert search.tried[setting] == known
    search._refused[setting.recompute, setting.options] = "refused: another size"
    assert [search._look_at(setting) for _ in range(2)] == [known, known]


def test_the_least_bytes_of_whole_layers_are_those_of_the_smallest_microbatch():
    """A larger one leaves less room for its layers: that it weighs too much says nothing of smaller ones."""
    case, who = small(sequences_per_step=32), contender("zero_2")
    space, frames = space_of(who, case), Frames(contender("zero_2"), case)
    sketcher = Sketcher(who, case, 1_000)
    settings = [space.first.changed("microbatch_sequences", size) for size in (1, 4)]
    small_one, large_one = (frames.of(each, sketcher.of(each).cuts[0], 2) for each in settings)
    assert small_one.least_bytes == large_one.least_bytes


def test_a_sketch_of_overlapping_steps_leaves_out_the_filling():
    """Between steps that overlap lies what the slower device computes: 2BW never drains."""
    case, who = small(), contender("pipedream_2bw")
    setting = space_of(who, case).first.changed("recompute", "all")
    sketcher, times = Sketcher(who, case, 100_000), case.times(setting.microbatch_sequences)
    sketch = sketcher.of(setting)
    first, second = sketch.cuts[0].forward
    each = [*zip(times.forward, times.recompute, times.backward, strict=True)]
    busy = sum(map(sum, each[:first])), sum(map(sum, each[first:])) + times.head_forward + times.head_backward
    step_s = case.num_microbatches(setting.microbatch_sequences) * float(max(busy)) / times.units_per_second
    assert sketcher.overlaps(setting)
    assert first + second == len(each)
    assert sketch.tokens_per_s == pytest.approx(case.tokens(case.sequences_per_step) / step_s, rel=1e-3)


@pytest.mark.parametrize("is_over", [None, lambda: False])
def test_a_refused_recomputation_is_refused_once_whatever_the_sizes(is_over):
    search = Search(contender("seq1f1b"), small(), BUDGET, is_over=is_over)
    search.look()
    assert search.frames.num_made == 1


class Told:
    """A search whose turns are told: its pace, behind each turn; what devices compute allows 100, its bound less."""

    best_pace, has_ended = (lambda self: self.pace), False
    contender = SimpleNamespace(entry=SimpleNamespace(needs_costs=False))

    def __init__(self, name, turns, *paces, bound=100.0):
        self.name, self.turns, (self.pace, *self.later) = name, turns, paces
        self.bounds = SimpleNamespace(settings=lambda: [None], loose_pace=lambda _: 100.0, best_pace=lambda _: bound)

    def finish(self, to_beat, *, everywhere):
        self.turns.append(self.name)
        self.pace = self.later.pop(0) if self.later else self.pace


def test_whoever_may_gain_most_has_the_next_turn(monkeypatch):
    """Who has no plan, then by what is left to the bound; who gained nothing waits, who is far behind comes late."""
    turns = []
    told = [
        Told("done", turns, 99.0),
        Told("near", turns, 90.0),
        Told("bounded", turns, 50.0, bound=50.5),
        Told("gains", turns, 60.0, 80.0),
        Told("far behind", turns, 10.0),
        Told("no plan", turns, 0.0),
    ]
    share = Share([], range(6), None, None, None)
    share.searches, share._seconds = dict(enumerate(told)), 100.0
    monkeypatch.setattr(share, "_begin_light", lambda search: None)
    monkeypatch.setattr(share, "_borrow", lambda number: None)
    monkeypatch.setattr(Clock, "spent", property(lambda clock: float(len(turns))))
    share._take_turns(range(6), 90.0, 5.0)
    assert turns == ["no plan", "gains", "no plan", "far behind", "gains"]
    share._take_turns(range(6), 90.0, 100.0)
    assert set(turns) == {"no plan", "gains", "near", "far behind"}  # and it ends: nobody is worth a turn any more


@pytest.mark.parametrize(("name", "num_cuts", "work"), [("zb_v", 3, 1), ("1f1b", 1, BUDGET.work)])
def test_cuts_with_orders_of_their_own_are_each_begun_with(monkeypatch, name, num_cuts, work):
    """Of other schedules one cut serves: its order is that of all, and layers move from there."""
    case, begun = small(100_000_000), []  # nothing fits
    search = Search(contender(name), case, BUDGET)
    search.look()
    monkeypatch.setattr(search, "climb_from", lambda *words: begun.append(words))
    share = Share([search.contender], [0], case, BUDGET, None)
    share._seconds = 1e6
    share._begin_light(search)
    assert len({cut for _, cut, _ in begun}) == num_cuts
    assert {(setting.microbatch_sequences, spent) for setting, _, spent in begun} == {(min(case.microbatches), work)}


def test_a_frame_that_is_refused_is_never_timed():
    case = small()
    search = Search(contender("megatron_tp"), case, BUDGET, is_over=lambda: False)
    first = search.space.first.changed("recompute", "none")
    assert "refused" in search._look_at(first).remark
    (frame,) = search.frames._known.values()
    assert "graph" not in vars(frame)


def test_heads_that_do_not_divide_leave_a_contender_out():
    case = small(num_devices=3)
    rows = advise(case, basis_of(case), names=["megatron_tp", "1f1b"], budget=BUDGET)
    assert [row.plan.contender.name for row in rows.ranking] == ["1f1b"]
    assert "num_devices=3 of 8 heads" in rows.left_out["megatron_tp"]


def test_only_the_frame_of_a_plan_is_kept_and_serves_more_memory():
    case = small(2_000_000_000)
    frames = Frames(contender("1f1b"), case)
    plan = tune(contender("1f1b"), case, BUDGET, frames=frames)
    made = frames.num_made
    frames.keep_only(plan.setting, plan.partition, plan.num_steps or case.num_steps)
    assert frames.of_plan(plan).outcome(plan.partition, plan.setting.recompute) == plan.outcome
    assert frames.num_made == made
    roomy = small()
    known = frames.under(roomy)
    outcome = known.of_plan(plan).outcome(plan.partition, "fitting")
    assert known.num_made == 0
    assert outcome.misfit == 0 < plan.outcome.misfit
    assert outcome == Frames(contender("1f1b"), roomy).of_plan(plan).outcome(plan.partition, "fitting")


def test_what_is_proven_not_to_fit_is_looked_at_once():
    light, heavy = (Search(contender("1f1b"), small(limit), BUDGET) for limit in (2_000_000_000, 100_000_000))
    for search in (light, heavy):
        search.look()
        search.finish()
    assert heavy.best_pace() == 0 < light.best_pace()
    assert heavy.least[0] > 100_000_000
    assert heavy.num_timed < light.num_timed


def finished(share, seconds):
    """The rows of a share that has so long."""
    loans = share.go_by_turns(share.numbers, None, seconds, [])
    return share.finish(None, loans).values()


def test_a_share_without_time_looks_at_nobody_and_with_little_finishes_nobody():
    case = small()
    share = Share(
        [contender("1f1b"), contender("gpipe")], [0, 1], case, BUDGET, lambda plan, frames: Misfit(plan, 0, 0, False)
    )
    found, _ = share.look(-1.0)
    assert {glance.remark for glance in found.values()} == {OUT_OF_TIME}
    found, _ = share.look(1e9)
    assert all(glance.pace > 0 and glance.hope >= glance.pace for glance in found.values())
    assert not any(row.plan.is_whole for row in finished(share, 0.0))
    assert all(row.plan.is_whole for row in finished(share, 1e9))


def test_no_time_at_all_names_whom_nobody_looked_at():
    case = small()
    with pytest.raises(ValueError, match="give more seconds"):
        advise(case, basis_of(case), names=("1f1b", "gpipe"), budget=BUDGET, seconds=-1.0)


def test_a_clock_ends_when_it_is_told():
    clock = Clock()
    assert not clock.is_over()
    clock.allow(-1.0)
    assert clock.is_over()


def test_an_order_that_is_refused_is_told_before_the_time_that_was_over(monkeypatch):
    """A generator that is wrong in its order, whose first setting took all the time."""
    search = Search(contender("1f1b"), small(), BUDGET, is_over=lambda: bool(search._refused))

    def refuse(frame, recompute):
        raise ValueError("no rank can move on")

    monkeypatch.setattr(Frame, "check", refuse)
    with pytest.raises(ValueError, match=r"refused: no rank can move on; .* the time was over; give more seconds"):
        search.look()
