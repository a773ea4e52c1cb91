"""Weight versions measured by replay, against the numbers of the papers.

Sources: PipeDream, SOSP'19, section 3.3 (version i - (p - 1 - s) at stage s, p - s versions; vertical sync
delays all stages by p - 1); PipeDream-2BW, ICML'21, section 3.1 (two versions, delay 1); PipeMare, MLSys'21
(backward on the newest weights); RoundPipe, arXiv 2604.27085 (iteration k runs on the weights after
max(k - 1, 0) steps).
"""

from dataclasses import replace

import pytest
from editing import schedule_of
from hypothesis import given, settings
from hypothesis import strategies as st
from staleness import staleness_of_stages

from rpbench.ir import partition
from rpbench.ir.action import Kind
from rpbench.ir.analysis import Analysis
from rpbench.ir.checks.check import check
from rpbench.ir.checks.versions import Versions
from rpbench.ir.policy import ASYNCHRONOUS, STEPS_BEHIND, Policy
from rpbench.ir.schedule import Schedule, ScheduleError, Shape
from rpbench.passes.lower import add_steps, lower_communication, split_backward
from rpbench.registry import entries


def never_flushed(policy: Policy, ranks: int, microbatches: int, per_step: int = 1) -> Schedule:
    """1F1B that is drained only at the end of the run, with a step after every `per_step` microbatches."""
    order = entries()["1f1b"].build(Shape(ranks, ranks, microbatches))
    shape = Shape(ranks, ranks, per_step, num_steps=microbatches // per_step)
    stepped = add_steps(replace(order, shape=shape, policy=policy))
    check(stepped)
    return stepped


def worst_drift(versions: Versions) -> tuple[int, ...]:
    stages = range(len(versions.live))
    return tuple(max(d for (owner, _), d in versions.drift.items() if owner == stage) for stage in stages)


def reads(schedule: Schedule, versions: Versions, kind: Kind, stage: int) -> list[int | None]:
    """The versions read by the actions of a kind and stage, by microbatch."""
    actions = (action for _, _, row in schedule.items() for action in row)
    found = {
        action.microbatch: version
        for action, version in zip(actions, versions.read, strict=True)
        if action.kind is kind and action.stage == stage
    }
    return [found[microbatch] for microbatch in sorted(found)]


def test_pipedream_at_four_stages():
    schedule = never_flushed(Policy.STASH, ranks=4, microbatches=12)
    versions = Analysis(schedule).versions
    assert staleness_of_stages(versions) == (3, 2, 1, 0)
    assert versions.live == (4, 3, 2, 1)
    assert worst_drift(versions) == (0, 0, 0, 0)
    assert versions.published == (12, 12, 12, 12)
    assert (versions.max_live, versions.max_staleness) == (4, 3)


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 6), st.integers(1, 12))
def test_pipedream_reads_the_version_of_the_paper(ranks, microbatches):
    schedule = never_flushed(Policy.STASH, ranks, microbatches)
    versions = Analysis(schedule).versions
    for stage in range(ranks):
        expected = [max(0, i - (ranks - 1 - stage)) for i in range(microbatches)]
        assert reads(schedule, versions, Kind.F, stage) == expected
        assert reads(schedule, versions, Kind.B, stage) == expected
        assert versions.live[stage] <= ranks - stage
        if microbatches >= 2 * (ranks - stage) - 1:  # long enough to reach the steady state
            assert versions.live[stage] == ranks - stage


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 5), st.integers(5, 12))
def test_vertical_sync_delays_all_stages_alike(ranks, microbatches):
    schedule = never_flushed(Policy.VERTICAL, ranks, microbatches)
    versions = Analysis(schedule).versions
    for stage in range(ranks):
        assert reads(schedule, versions, Kind.F, stage) == [max(0, i - (ranks - 1)) for i in range(microbatches)]
    assert staleness_of_stages(versions) == (ranks - 1,) * ranks
    assert versions.max_live <= ranks
    assert worst_drift(versions) == (0,) * ranks


@pytest.mark.parametrize("per_step", [4, 8])
def test_2bw_keeps_two_versions_and_is_one_step_behind(per_step):
    versions = Analysis(never_flushed(Policy.TWO_BW, ranks=4, microbatches=4 * per_step, per_step=per_step)).versions
    assert versions.live == (2, 2, 2, 2)
    assert staleness_of_stages(versions) == (1, 1, 1, 1)
    assert worst_drift(versions) == (0, 0, 0, 0)


def test_2bw_needs_as_many_microbatches_as_stages():
    """With fewer, a warmup forward would wait for a step that stands behind it."""
    with pytest.raises(ScheduleError, match=r"policy 2bw: .* reads the version"):
        never_flushed(Policy.TWO_BW, ranks=4, microbatches=8, per_step=1)


@pytest.mark.parametrize("policy", [Policy.LATEST, Policy.PREDICT])
def test_reading_the_newest_weights_drifts_on_early_stages(policy):
    versions = Analysis(never_flushed(policy, ranks=4, microbatches=12)).versions
    assert worst_drift(versions) == (3, 2, 1, 0)
    assert staleness_of_stages(versions) == (3, 2, 1, 0)
    assert versions.live == (1, 1, 1, 1)


