"""Runs through failures: lost work, terms and goodput, worked out by hand; what holds whatever happens."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rpbench.failures.copies import Gemini, placed
from rpbench.failures.detours import Recycle, SplitTimes
from rpbench.failures.shadows import Act, Bamboo, StageTimes, What, time_rows
from rpbench.failures.walk import Checkpoint, Failure, Job, Progress, drawn, listed, walk

# Two ranks, 4 microbatches that begin at 0, 1, 2 and 5 of a step of 10 s; 100 and 200 bytes of state.
JOB = Job(2, 1, 4, 10.0, (0.0, 1.0, 2.0, 5.0), (100, 200), detect_s=3.0, restart_s=4.0)


def at(moment, *ranks):
    return Failure(moment, frozenset(ranks))


def test_checkpoint_loses_the_steps_since_the_last_one():
    """Steps end at 10, 20, ... A failure at 73 finds 7 steps, the checkpoint of 5, and 3 microbatches begun."""
    history = walk(Checkpoint(JOB, 5), [at(73.0, 1)], 150.0)
    (event,) = history.events
    found = event.recovery
    assert (event.num_steps, found.source, found.lost_steps, found.lost_microbatches) == (7, "store", 2, 2 * 4 + 3)
    assert (found.detect_s, found.restart_s, found.fetch_s, found.recompute_s) == (3.0, 4.0, 0.0, 23.0)
    # Training goes on at 80 with 5 steps; 7 more end by 150.
    assert history.num_steps == 12


def test_what_the_store_takes():
    """300 bytes at 100 a second: 3 s for each checkpoint, every second step, and 3 s to read it back."""
    job = replace(JOB, store_bytes_per_s=100.0)
    history = walk(Checkpoint(job, 2), [at(34.0, 0)], 60.0)
    # Ends at 10, 23, 33 and, after 1 s of the fourth step, the failure: back to step 2, on at 34 + 3 + 4 + 3 = 44.
    (event,) = history.events
    assert (event.num_steps, event.recovery.lost_steps, event.recovery.fetched_bytes) == (3, 1, {"store": 300})
    assert event.recovery.fetch_s == 3.0
    assert event.recovery.recompute_s == 11.0
    assert history.num_steps == 3  # 44 + 10 = 54; the fourth and its checkpoint would end at 67


@pytest.mark.parametrize("every", [1, 2, 5, 10])
def test_expected_lost_work_of_checkpoints(every):
    """Failures spread over a period of checkpoints lose (k - 1) / 2 whole steps and half a step on average."""
    moments = [step * 10.0 + 5.0 for step in range(every * 4)]
    lost = [Checkpoint(JOB, every).recover(frozenset({0}), Progress(int(m // 10), m % 10)) for m in moments]
    assert sum(each.lost_steps for each in lost) / len(lost) == (every - 1) / 2
    assert sum(each.recompute_s for each in lost) / len(lost) == every * 10.0 / 2


def test_failures_while_it_recovers_join():
    """The second dies 2 s into a recovery of 7 s: it begins anew, and the first failure's place is what counts."""
    history = walk(Checkpoint(JOB, 5), [at(12.0, 0), at(14.0, 1)], 100.0)
    (event,) = history.events
    assert (event.lost, event.num_joined, event.waited_s) == (frozenset({0, 1}), 1, 2.0)
    assert history.num_steps == (100 - 21) // 10


# --- copies in memory ---------------------------------------------------------------------------------------


def gemini(job=JOB, copies=2, busy=((), ()), **options):
    return Gemini(job, 5, copies=copies, busy=busy, **options)


def test_a_machine_comes_back_from_its_partner():
    """Copies that take no time are there at once: only the step that was running is lost."""
    job = replace(JOB, host_bytes_per_s=50.0)
    found = gemini(job).recover(frozenset({1}), Progress(7, 3.0))
    assert (found.source, found.lost_steps, found.lost_microbatches) == ("remote", 0, 3)
    assert found.fetched_bytes == {"remote": 200, "local": 100}
    assert found.recompute_s == 3.0


def test_where_all_holders_died_the_store_is_read():
    found = gemini().recover(frozenset({0, 1}), Progress(7, 3.0))
    assert (found.source, found.lost_steps) == ("store", 2)
    process = gemini(kind="process").recover(frozenset({0, 1}), Progress(7, 3.0))
    assert (process.source, process.lost_steps, process.fetched_bytes) == ("local", 0, {"local": 300})


def test_copies_go_into_the_idle_time_of_the_group():
    """200 bytes at 40 a second take 5 s; the group is idle from 2 to 4, 6 to 7 and 8 to 10: 5 s, all of it."""
    busy = (((0.0, 2.0), (4.0, 6.0)), ((1.0, 2.0), (7.0, 8.0)))
    fits = gemini(replace(JOB, net_bytes_per_s=40.0), busy=busy)
    assert fits.copying == (5.0, 5.0, 0.0, 10.0)
    assert fits.step_s(0) == 10.0
    slower = gemini(replace(JOB, net_bytes_per_s=20.0), busy=busy)  # 10 s: 5 more than there are
    assert slower.copying == (5.0, 10.0, 5.0, 15.0)
    assert slower.step_s(0) == 15.0
    faster = gemini(replace(JOB, net_bytes_per_s=80.0), busy=busy)  # 2.5 s: until half a second behind 6
    assert faster.copying == (5.0, 2.5, 0.0, 6.5)


