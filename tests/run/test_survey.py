"""Survey: what calibrations predict of a plan is the plan simulated at the costs of the calibrated machine."""

from dataclasses import replace
from functools import cache

import pytest
from test_calibrate import RATES, cost, made_up

from rpbench.config.loading import load
from rpbench.cost.hardware.basis import make_basis
from rpbench.ir.partition import parse
from rpbench.mesh.layers.layer_times import setting_of, times_of
from rpbench.plan.whole import evaluate_whole
from rpbench.run.modes.duel.contenders import contenders
from rpbench.run.modes.duel.plans import problem_of
from rpbench.run.modes.duel.summary import Survey
from rpbench.sim.longest_path import simulate

ASKED = ("model=tiny_gpt", "model.num_layers=4", "num_devices=2", "num_microbatches=4", "num_steps=2", "cost=constant")
TOKENS = 16


@cache
def asked():
    return load(ASKED)


def plan_of(name, cut, *, keeps_last=False):
    problem = problem_of(asked(), next(each for each in contenders() if each.name == name), keeps_last=keeps_last)
    return evaluate_whole(problem, parse(cut), "round_robin", {})


@pytest.fixture(scope="module")
def survey():
    slower = replace(made_up(), rates=replace(RATES, memory_bytes_per_s=1e10))
    found = Survey(iter([made_up(), slower]).__next__, asked().model, TOKENS, 2)
    found()
    found()
    return found


@pytest.mark.parametrize(
    ("name", "cut", "keeps_last"),
    [("1f1b", "2-2", False), ("1f1b", "2-2", True), ("gpipe", "2-2", True), ("roundpipe", "1-3|2-2-0*", False)],
)
def test_a_prediction_is_the_plan_at_the_machine_s_costs(survey, name, cut, keeps_last):
    plan = plan_of(name, cut, keeps_last=keeps_last)
    for makespan, busy, (_, cluster) in zip(
        survey.makespans(plan), survey.makespans(plan, waits=False), survey.found, strict=True
    ):
        times = times_of(
            setting_of(asked().model, TOKENS, make_basis(cluster, cost().constants, cost().declared), "engine")
        )
        table = times.table(
            plan.schedule.partition,
            recompute_ahead=name == "roundpipe",
            fused_ahead=asked().cost.fused_ahead,
            keeps_last=plan.keeps_last,
        )
        timeline = simulate(plan.schedule, table)
        assert makespan == float(timeline.makespan)
        assert busy == pytest.approx(sum(float(span.end - span.start) for span in timeline.spans()) / 2)
        assert busy < makespan


def test_what_a_last_stage_keeps_it_does_not_recompute(survey):
    all_again, kept = (survey.makespans(plan_of("1f1b", "2-2", keeps_last=keeps)) for keeps in (False, True))
    assert all(one < other for one, other in zip(kept, all_again, strict=True))


def test_calibrations_say_what_others_did_and_the_first_is_the_file(survey):
    assert survey.foreign_cores == [0.25, 0.25]
    text = survey.first_file()
    assert "name: this_machine" in text
    assert "memory_bytes_per_s: 2.000000e+10" in text
