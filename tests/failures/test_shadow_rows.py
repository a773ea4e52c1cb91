"""Bamboo: rows with redundant forwards, and what happens when their owner is lost, by hand."""

import pytest

from rpbench.failures.shadows import Act, Bamboo, StageTimes, What, merged, time_rows, with_shadows
from rpbench.failures.walk import Job, Progress, walk
from rpbench.ir.action import Kind
from rpbench.ir.schedule import Shape
from rpbench.registry import entry


def rows_of(name, p, m):
    what = {Kind.F: What.FORWARD, Kind.B: What.BACKWARD}
    schedule = entry(name).build(Shape(p, p, m))
    return [
        [Act(what[action.kind], action.stage, action.microbatch) for action in schedule.compute(rank)]
        for rank in range(p)
    ]


def text(row):
    return " ".join(f"{act.stage}{act.what.value}{act.microbatch}" for act in row)


def equal(p, forward=1.0, backward=2.0):
    return StageTimes((forward,) * p, (backward,) * p)


# By hand after the rule: before the backward of the same microbatch; on the last rank before the forward.
SHADOWED = """
0F0 0F1 0F2 1f0 0B0 1f1 0B1 1f2 0B2
1F0 1F1 2f0 1B0 1F2 2f1 1B1 2f2 1B2
0f0 2F0 2B0 0f1 2F1 2B1 0f2 2F2 2B2
"""
# Rank 1 of two microbatches is lost; beginnings before: 0F0 0, 0F1 1F0 1, 1F1 2, 1B0 5, 0B0 7, 1B1 8, 0B1 10.
MERGED = """
0F0 0F1 1F0 1F1 1B0 0B0 1B1 0B1

0f0 2F0 2B0 0f1 2F1 2B1
"""


def test_rows_with_shadows():
    assert list(map(text, with_shadows(rows_of("1f1b", 3, 3)))) == SHADOWED.strip().splitlines()


def test_rows_of_the_neighbour_that_stands_in():
    rows = rows_of("1f1b", 3, 2)
    found = merged(rows, [1], time_rows(rows, equal(3)))
    assert list(map(text, found)) == MERGED.strip().splitlines()
    assert time_rows(found, equal(3)).makespan == 14.0  # 1B0 6-8, 0B0 8-10, 1B1 10-12, 0B1 12-14


@pytest.mark.parametrize("name", ["1f1b", "gpipe"])
@pytest.mark.parametrize("p, m", [(2, 1), (3, 4), (5, 3)])
def test_rows_without_shadows_take_what_the_textbook_says(name, p, m):
    assert time_rows(rows_of(name, p, m), equal(p)).makespan == (m + p - 1) * 3


@pytest.mark.parametrize("forward, backward", [(1.0, 1.0), (1.0, 2.0), (2.0, 5.0)])
@pytest.mark.parametrize("p, m", [(2, 1), (2, 2), (3, 1), (3, 4), (4, 2), (4, 8), (6, 12)])
def test_redundant_forwards_fit_the_bubble_exactly_for_one_microbatch(p, m, forward, backward):
    """The last rank waits once, before its first forward; from then on each redundant forward of it is on the way.

    Every other rank waits for gradients that come so much later, and does its own meanwhile, as long as F <= B.
    """
    job = Job(p, 1, m, (m + p - 1) * (forward + backward), (0.0,) * m, (0,) * p)
    policy = Bamboo(job, 10, rows=rows_of("1f1b", p, m), times=equal(p, forward, backward), boundary_bytes=0)
    assert policy.redundancy_s == (m - 1) * forward
    assert (policy.redundancy_s == 0) == (m == 1)


def bamboo(p=3, m=2, states=(10, 20, 30), pipelines=1):
    job = Job(p, pipelines, m, (m + p - 1) * 3.0, tuple(map(float, range(m))), states, detect_s=1.0, restart_s=5.0)
    return Bamboo(job, 4, rows=rows_of("1f1b", p, m), times=equal(p), boundary_bytes=7)


def test_memory_of_shadows_by_counting():
    assert bamboo().shadow_bytes == (20, 30, 10)


def test_what_is_done_again_when_the_neighbour_stands_in():
    """Rank 1 dies at 8 of a step of 13: 1F0 1F1 1B0 had run, and of its redundant forwards 1f0 on rank 0.

    On rank 0 then: 1F1 0-1, 1B0 again 1-3, 0B0 3-5, 1B1 5-7, 0B1 7-9; 2B1, which was running, anew 0-2.
    """
    policy = bamboo()
    assert policy.step_s(0) == 13.0
    found = policy.recover(frozenset({1}), Progress(2, 8.0))
    assert (found.source, found.lost_steps, found.lost_microbatches) == ("shadow", 0, 1)
    assert (found.rest_s, found.recompute_s, found.restart_s) == (9.0, 2.0, 0.0)
    assert found.fetched_bytes == {"remote": 7}  # the gradient of 2B0 once more
    assert found.then.step_s(0) == 14.0


def test_a_step_goes_on_after_the_loss():
    """Dead at 8, known at 9, the step ends at 18; then steps of 14 s: 32, 46, 60."""
    history = walk(bamboo(), walk_failures((8.0, 1)), 60.0)
    assert history.num_steps == 4


def walk_failures(*pairs):
    from rpbench.failures.walk import Failure

    return [Failure(moment, frozenset({rank})) for moment, rank in pairs]


@pytest.mark.parametrize("lost", [{0, 1}, {1, 2}, {2, 0}], ids=str)
def test_two_neighbours_go_back_to_the_store(lost):
    found = bamboo().recover(frozenset(lost), Progress(6, 1.0))
    assert (found.source, found.lost_steps, found.restart_s) == ("store", 2, 5.0)
    assert not found.then.lost


def test_two_that_are_no_neighbours_have_shadows():
    policy = bamboo(4, 2, (1, 1, 1, 1))
    found = policy.recover(frozenset({0, 2}), Progress(6, 1.0))
    assert found.source == "shadow"
    assert found.then.step_s(0) >= policy.step_s(0)


@pytest.mark.parametrize("second", [0, 2])
def test_a_rank_beside_one_that_is_gone_has_no_shadow(second):
    """Rank 0 runs two stages, and rank 2's state was with rank 1."""
    after = bamboo().recover(frozenset({1}), Progress(6, 1.0)).then
    assert after.living(frozenset({1})) == frozenset()
    assert after.recover(frozenset({second}), Progress(6, 1.0)).source == "store"


def test_another_pipeline_is_not_concerned():
    policy = bamboo(pipelines=2)
    after = policy.recover(frozenset({1}), Progress(6, 1.0)).then
    assert after.recover(frozenset({3 + 2}), Progress(6, 1.0)).source == "shadow"
