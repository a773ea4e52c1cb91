"""The search: never worse than where it starts, near the optimum where that is known, within memory."""

from contextlib import suppress
from dataclasses import replace
from itertools import combinations, product

import numpy as np
import pytest
from evaluated import evaluate, graph_of, plan
from hypothesis import given, settings
from problems import MODELS, SCHEDULES, load, published, random_problems, small, uniform
from spared import spared

from rpbench.config.loading import load as request_of_words
from rpbench.cost.footprint.sizes import DeviceMemory, LayerSize, ModelBytes, model_bytes
from rpbench.ir.partition import symmetric
from rpbench.plan.contest.contender import Contender
from rpbench.plan.contest.plans import Budget
from rpbench.plan.contest.sketch import Sketcher
from rpbench.plan.search import _space, _terms, plan_search
from rpbench.run.assemble import pose
from rpbench.sim.batch import PlanBatch
from rpbench.sim.graph import build_graph

QUICK = 20_000_000  # actions: enough for the bars, a fraction of the default


@settings(deadline=None, max_examples=40)
@given(problem=random_problems())
def test_search_is_never_worse_than_its_seeds(problem):
    found = plan("search", problem, budget=1_000_000)
    found.partition.check_layers(problem.num_layers)
    for method in ("even", "greedy"):
        with suppress(ValueError):  # no even partition of fewer layers than devices
            assert found.makespan <= plan(method, problem).makespan * (1 + 1e-9)


@pytest.mark.parametrize("model", spared(MODELS, lambda model: model in ("llama-3.1-8b", "qwen3-235b-lora")))
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_search_on_the_published_models(schedule, model):
    problem = published(schedule, model)
    found = plan("search", problem, budget=QUICK)
    rivals = {method: plan(method, problem).makespan for method in ("published", "even", "greedy")}
    assert found.makespan <= min(rivals.values()) * (1 + 1e-12), rivals


@pytest.mark.parametrize(
    "schedule, model, percent", [("1f1b", "llama-3.1-8b", 38.39), ("roundpipe", "qwen3-32b", 5.85)]
)
def test_bubbles_to_reach(schedule, model, percent):
    problem = published(schedule, model)
    found = plan("search", problem, budget=QUICK)
    costs = problem.costs(found.partition)
    work = sum(
        (work.main + work.pre) * problem.num_microbatches
        for ((kind, stage),) in graph_of(problem, found.partition).slots
        for work in [costs.work[kind][stage]]
    )
    assert round(100 * (1 - work / (8 * found.makespan)), 2) <= percent


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("ranks, head", [(3, 0.0), (3, 2.5), (4, 0.0), (4, 1.7), (4, 4.0)])
def test_search_finds_the_optimum_of_small_cases(schedule, ranks, head):
    problem = small(schedule, uniform(10, head), ranks, num_microbatches=6)
    ends = np.array([[-1, *bars, 9 + ranks] for bars in combinations(range(9 + ranks), ranks - 1)])
    every = np.diff(ends, axis=1) - 1
    assert (every.sum(axis=1) == 10).all()
    best = PlanBatch(build_graph(problem.schedule(ranks, ranks)), problem.times).makespans(every, every).min()
    assert plan("search", problem).makespan == pytest.approx(best, rel=1e-9)


def test_orders_that_are_of_one_cut_have_work_for_orders_of_their_own(monkeypatch):
    """Orders of ZB-auto follow from times, and RoundPipe cuts forward and backward apart; 1F1B has one order."""
    given, times = [], replace(uniform(4), input_grad=[1.0] * 4, weight_grad=[1.0] * 4)

    def noted(work, *more):
        given.append(work)
        return Budget(work, *more)

    monkeypatch.setattr("rpbench.plan.search.Budget", noted)
    for name in ("zb_auto", "roundpipe", "1f1b"):
        plan_search(small(name, times, 2), (), budget=1000)
    by_times, cut_apart, one_order = given
    assert by_times == cut_apart > 2 * one_order


def test_numbers_of_chunks_are_free_unless_they_are_given():
    problem = published("looped_bfs", "qwen3-1.7b")
    fixed = plan("search", published("looped_bfs", "qwen3-1.7b", chunks_per_rank=2), budget=QUICK)
    assert len(fixed.partition.forward) == 16
    assert len(plan("search", problem, budget=QUICK).partition.forward) != 16


def test_waves_are_free_unless_they_are_given():
    """Hanayo has one wave unless more are asked for; a search looks at others, and passes over odd chunks."""
    problem = small("hanayo", uniform(16, hop=0.01), 4, num_microbatches=8)
    assert len(plan("even", problem).partition.forward) == 8
    one = plan("search", small("hanayo", uniform(16, hop=0.01), 4, num_microbatches=8, chunks_per_rank=2), budget=QUICK)
    found = plan("search", problem, budget=QUICK)
    assert len(one.partition.forward) == 8
    assert len(found.partition.forward) == 16
    assert found.makespan < one.makespan


def test_search_gives_the_same_answer_twice():
    problem = published("roundpipe", "qwen3-1.7b")
    assert plan("search", problem, budget=QUICK) == plan("search", problem, budget=QUICK)


def test_a_small_budget_still_times_every_seed():
    problem = published("roundpipe", "llama-3.1-8b")
    best = plan("search", problem, budget=QUICK)
    hurried = plan("search", problem, budget=1)
    assert best.makespan < hurried.makespan <= plan("greedy", problem).makespan
    # A good partition that is handed in is not lost.
    assert plan("search", replace(problem, published=best.partition), budget=1).makespan == best.makespan