@pytest.mark.parametrize("policy", [Policy.FLUSH, Policy.OPTIMISTIC])
@pytest.mark.parametrize("name, stages", [("gpipe", 3), ("1f1b", 3), ("interleaved_1f1b", 6), ("looped_bfs", 6)])
def test_a_flush_keeps_one_version(name, stages, policy):
    order = split_backward(entries()[name].build(Shape(3, stages, 3, num_steps=3)))
    versions = Analysis(add_steps(replace(order, policy=policy))).versions
    assert versions.live == (1,) * stages
    assert versions.max_staleness == 0
    assert worst_drift(versions) == (0,) * stages
    assert versions.published == (3,) * stages


@pytest.mark.parametrize("cut", [None, partition.parse("3-3|1-2-3-1*")])
def test_asynchronous_roundpipe_is_one_step_behind(cut):
    order = entries()["roundpipe"].build(Shape(3, 2, 4, 4, num_steps=5, fused=True))
    order = replace(order, policy=Policy.DELAYED)
    schedule = add_steps(order if cut is None else order.with_partition(cut))
    check(schedule, max_versions=2)
    versions = Analysis(schedule).versions
    iterations = [microbatch // 4 for microbatch in range(20)]
    for kind, stage in [(Kind.F, 0), (Kind.F, 1), (Kind.FB, 3), (Kind.B, 2), (Kind.B, 0)]:
        assert reads(schedule, versions, kind, stage) == [max(k - 1, 0) for k in iterations]
    assert staleness_of_stages(versions) == (1, 1, 1, 1)
    assert versions.live == (2, 2, 2, 2)


def test_synchronous_roundpipe_keeps_one_version():
    schedule = add_steps(entries()["roundpipe"].build(Shape(3, 2, 4, 4, num_steps=3, fused=True)))
    versions = Analysis(schedule).versions
    assert versions.live == (1, 1, 1, 1)
    assert versions.max_staleness == 0


@pytest.mark.parametrize("policy", list(Policy))
def test_without_steps_one_version_is_kept(policy):
    order = replace(entries()["1f1b"].build(Shape(2, 2, 2, num_steps=3)), policy=policy)
    versions = Analysis(order).versions
    assert versions.live == (1, 1)
    assert versions.published == (0, 0)
    behind = STEPS_BEHIND.get(policy)
    expected = 0 if behind is None else behind
    assert versions.max_staleness == expected
    assert set(versions.drift.values()) == {0}
    fixed = [0, 0, 1, 1, 2, 2] if behind == 0 else [0, 0, 0, 0, 1, 1] if behind == 1 else [0] * 6
    assert reads(order, versions, Kind.F, 1) == fixed
    assert reads(order, versions, Kind.B, 0) == fixed


def test_communication_reads_no_weights():
    schedule = lower_communication(never_flushed(Policy.STASH, ranks=2, microbatches=3))
    versions = Analysis(schedule).versions
    actions = [action for _, _, row in schedule.items() for action in row]
    compute = {Kind.F, Kind.B}
    assert all((v is None) == (a.kind not in compute) for a, v in zip(actions, versions.read, strict=True))
    assert versions.live == (2, 1)


@pytest.mark.parametrize("policy", sorted(ASYNCHRONOUS, key=lambda policy: policy.value))
def test_reading_the_newest_needs_one_cut(policy):
    order = entries()["roundpipe"].build(Shape(2, 2, 2, 3, num_steps=2, fused=True))
    with pytest.raises(ScheduleError, match=f"policy {policy.value} reads the newest version"):
        _ = Analysis(add_steps(replace(order, policy=policy))).versions


def test_a_version_is_not_read_before_it_is_out():
    """Under vertical sync stage 0 may run ahead of a stage that steps late, on a host lane."""
    shape = Shape(2, 2, 1, num_steps=2)
    schedule = replace(
        schedule_of("0F0 0B0 0STEP@1 0F1 0B1 0STEP@2", "1F0 1B0 1F1 1B1", shape=shape, policy=Policy.VERTICAL),
    )
    late = replace(
        schedule,
        rows=(
            schedule.rows[0],
            {"compute": schedule.compute(1), "host": schedule_of("0STEP@1").compute(0)[:0]},
        ),
    )
    with pytest.raises(ScheduleError, match="1F1 reads version 1 of stage 1, which has published 0"):
        _ = Analysis(late).versions


@pytest.mark.parametrize(
    "row, live",
    [
        ("0F0 0B0 0STEP@1 0F1 0B1 0STEP@2 0F2 0B2 0STEP@3", 1),  # the last reader has run before the next comes
        ("0F0 0F1 0B0 0STEP@1 0F2 0B1 0STEP@2 0B2 0STEP@3", 2),  # version 0 dies with 0B1, before version 2 comes
        ("0F0 0F1 0F2 0B0 0STEP@1 0B1 0STEP@2 0B2 0STEP@3", 2),  # version 1, which nobody reads, when 2 comes
        ("0F0 0F1 0B0 0STEP@1 0F2 0STEP@2 0B1 0B2 0STEP@3", None),  # a step before its own gradient
        ("0F0 0F1 0B0 0STEP@1 0F2 0B1 0STEP@2 0F3 0B2 0STEP@3 0B3 0STEP@4", 2),
    ],
)
def test_a_version_is_kept_from_its_step_to_its_last_reader_or_the_next(row, live):
    """Counted by hand: weight stashing on one device, a step a microbatch."""
    steps = row.count("STEP")
    schedule = schedule_of(row, shape=Shape(1, 1, 1, num_steps=steps), policy=Policy.STASH)
    if live is None:
        with pytest.raises(ScheduleError):
            check(schedule)
    else:
        assert Analysis(schedule).versions.live == (live,)
