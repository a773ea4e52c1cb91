"""Spaces and terms of a contest: what a contender may choose, sizes of microbatches, and what is refused."""

from dataclasses import replace

import pytest
from contest_terms import small, terms

from rpbench.plan.contest.contender import Space, contender, contenders, space_of, terms_for
from rpbench.plan.contest.plans import Budget
from rpbench.plan.contest.search import Search, tune
from rpbench.plan.contest.terms import default_microbatches, few_microbatches


def test_spaces_offer_what_a_schedule_declares():
    case = terms(microbatches=(2, 4))
    assert space_of(contender("roundpipe"), case).dimensions["schedule.round_size"] == (32, 16, 8, 4)
    assert space_of(contender("seq1f1b"), case).dimensions["schedule.num_segments"] == (2, 4, 8, 1)
    assert set(space_of(contender("interleaved_1f1b"), case).dimensions["chunks_per_device"]) == {1, 2, 3, 4}
    assert space_of(contender("zb_v"), case).dimensions["chunks_per_device"] == (2,)
    assert set(space_of(contender("1f1b"), case).dimensions["microbatch_sequences"]) == {2, 4}
    late = space_of(contender("roundpipe", late=True), case)
    assert ("asynchronous", True) in late.first.options
    assert not any("asynchronous" in name for name, _ in late.changes(late.first))


@pytest.mark.parametrize("name", ["pipedream", "megatron_tp", "1f1b", "zero_3", "pipedream_2bw"])
def test_fewer_microbatches_than_devices_are_for_those_that_fill_no_pipeline_in_a_step(name):
    case, who = replace(terms(microbatches=(1, 2, 4, 8)), may_be_few=True), contender(name)
    own = terms_for(who, case)
    assert own.microbatches == ((1, 2, 4, 8, 16, 32, 64) if name in ("pipedream", "megatron_tp") else (1, 2, 4, 8))
    assert terms_for(who, own) is own
    assert set(space_of(who, case).dimensions["microbatch_sequences"]) == set(own.microbatches)
    assert Search(who, case, Budget(), is_over=lambda: False).terms == own
    assert terms_for(who, terms(microbatches=(1, 2, 4, 8))).microbatches == (1, 2, 4, 8), "the sizes were given"
    few = [few_microbatches(*each) for each in ((64, 8), (64, 1), (5, 8), (24, 8))]
    assert few == [(16, 32, 64), (), (5,), (6, 12, 24)]


@pytest.mark.parametrize("sequences, steps", [(4, 1), (8, 1), (16, 2), (32, 4), (64, 8)])
def test_few_microbatches_fill_the_devices_in_several_steps(sequences, steps):
    assert terms().steps_to_fill(sequences) == steps


def test_every_schedule_has_a_space():
    case = terms()
    for who in contenders():
        first = space_of(who, case).first
        assert dict(first.options).keys() == who.entry.options.keys()


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: terms(microbatches=()), "at least 1 size"),
        (lambda: terms(microbatches=(5,)), "5 does not divide the 64"),
        (lambda: terms(num_devices=9), "has 8"),
        (lambda: terms(num_steps=2), "take 3 or more"),
        (lambda: terms(num_devices=0), "num_devices=0: a whole number of at least 1"),
        (lambda: terms(sequences_per_step=0), "sequences_per_step=0: a whole number of at least 1"),
        (lambda: Space({"recompute": ()}), "no values to search over"),
        (lambda: space_of(contender("1f1b"), terms()).restricted(rounds=[1]), "rounds is no dimension"),
        (lambda: contender("1f1b", late=True), "no late update"),
        (lambda: Budget(work=0), "at least 1 each"),
        (lambda: tune(contender("chimera"), small(num_devices=3)), "no setting can be built; refused: chimera's two"),
    ],
)
def test_what_cannot_be_is_refused(make, says):
    with pytest.raises(ValueError, match=says):
        make()


def test_sizes_of_microbatches_leave_one_to_thirty_two_for_a_device():
    assert default_microbatches(64, 8) == (1, 2, 4, 8)
    assert default_microbatches(512, 8) == (2, 4, 8, 16, 32, 64)
    assert default_microbatches(3, 8) == (1,)


def test_published_times_of_another_size_follow_the_count():
    case = terms(microbatches=(4, 8))
    four, eight = case.times(4), case.times(8)
    assert eight.hop == 2 * four.hop
    assert 1.9 < eight.forward[0] / four.forward[0] < 2.1
    assert eight.input_grad[0] + eight.weight_grad[0] == pytest.approx(eight.backward[0], rel=0.05)