def test_copies_that_have_not_arrived_lose_a_step_more():
    policy = gemini(replace(JOB, net_bytes_per_s=50.0))  # 4 s into the next step
    assert policy.copying.done_s == 4.0
    early = policy.recover(frozenset({0}), Progress(7, 3.0))
    assert (early.lost_steps, early.lost_microbatches) == (1, 4 + 3)
    assert policy.recover(frozenset({0}), Progress(7, 4.0)).lost_steps == 0
    assert policy.recover(frozenset({0}), Progress(0, 3.0)).lost_steps == 0  # the start needs no copy
    # Again, before the first step after the recovery has its copies: what it began from is there.
    assert early.then.recover(frozenset({1}), Progress(6, 1.0)).lost_steps == 0


def test_one_copy_is_its_own_and_more_than_ranks_cannot_be():
    assert gemini(copies=1).copying.needed_s == 0.0
    with pytest.raises(ValueError, match=r"copies=3: .* there are 2; take 1 to 2"):
        gemini(copies=3)
    with pytest.raises(ValueError, match="kind=disk: what dies is one of machine, process"):
        gemini(kind="disk")


def test_traffic_that_finds_no_idle_time_follows_behind():
    assert placed([(0.0, 10.0)], 10.0, 2.0) == (0.0, 12.0)
    assert placed([], 10.0, 0.0) == (10.0, 0.0)


# --- lists and draws ----------------------------------------------------------------------------------------


def test_listed_failures_are_joined_and_in_order():
    found = listed([[1, 5.0], [0, 2.0], [2, 5.0]], 3, 10.0)
    assert found == (at(2.0, 0), at(5.0, 1, 2))


def test_what_cannot_be_listed():
    with pytest.raises(ValueError, match="failure of rank 3: the run has ranks 0 to 2; name one"):
        listed([[3, 1.0]], 3, 10.0)
    with pytest.raises(ValueError, match="failure at 10 s: the run goes from 0 to 10 s; take one in between"):
        listed([[1, 10.0]], 3, 10.0)
    with pytest.raises(ValueError, match=r"failure \[1\]: a rank and the second"):
        listed([[1]], 3, 10.0)
    with pytest.raises(ValueError, match=r"mean_between_s=1e-09: 4 ranks would die 4e\+10 times in 10 s"):
        drawn(1e-9, 4, 10, 0)
    with pytest.raises(ValueError, match="mean_between_s=0: seconds that a rank lives"):
        drawn(0, 3, 10.0, 0)


def test_drawn_failures_are_those_of_the_seed_and_as_frequent_as_asked():
    found = drawn(100.0, 8, 50_000.0, seed=1)
    assert found == drawn(100.0, 8, 50_000.0, seed=1) != drawn(100.0, 8, 50_000.0, seed=2)
    assert len(found) == pytest.approx(4000, rel=0.06)  # 3.8 standard deviations of a Poisson number


times = st.floats(0, 400).map(lambda moment: round(moment, 2))
failures = st.lists(st.tuples(times, st.integers(0, 1)), max_size=6).map(
    lambda found: sorted(at(moment, rank) for moment, rank in found)
)


@given(failures, st.integers(1, 7), st.sampled_from([None, 30.0, 500.0]), st.integers(1, 2))
def test_goodput_is_never_above_the_pace_without_failures(found, every, rate, copies):
    job = replace(JOB, store_bytes_per_s=rate, net_bytes_per_s=rate)
    for policy in (Checkpoint(job, every), Gemini(job, every, copies=copies, busy=((), ()))):
        history = walk(policy, found, 400.0)
        assert history.num_steps <= walk(policy, [], 400.0).num_steps
        assert history.num_steps * job.step_s <= 400.0
        for event in history.events:
            assert event.recovery.lost_steps <= event.num_steps
            assert event.recovery.recover_s >= job.detect_s + job.restart_s


@given(failures)
def test_copies_that_take_no_time_never_lose_more_than_checkpoints(found):
    lost = [
        sum(event.recovery.lost_microbatches for event in walk(policy, found, 400.0).events)
        for policy in (gemini(kind="process"), Checkpoint(JOB, 5))
    ]
    assert lost[0] <= lost[1]


@settings(max_examples=15)
@given(failures, st.sampled_from([0.0, 0.5]), st.sampled_from([None, 30.0]))
def test_systems_that_go_on_with_fewer_ranks_are_never_above_it_either(found, hop, rate):
    p, m = 2, 4
    rows = [
        [Act(what, rank, j) for what in (What.FORWARD, What.BACKWARD) for j in range(m)] for rank in range(p)
    ]  # GPipe
    times = StageTimes((1.0,) * p, (2.0,) * p, hop)
    step_s = time_rows(rows, times).makespan
    job = replace(JOB, num_pipelines=2, step_s=step_s, store_bytes_per_s=rate, begun_s=(0.0, 1.0, 2.0, 3.0))
    halves = SplitTimes((1.0,) * p, (1.0,) * p, (1.0,) * p, hop)
    shadows = Bamboo(job, 5, rows=rows, times=times, boundary_bytes=3)
    for policy in (shadows, Recycle(job, 5, times=halves, fits=lambda in_flight: True)):
        history = walk(policy, found, 400.0)
        assert history.num_steps <= walk(policy, [], 400.0).num_steps
        assert history.num_steps * step_s <= 400.0