ON_FOUR = ("cost=analytic", "num_devices=4", "num_steps=3")


@pytest.mark.parametrize(
    "method, words",
    [
        # Two steps, with which cuts are compared, are faster than greedy's, and three are slower.
        (
            "greedy",
            ("schedule=zb_auto", "model=llama31_8b", "cluster=dgx_h100", "num_microbatches=6", "recompute=none",
             "workload.microbatch_sequences=1"),
        ),
        # 15 stages, which no number on each device makes.
        ("mobius", ("schedule=mobius", "model=qwen3_1p7b", "cluster=8x_rtx4090", "num_microbatches=8")),
    ],
)  # fmt: skip
def test_no_run_is_longer_than_with_a_cut_that_the_search_starts_from(method, words):
    problem = pose(request_of_words([*words, *ON_FOUR]))
    assert plan("search", problem).makespan <= plan(method, problem).makespan


def test_steps_that_overlap_are_planned_for_their_steady_state():
    # One call alone wants to fill and drain fast; calls that overlap want equal loads.
    alone = published("roundpipe", "qwen3-1.7b", options={"round_size": 16})
    problem = replace(alone, num_steps=12, options={"round_size": 16, "asynchronous": True})
    found = plan("search", problem, budget=10 * QUICK)
    assert found.makespan <= min(plan(method, problem).makespan for method in ("published", "even", "greedy"))
    best_alone = plan("search", alone, budget=10 * QUICK).partition
    assert found.makespan < 0.97 * evaluate(problem, best_alone, method="given").makespan


def test_a_sketch_of_overlapping_steps_counts_the_whole_run_of_a_posed_problem():
    """Filling and draining count there, other than in a contest, where the pace between steps does."""
    problem = small("pipedream_2bw", uniform(6), 2, num_steps=8)
    terms = _terms(problem, ())
    sketcher, setting = Sketcher(Contender(problem.entry), terms, QUICK), _space(problem, ()).first
    sketch = sketcher.of(setting)
    whole_run = evaluate(problem, sketch.cuts[0], method="given").makespan / problem.times.units_per_second
    assert sketcher.overlaps(setting)
    assert sketch.tokens_per_s == pytest.approx(problem.num_microbatches * problem.num_steps / whole_run)


# --- memory -------------------------------------------------------------------------------------------------


def tight(limit: int) -> DeviceMemory:
    """Layers of 10 bytes bound to a device, nothing else."""
    nothing = LayerSize(0, 0, 0)
    return DeviceMemory(ModelBytes((LayerSize(10, 0, 0),) * 8, nothing, nothing, 0, 0, 0), limit)


def test_search_stays_within_memory():
    # With a long head the last device would give its layers to the first two.
    times = uniform(8, head=6.0)
    free = plan("search", small("1f1b", times, 3))
    assert max(free.partition.forward) == 4
    held = plan("search", small("1f1b", times, 3, memory=tight(30)))
    assert max(held.partition.forward) == 3
    assert held.infeasible == ""
    assert held.makespan > free.makespan


def test_what_the_last_stage_keeps_takes_room():
    """It lies beside what another stage of its device computes again: the best of all cuts of 6 layers that fit."""
    nothing, free = LayerSize(0, 0, 0), small("interleaved_1f1b", uniform(6), 2, keeps_last=True, chunks_per_rank=2)
    sizes = ModelBytes((LayerSize(1, 0, 0, activations=10),) * 6, nothing, nothing, 1, 0, 0)
    cuts = [cut for cut in product(range(7), repeat=4) if sum(cut) == 6]
    for limit in (30, 36, 42, 48):
        problem = replace(free, memory=DeviceMemory(sizes, limit))
        every = [evaluate(problem, symmetric(cut), method="given") for cut in cuts]
        fitting = [each.makespan for each in every if not each.infeasible]
        found = plan("search", problem)
        assert not found.infeasible, limit
        assert found.makespan == pytest.approx(min(fitting)), limit


def test_where_nothing_fits_the_fastest_plan_says_why():
    times = uniform(8, head=6.0)
    found = plan("search", small("1f1b", times, 3, memory=tight(20)))
    assert found.partition == plan("search", small("1f1b", times, 3)).partition
    assert "has 0.0 GB" in found.infeasible
    assert "weights" in found.infeasible


def test_a_plan_that_fits_beats_a_faster_one_that_does_not():
    model, limit = "llama-3.1-8b", 24 * 2**30
    memory = DeviceMemory(model_bytes(load(model), 8192), limit)
    problem = published("interleaved_1f1b", model, memory=memory)
    assert plan("greedy", problem).infeasible.startswith("device 7 needs 28.0 GB and has 25.8 GB; ")
    found = plan("search", problem, budget=QUICK)
    assert not found.infeasible
    assert found.makespan > plan("search", published("interleaved_1f1b", model), budget=QUICK).makespan


def test_the_planner_of_the_library_heeds_memory():
    model = "qwen3-235b-lora"
    memory = DeviceMemory(model_bytes(load(model), 8192), 24 * 2**30)
    found = plan("greedy", published("roundpipe", model, memory=memory))
    assert len(found.partition.forward) == 94
    assert not found.infeasible
