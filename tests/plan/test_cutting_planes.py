"""Cutting planes: tangents that hold everywhere, and cuts that no move of one layer leads to."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from problems import random_problems

from rpbench.cost.table import LayerTimes
from rpbench.plan.climb import Climb, Tally
from rpbench.plan.counts import plain_partitions, promising_counts
from rpbench.plan.cutting_planes import level_cuts
from rpbench.plan.problem import Problem
from rpbench.registry import entry
from rpbench.sim.batch import PlanBatch
from rpbench.sim.graph import build_graph


def looped(name: str, num_ranks: int, chunks: int, num_layers: int, head: float, num_microbatches: int) -> Problem:
    """Equal layers with a head of so many layers."""
    times = LayerTimes(
        [1.0] * num_layers, [1.0] * num_layers, [2.0] * num_layers, head_forward=head, head_backward=2 * head, hop=0.2
    )
    return Problem(entry(name), times, num_ranks, num_microbatches, chunks_per_rank=chunks)


def batch_of(problem: Problem) -> PlanBatch:
    stages = problem.num_bound_stages
    return PlanBatch(build_graph(problem.schedule(stages, stages)), problem.times)


@settings(deadline=None, max_examples=60)
@given(problem=random_problems(), data=st.data())
def test_a_longest_path_bounds_every_other_cut(problem, data):
    assume(not (problem.entry.separate_cuts or problem.times.speeds or problem.times.overlap_gain))
    num, layers = problem.num_bound_stages, problem.num_layers
    batch = PlanBatch(
        build_graph(problem.schedule(num, num)), problem.times.of_equal_layers(), fused_ahead=problem.fused_ahead
    )
    cuts = st.lists(st.integers(0, layers), min_size=num - 1, max_size=num - 1).map(
        lambda ends: np.diff([0, *sorted(ends), layers])
    )
    one, other = data.draw(cuts), data.draw(cuts)
    kept = np.array(data.draw(st.lists(st.integers(0, 1), min_size=num, max_size=num)))
    linear = batch.linear(kept)
    makespan, slopes, rest = linear.longest_path(one.astype(float))
    whole = batch.makespans(one[None], one[None], one[None] * kept)[0]
    assert whole == pytest.approx(makespan, rel=1e-9) if one.all() else whole <= makespan * (1 + 1e-9)
    there = linear.longest_path(other.astype(float))[0]
    assert (slopes >= 0).all()
    assert slopes @ other + rest <= there * (1 + 1e-9)
    assert linear.longest_path((one + other) / 2)[0] <= (makespan + there) / 2 * (1 + 1e-9)  # convex


@pytest.mark.parametrize("name", ["looped_bfs", "interleaved_1f1b"])
@pytest.mark.parametrize("head", [0.0, 1.5, 4.0])
def test_rounded_cuts_are_near_the_best_of_all(name, head):
    problem = looped(name, num_ranks=2, chunks=2, num_layers=9, head=head, num_microbatches=4)
    every = [np.diff([-1, *ends, 12]) - 1 for ends in combinations(range(12), 3)]
    assert len(every) == 220
    batch = batch_of(problem)
    best = batch.makespans(np.array(every), np.array(every)).min()
    found, _ = level_cuts(batch.linear(np.zeros(4, int)), every[0], np.zeros(4, int))
    assert (found.sum(axis=1) == 9).all()
    assert batch.makespans(found, found).min() <= best * 1.06


def test_a_climb_finds_a_cut_that_single_moves_do_not_lead_to(monkeypatch):
    # A head of five layers: the first devices have no layer in the first round, so that all rounds are as long.
    problem = looped("looped_bfs", num_ranks=6, chunks=3, num_layers=28, head=5.0, num_microbatches=18)
    seeds = plain_partitions(problem, promising_counts(problem)[0])

    def best() -> float:
        climb = Climb(problem, seeds, Tally())
        climb.level()
        climb.run(200_000)
        return climb.best_score

    found = best()
    monkeypatch.setattr(Climb, "level", lambda self: None)
    assert found < 0.95 * best()


@pytest.mark.parametrize("counts", [(3, 6), (8, 6), (7, 7)])
def test_directions_that_are_cut_apart_are_level_too(counts):
    problem = looped("roundpipe", num_ranks=6, chunks=2, num_layers=28, head=5.0, num_microbatches=18)
    seeds = plain_partitions(problem, counts)
    climb = Climb(problem, seeds, Tally())
    plain = climb.best_score
    climb.level()
    level = climb.best_score
    climb.best.check_layers(28)
    climb.run(8_000_000)
    assert climb.best_score <= level <= 1.02 * climb.best_score
    assert level < 0.99 * plain


def test_plain_and_compiled_agree(monkeypatch):
    problem = looped("interleaved_1f1b", num_ranks=3, chunks=2, num_layers=11, head=2.5, num_microbatches=6)
    batch, start = batch_of(problem), np.array([2, 2, 2, 2, 2, 1])
    quick = level_cuts(batch.linear(np.zeros(6, int)), start, np.zeros(6, int))
    monkeypatch.setattr("rpbench.sim.kernels.compiled", lambda kernel, *_, **__: kernel)
    plain = level_cuts(batch.linear(np.zeros(6, int)), start, np.zeros(6, int))
    assert (quick[0] == plain[0]).all()
    assert quick[1] == plain[1]
