"""Advice: seconds that add up to the step, the order of the ranking, what turns it, what does not fit."""

import json
from dataclasses import replace
from functools import partial

import pytest
from contest_terms import read, small, terms

from rpbench.advice.causes import CAUSES, causes_of
from rpbench.advice.interval import compute_reach
from rpbench.advice.levers import changes, levers_of, pace_with_twice_the_memory, timed, turns_of
from rpbench.advice.ranking import QUICK, advise
from rpbench.advice.rows import command_of
from rpbench.cost.hardware.basis import make_basis
from rpbench.ir.partition import symmetric
from rpbench.plan.contest.contender import contender
from rpbench.plan.contest.frame import Frame
from rpbench.plan.contest.plans import Budget
from rpbench.plan.contest.search import tune
from rpbench.plan.contest.space import space_of

NAMES = ("1f1b", "gpipe", "zb_h1", "roundpipe", "data_parallel")


def basis_of(case):
    costs = read("cost/analytic.yaml")
    return make_basis(case.cluster, costs["constants"], costs["declared"])


@pytest.fixture(scope="module")
def advice():
    case = small(1_500_000_000, microbatches=(1,))
    return advise(case, basis_of(case), names=NAMES, budget=Budget(60, 100_000))


def framed(name, case, cut):
    who = contender(name)
    setting = space_of(who, case).first
    return Frame(who, setting, case, cut, case.num_steps)


@pytest.mark.parametrize("name", ["1f1b", "chimera", "zero_2", "mobius"])
def test_causes_add_up_to_the_step(name):
    case = small(microbatches=(1,))
    cut = symmetric((2, 1, 2, 1) if name in ("zero_2", "mobius") else (3, 3))
    frame = framed(name, case, cut)
    found = causes_of(frame, cut, ())
    assert tuple(found) == CAUSES
    assert sum(found.values()) == pytest.approx(frame.outcome(cut, "all").step_time_s)
    assert min(found.values()) > -1e-3 * sum(found.values())
    assert (found["collectives"] > 0) == (name in ("chimera", "zero_2"))


def test_work_is_the_layers_own():
    case, cut = small(microbatches=(1,)), symmetric((3, 3))
    found = causes_of(framed("1f1b", case, cut), cut, ())
    times = case.times(1)
    each = 8 / 2  # microbatches of a step, over devices
    plain = sum(times.forward) + sum(times.backward) + times.head_forward + times.head_backward
    assert found["computation"] == pytest.approx(plain * each)
    assert found["recomputation"] == pytest.approx(sum(times.recompute) * each)
    assert causes_of(framed("1f1b", case, cut), cut, (0, 1))["recomputation"] == 0


def test_with_links_of_no_time_nothing_is_held_up():
    case, cut = small(microbatches=(1,)), symmetric((3, 3))
    fast = replace(case.cluster, copy_bytes_per_s=1e18, host_to_device_bytes_per_s=1e18, host_bytes_per_s=1e18)
    found = causes_of(framed("1f1b", replace(case, cluster=fast), cut), cut, ())
    assert found["transfers"] == pytest.approx(0, abs=1e-6)
    assert causes_of(framed("1f1b", case, cut), cut, ())["transfers"] > 1e-5


def test_the_ranking_falls_and_says_why(advice):
    paces = [row.plan.outcome.tokens_per_s for row in advice.ranking]
    assert paces == sorted(paces, reverse=True)
    every = (*advice.ranking, *advice.ranking_late, *advice.does_not_fit)
    assert {row.plan.contender.name for row in every} == {*NAMES, "roundpipe(asynchronous=True)"}
    assert not any(row.staleness_steps for row in advice.ranking)
    assert all(row.staleness_steps for row in advice.ranking_late)
    for row in (*advice.ranking, *advice.ranking_late):
        assert row.low < row.plan.outcome.tokens_per_s < row.high
        assert sum(row.why.values()) == pytest.approx(row.plan.outcome.step_time_s)
        assert 0 <= row.bubble < 1
        assert row.staleness_steps == ("asynchronous" in row.plan.contender.name)
    for row in advice.does_not_fit:
        assert row.device_lacks_bytes == row.plan.outcome.peak_bytes - 1_500_000_000 > 0


def test_it_is_json_with_the_fields_that_were_promised(advice):
    plain = json.loads(json.dumps(advice.plain()))
    promised = {
        "schedule",
        "options",
        "tokens_per_s",
        "tokens_per_s_low",
        "tokens_per_s_high",
        "peak_memory_bytes",
        "staleness_steps",
        "why",
        "command",
    }
    assert promised <= plain["ranking"][0].keys()
    assert {"ranking", "does_not_fit", "levers"} <= plain.keys()
    assert plain["ranking"][0]["command"].startswith("python -m rpbench schedule=")


def test_processes_side_by_side_find_the_same(advice):
    both = advise(advice.terms, basis_of(advice.terms), names=NAMES, budget=Budget(60, 100_000), processes=2)
    assert both.plain() == advice.plain()


def test_levers_and_turns_hold_when_tried():
    case = small(microbatches=(1,))
    first, second = (timed(tune(contender(name), case, QUICK), case) for name in ("1f1b", "gpipe"))
    if first.plan.outcome.tokens_per_s < second.plan.outcome.tokens_per_s:
        first, second = second, first
    roomy = partial(pace_with_twice_the_memory, first.plan, case, QUICK)
    levers = {lever.name: lever for lever in levers_of(first, case, roomy)}
    assert 1.5 < levers["devices twice as fast"].gain + 1 <= 2
    assert levers["one more microbatch a step"].tokens_per_s > 0
    for turn in turns_of(first, second):
        if turn.factor is not None:
            change = changes()[turn.name](turn.factor)
            assert second.pace(change) > first.pace(change)


def test_published_times_are_surer_than_counted_ones():
    case = terms()
    basis = basis_of(case)
    measured, counted = (compute_reach(each, 8192, basis) for each in (case, replace(case, source="analytic")))
    assert measured == pytest.approx(0.01645)
    assert counted > measured


def test_nobody_left_is_an_error():
    case = small(num_devices=3, sequences_per_step=9, microbatches=(1,))
    with pytest.raises(ValueError, match="even number"):
        advise(case, basis_of(case), names=("chimera",))


def test_the_command_has_the_plan():
    case = small(microbatches=(1,))
    plan = tune(contender("seq1f1b"), case, Budget(60))
    words = command_of(plan, case)
    assert f'partition="{plan.partition}"' in words
    assert f"schedule.num_segments={dict(plan.setting.options)['num_segments']}" in words
