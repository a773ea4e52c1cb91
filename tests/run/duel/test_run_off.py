"""The run-off: the plan that runs fastest is chosen, each on its own engine, and never by too little."""

import json
from dataclasses import replace
from functools import cache
from random import Random

import pytest

from rpbench.config.loading import load
from rpbench.run.modes.duel import plans as module
from rpbench.run.modes.duel.contenders import BASE, contenders
from rpbench.run.modes.duel.plans import (
    LEAST_COMPARISONS,
    MOST_PLANS,
    NEAR,
    Raced,
    chosen,
    complete,
    described,
    plans_text,
    problem_of,
    run_off,
    shortlists,
)
from rpbench.run.modes.duel.verdict import Started

ENTRANTS = contenders("gpipe+roundpipe+torch_1f1b+limit")


@cache
def asked():
    model = ("model=tiny_gpt", "model.num_layers=5", "cost=constant")
    return load(["experiment=cpu_duel", *model, "mode.run_off_s=7", "mode.search_budget=60", "mode.recompute=all"])


@pytest.fixture
def listed():
    return shortlists(asked(), ENTRANTS)


@pytest.fixture(autouse=True)
def sound(monkeypatch):
    """Everybody trains as plain training does, on as many cores as it takes."""
    monkeypatch.setattr(module, "check_parity", lambda job, _: {each.name: {"parity": True} for each in job.entrants})
    monkeypatch.setattr(module, "usable_cores", lambda: [0, 1])


def playing(jobs, seconds, num=12, others=0.0):
    """A start in which every entrant takes the seconds that it should, give or take a hundredth.

    The machine takes half as long again in every other turn.
    """

    def start(job):
        jobs.append(job)
        columns, draw, number = {}, Random(3), len(job.entrants)
        for place, entrant in enumerate(job.entrants):
            took = [seconds(entrant, job) * draw.uniform(0.99, 1.01) * (1.5 - turn % 2 / 2) for turn in range(num)]
            at = [number * turn + place + 0.5 * draw.random() for turn in range(num)]
            columns[entrant.name] = {"at_s": at, "wall_s": took, "elapsed_s": took, "others_s": [others] * num}
        return Started({}, columns)

    return start


def slow_at_first(entrant, job):
    """A contender's second plan takes nine tenths of the time of the others."""
    return 0.9 if entrant.name.endswith("plan 2") else 1.0


def test_plans_are_near_the_best_and_no_two_are_the_same(listed):
    assert set(listed) == {BASE, "gpipe", "roundpipe", "torch_1f1b"}, "who has a search of its own"
    assert max(map(len, listed.values())) > 1
    for plans in listed.values():
        assert 1 <= len(plans) <= MOST_PLANS
        makespans = [plan.makespan for plan in plans]
        assert makespans == sorted(makespans)
        assert makespans[-1] <= (1 + NEAR) * makespans[0]
        assert len({(plan.schedule.partition, str(plan.options)) for plan in plans}) == len(plans)


def test_the_fastest_runs_and_everybody_else_is_given_the_same_chance(listed):
    jobs = []
    raced = run_off(asked(), ENTRANTS, listed, playing(jobs, slow_at_first))
    (job,) = jobs
    assert job.budget_s == 7
    assert [name for family in job.families for name in family] == [each.name for each in job.entrants]
    assert [len(family) for family in job.families] == [len(plans) for plans in listed.values() if len(plans) > 1]
    assert all(name == f"{family[0][:-1]}{place}" for family in job.families for place, name in enumerate(family, 1))
    assert {each.engine for each in job.entrants if each.name.startswith("torch_1f1b")} <= {"torch"}
    for name, plans in raced.items():
        assert [each.plan for each in plans] == list(listed[name])
        if len(plans) > 1:
            assert chosen(plans) is plans[1]
            assert chosen(plans).speed == pytest.approx(1 / 0.9, rel=0.02)
            assert chosen(plans).error < 0.01, "which the machine's wandering has no part in"
            assert plans[0] == Raced(listed[name][0]), "who is held against itself is not timed"
    plans = complete(ENTRANTS, {name: chosen(own).plan for name, own in raced.items()})
    assert plans["1f1b_twin_2"] is plans[BASE] is chosen(raced[BASE]).plan
    assert plans["limit"].makespan <= plans["roundpipe"].makespan


