"""ReCycle: which microbatch goes where, when a lost rank is absorbed, and the pace under detours."""

from itertools import pairwise

import pytest

from rpbench.failures import detours
from rpbench.failures.detours import Recycle, SplitTimes, is_absorbed, living, pace, runs_on
from rpbench.failures.walk import Job, Progress

# (p, d) -> the largest m that is absorbed, from m / (d - 1) <= p - 1.
BOUNDS = {(3, 2): 2, (3, 3): 4, (4, 2): 3, (4, 3): 6}
CELLS = [(p, d, bound + more) for (p, d), bound in BOUNDS.items() for more in (-1, 0, 1)]


def ones(p, hop=0.0):
    return SplitTimes((1.0,) * p, (1.0,) * p, (1.0,) * p, hop)


def recycle(p, d, m, fits=lambda in_flight: True, **options):
    job = Job(p, d, m, (m + p - 1) * 3.0, tuple(map(float, range(m))), (5,) * p, detect_s=2.0)
    return Recycle(job, 4, times=ones(p), fits=fits, **options)


def test_a_microbatch_goes_to_the_next_pipelines_in_turn():
    peers = living({(1, 2)}, num_stages=3, num_pipelines=4)
    assert peers == ((0, 1, 2, 3), (0, 1, 2, 3), (0, 2, 3))
    assert [runs_on(1, microbatch, peers[2], 4) for microbatch in range(4)] == [2, 3, 0, 2]  # (k + 1 + j mod 3) mod 4
    assert [runs_on(0, microbatch, peers[2], 4) for microbatch in range(4)] == [0, 0, 0, 0]


@pytest.mark.parametrize("p, d, m", CELLS)
def test_the_bound_of_absorption(p, d, m):
    assert is_absorbed(p, m, d) == (m <= BOUNDS[p, d])


