"""Whole plans: simulated as they would run, searched over cuts and options together, all with the same budget."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rpbench.cost.table import LayerTimes
from rpbench.ir.action import Kind
from rpbench.ir.checks.check import check
from rpbench.ir.partition import symmetric
from rpbench.plan.problem import Problem
from rpbench.plan.whole import best_plans, evaluate_whole
from rpbench.registry import entry
from rpbench.sim.longest_path import simulate

NAMES = ("1f1b", "gpipe", "interleaved_1f1b", "looped_bfs", "roundpipe")


def problem(name: str, layers: int = 6, head: float = 4.0, devices: int = 2, microbatches: int = 4) -> Problem:
    times = LayerTimes(
        [1.0] * layers, [1.0] * layers, [2.0] * layers, head, head / 2, step=[0.5] * layers, head_step=1.0
    )
    return Problem(entry(name), times, devices, microbatches, num_steps=2)


def best(*given, **options):
    return best_plans(*given, **options)[0]


@pytest.mark.parametrize("name", NAMES)
def test_a_larger_budget_finds_nothing_worse(name):
    found = best(problem(name), 40)
    check(found.schedule)
    assert found.makespan == simulate(found.schedule, found.costs).makespan
    assert found.makespan <= best(problem(name), 5).makespan
    assert found.num_evaluated <= 40


def test_a_pipeline_of_two_gets_the_cut_that_no_other_beats():
    posed = problem("1f1b")
    cuts = (symmetric((cut, 6 - cut)) for cut in range(7))
    every = [evaluate_whole(posed, cut, "round_robin", {}).makespan for cut in cuts]
    assert best(posed, 100).makespan == min(every) < max(every)


@pytest.mark.parametrize("dispatch", ["round_robin", "dynamic"])
def test_steps_are_on_the_compute_lanes_and_take_their_time(dispatch):
    found = best(problem("roundpipe"), 30, dispatch=dispatch)
    assert {lane for _, lane, _ in found.schedule.items()} == {"compute"}
    steps = [a for _, _, row in found.schedule.items() for a in row if a.kind is Kind.STEP]
    assert sum(found.costs.of(Kind.STEP, step.stage).main for step in steps) == pytest.approx(2 * (6 * 0.5 + 1.0))


def test_the_fused_stage_holds_the_head_alone():
    assert best(problem("roundpipe", head=0.5), 40).schedule.partition.num_layers_fused == 0


def test_only_a_last_stage_that_goes_back_at_once_is_kept():
    for name in NAMES:
        found = best(replace(problem(name), keeps_last=True), 40)
        again = [work.pre for work in found.costs.work[Kind.B]]
        layers = found.schedule.partition.backward
        assert found.keeps_last is ("1f1b" in name), name
        assert again == [*layers[:-1], 0 if found.keeps_last else layers[-1]]


def test_a_fused_stage_may_then_hold_layers():
    posed = replace(problem("roundpipe", head=0.5), keeps_last=True)
    assert best(posed, 200).schedule.partition.num_layers_fused > 0


def test_the_round_size_is_searched_with_the_cuts():
    choices = [{"round_size": size} for size in (1, 2, 4)]
    found = best(problem("roundpipe"), 60, choices=choices)
    alone = [best(problem("roundpipe"), 20, choices=[choice]).makespan for choice in choices]
    assert found.options in choices
    assert found.makespan <= min(alone)


@settings(deadline=None, max_examples=20)
@given(layers=st.integers(2, 7), devices=st.integers(1, 3), rounds=st.integers(1, 2), name=st.sampled_from(NAMES))
def test_whatever_is_found_can_run(layers, devices, rounds, name):
    posed = problem(name, layers, devices=devices, microbatches=devices * rounds)
    check(best(posed, 4).schedule)


def test_what_cannot_be_built_is_said():
    with pytest.raises(ValueError, match="14 microbatches through 4 ranks"):
        best(problem("interleaved_1f1b", layers=12, devices=4, microbatches=14), 20)
    with pytest.raises(ValueError, match="budget=0: at least 1"):
        best(problem("1f1b"), 0)