def test_what_is_faster_by_luck_alone_is_not_chosen(listed):
    first, second = Raced(listed[BASE][0]), Raced(listed[BASE][1], 1.0, 0.03, 9)
    for speed, expected in ((1.05, first), (1.07, None), (0.5, first)):  # two standard errors are 6.2 %
        other = replace(second, speed=speed)
        assert chosen([first, other]) is (expected or other)
    assert chosen([first, replace(second, speed=1.5, num_comparisons=LEAST_COMPARISONS - 1)]) is first
    assert chosen([first, Raced(second.plan)]) is first


def test_engines_may_choose_differently(listed):
    assert len(listed[BASE]) > 1
    raced = run_off(
        asked(), ENTRANTS, listed, playing([], lambda each, job: 0.9 if each.name == "torch_1f1b, plan 2" else 1.0)
    )
    assert chosen(raced["torch_1f1b"]).plan.schedule.partition == listed[BASE][1].schedule.partition
    assert raced[BASE][1].speed == pytest.approx(1, rel=0.02)


@pytest.mark.parametrize(("num", "others"), [(LEAST_COMPARISONS - 1, 0.0), (12, 0.3)])
def test_too_few_or_spoilt_comparisons_choose_nothing(listed, num, others):
    raced = run_off(asked(), ENTRANTS, listed, playing([], slow_at_first, num, others))
    assert all(chosen(plans) is plans[0] for plans in raced.values())


def test_a_plan_that_does_not_train_as_plain_training_does_is_not_timed(listed, monkeypatch):
    def parities(job, _):
        return {each.name: {"parity": each.name != "1f1b, plan 2"} for each in job.entrants}

    monkeypatch.setattr(module, "check_parity", parities)
    raced = run_off(asked(), ENTRANTS, listed, playing([], slow_at_first))
    assert raced[BASE][1].speed is None
    assert chosen(raced[BASE]) is raced[BASE][0]
    assert "not timed" in described(BASE, raced[BASE])
    jobs = []
    monkeypatch.setattr(
        module, "check_parity", lambda job, _: {e.name: {"parity": not e.name.endswith("plan 1")} for e in job.entrants}
    )
    assert run_off(asked(), ENTRANTS, listed, playing(jobs, slow_at_first)).keys() == listed.keys()
    assert not jobs, "nobody to compare with"


def test_nothing_is_played_without_a_choice_or_a_core_each(listed, monkeypatch):
    alone = {name: plans[:1] for name, plans in listed.items()}
    jobs = []
    assert run_off(asked(), ENTRANTS, alone, playing(jobs, slow_at_first)) == {
        name: [Raced(plans[0])] for name, plans in alone.items()
    }
    monkeypatch.setattr(module, "usable_cores", lambda: [0])
    run_off(asked(), ENTRANTS, listed, playing(jobs, slow_at_first))
    assert not jobs


def test_the_file_of_plans_says_what_was_chosen_from(listed):
    raced = run_off(asked(), ENTRANTS, listed, playing([], slow_at_first))
    plans = complete(ENTRANTS, {name: chosen(own).plan for name, own in raced.items()})
    found = json.loads(plans_text(problem_of(asked(), ENTRANTS[0]).times, plans, raced))["plans"]
    assert found[BASE]["partition"] == found[BASE]["run_off"][1]["partition"] != found[BASE]["run_off"][0]["partition"]
    assert [each["speed"] for each in found[BASE]["run_off"]] == [each.speed for each in raced[BASE]]
    assert found["limit"]["run_off"] == []