@pytest.mark.parametrize("p, d, m", CELLS)
def test_above_the_bound_no_order_absorbs(p, d, m):
    """Peers have m (1 + 1 / (d - 1)) microbatches of work in a step; where that is more than the step, it is longer."""
    for stage in range(p):
        policy = recycle(p, d, m, lost=frozenset({stage}))
        busiest = max(3.0 * (m + -(-m // (d - 1))), 3.0 * m)
        assert policy.pace.step_s >= 3.0 * m * d / (d - 1) - 1e-9
        if not is_absorbed(p, m, d):
            assert policy.slowdown > 1.0
        assert policy.slowdown <= max(1.0, (busiest + 3.0 * (p - 1)) / policy.job.step_s)


@pytest.mark.parametrize("p, d, m", [cell for cell in CELLS if is_absorbed(cell[0], cell[2], cell[1])])
def test_up_to_the_bound_a_lost_rank_is_absorbed(p, d, m):
    slowdowns = [recycle(p, d, m, lost=frozenset({stage})).slowdown for stage in range(p)]
    if d > 2 or m < BOUNDS[p, d]:
        assert slowdowns == [1.0] * p


@pytest.mark.parametrize("p", [3, 4, 5])
def test_at_the_bound_of_two_pipelines_a_slot_is_missing(p):
    """The bound counts work, not when it is there: at it, the peer of a lost rank may never wait.

    That of the first stage must. It runs 2 m = 2 (p - 1) forwards, and the first input gradient is back after 2 p - 1
    slots; nothing else is there, because its step before has ended. The list scheduling adds no more than that slot.
    """
    m = p - 1
    slowdowns = [recycle(p, 2, m, lost=frozenset({stage})).slowdown for stage in range(p)]
    assert slowdowns[0] == pytest.approx(1 + 1 / (3 * (m + p - 1)))
    assert max(slowdowns) == slowdowns[0]


@pytest.mark.parametrize("p, m", [(2, 4), (3, 5), (4, 8)])
def test_without_failures_no_rank_does_more_than_its_work(p, m):
    """Full pipelines whose steps are not flushed: at least the work of a rank, at most a step of 1F1B."""
    found = pace(((0, 1),) * p, 2, m, ones(p), [2 * p] * p)
    assert 3.0 * m <= found.step_s <= (m + p - 1) * 3.0
    assert max(found.in_flight) <= 2 * p


def test_one_microbatch_at_a_time_is_a_chain():
    """Limits of one: a microbatch after another through p stages, forwards and input gradients, and the last halves."""
    found = pace(((0,), (0,)), 1, 3, ones(2), [1, 1])
    assert found.in_flight == (1, 1)
    # 0F 0-1, 1F 1-2, 1I 2-3, 0I and 1W 3-4, 0W 4-5, and the next one: 5 s each.
    assert found.step_s == 15.0


def test_hops_cost_time_on_detours():
    lost = living({(0, 1)}, 3, 2)
    bare = pace(lost, 2, 4, ones(3), [6] * 3)
    assert pace(lost, 2, 4, ones(3, hop=0.5), [6] * 3).step_s > bare.step_s


def test_memory_decides_how_many_are_in_flight():
    tight = recycle(4, 3, 6, fits=lambda in_flight: max(in_flight) <= 4, lost=frozenset({0}))
    assert max(tight.pace.in_flight) <= 4
    assert tight.slowdown >= recycle(4, 3, 6, lost=frozenset({0})).slowdown


def test_the_step_that_was_running_is_done_again_by_the_others():
    policy = recycle(3, 2, 2)
    found = policy.recover(frozenset({1}), Progress(5, 1.5))
    assert (found.source, found.lost_steps, found.lost_microbatches, found.fetched_bytes) == ("replica", 0, 2 * 2, {})
    assert (found.detect_s, found.restart_s, found.fetch_s, found.recompute_s) == (2.0, 0.0, 0.0, 1.5)
    assert found.then.living(frozenset({1, 2})) == frozenset({2})


def test_a_stage_that_no_pipeline_has_comes_from_the_store():
    after = recycle(3, 2, 2).recover(frozenset({1}), Progress(5, 1.5)).then
    assert after.recover(frozenset({5}), Progress(6, 0.0)).source == "replica"  # stage 2 of the other pipeline
    found = after.recover(frozenset({4}), Progress(6, 0.0))
    assert (found.source, found.lost_steps, found.then.lost) == ("store", 2, frozenset())


def test_one_pipeline_has_nobody_to_go_to():
    with pytest.raises(ValueError, match=r"1 pipeline: .* set mode.pipelines to 2"):
        recycle(3, 1, 4)


@pytest.mark.parametrize("m", [1, 3, 4])
@pytest.mark.parametrize("hop", [0.0, 0.25])
def test_what_runs_when(m, hop, monkeypatch):
    """Ranks run one part at a time; inputs are there; no stage goes forward before it has stepped."""
    ran = []

    class Noted(detours._Run):
        def _follow(self, part, rank, end):
            ran.append((rank, part, end - self.times.of(part), end))
            super()._follow(part, rank, end)

    monkeypatch.setattr(detours, "_Run", Noted)
    times = SplitTimes((1.0, 1.5, 1.0), (1.25, 1.0, 1.5), (2.0, 0.5, 1.0), hop)
    detours.pace(living({(0, 0)}, 3, 3), 3, m, times, [4, 3, 2])
    assert len(ran) == detours.STEPS * m * 3 * 3 * 3
    begins = {part: begin for _, part, begin, _ in ran}
    ends = {part: end for _, part, _, end in ran}
    on = {part: rank for rank, part, _, _ in ran}
    for rank in set(on.values()):
        own = sorted((begin, end) for each, _, begin, end in ran if each == rank)
        assert all(before[1] <= after[0] for before, after in pairwise(own))
    for part, begin in begins.items():
        for needed in inputs_of(part, 2):
            assert ends[needed] + (hop if on[needed] != on[part] else 0.0) <= begin
    for step in range(1, detours.STEPS):
        for stage in range(3):
            stepped = max(ends[part] for part in ends if part[:2] == (detours.WEIGHT, step - 1) and part.stage == stage)
            forwards = [begins[part] for part in begins if part[:2] == (detours.FORWARD, step) and part.stage == stage]
            assert min(forwards) >= stepped


def inputs_of(part, last):
    """What a part begins with, by the rule."""
    if part.order == detours.WEIGHT:
        return [part._replace(order=detours.INPUT)]
    if part.order == detours.FORWARD:
        return [part._replace(stage=part.stage - 1)] if part.stage else []
    above = [part._replace(stage=part.stage + 1)] if part.stage < last else []
    return [part._replace(order=detours.FORWARD), *above]
