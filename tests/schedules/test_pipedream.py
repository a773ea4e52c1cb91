"""PipeDream: versions, staleness and placement of the papers, replicated stages included."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from staleness import staleness_of_stages

from rpbench.ir.action import Kind
from rpbench.ir.checks.check import check
from rpbench.ir.schedule import Schedule, ScheduleError, Shape, from_text, to_text
from rpbench.passes.lower import add_steps
from rpbench.registry import entry
from rpbench.sim.graph import build_graph
from rpbench.sim.memory import peak_in_flight

REPLICAS = st.lists(st.integers(1, 4), min_size=1, max_size=4)


def stepped(replicas: list[int] | int, steps: int, **options) -> Schedule:
    """PipeDream with a step after every window, checked."""
    if isinstance(replicas, int):
        shape = Shape(replicas, replicas, 1, num_steps=steps)
    else:
        shape = Shape(sum(replicas), len(replicas), math.lcm(*replicas), num_steps=steps)
        options["replicas"] = replicas
    return add_steps(entry("pipedream").build(shape, **options))


@settings(deadline=None, max_examples=40)
@given(p=st.integers(1, 8), extra=st.integers(0, 6))
def test_stage_s_keeps_p_minus_s_versions_and_is_one_less_behind(p, extra):
    versions = check(stepped(p, 2 * p + extra))
    assert versions.live == tuple(p - s for s in range(p))
    assert staleness_of_stages(versions) == tuple(p - 1 - s for s in range(p))
    assert set(versions.drift.values()) == {0}


@settings(deadline=None, max_examples=40)
@given(p=st.integers(1, 8), extra=st.integers(0, 6))
def test_vertical_sync_makes_all_stages_equally_late(p, extra):
    versions = check(stepped(p, 2 * p + extra, vertical_sync=True))
    assert staleness_of_stages(versions) == (p - 1,) * p
    assert versions.live[0] == p
    assert all(count <= p for count in versions.live)


@settings(deadline=None, max_examples=40)
@given(p=st.integers(1, 6), extra=st.integers(0, 5), steps=st.integers(2, 5))
def test_two_buffers_are_one_batch_late_everywhere(p, extra, steps):
    versions = check(add_steps(entry("pipedream_2bw").build(Shape(p, p, p + extra, num_steps=steps))), max_versions=2)
    for (_, microbatch), late in versions.staleness_steps.items():
        assert late == (microbatch >= p + extra)
    assert set(versions.drift.values()) == {0}
    assert versions.live[0] == 2


def test_two_buffers_need_as_many_microbatches_as_ranks():
    with pytest.raises(ValueError, match=r"the 3 microbatches of a batch must be as many as the 4 ranks"):
        entry("pipedream_2bw").build(Shape(4, 4, 3))


@settings(deadline=None, max_examples=60)
@given(replicas=REPLICAS, steps=st.integers(1, 4), vertical=st.booleans())
def test_replicas_take_turns_and_read_what_their_own_share_allows(replicas, steps, vertical):
    schedule = stepped(replicas, steps, vertical_sync=vertical)
    versions = check(schedule)
    assert from_text(to_text(schedule)) == schedule
    window, ranks = math.lcm(*replicas), sum(replicas)
    read = dict(zip((a for _, _, row in schedule.items() for a in row), versions.read, strict=True))
    first = 0
    for stage, count in enumerate(replicas):
        warmup = (ranks - 1 - first) // count  # nw(s) of the released runtime
        for replica in range(count):
            row = schedule.compute(first + replica)
            assert {a.stage for a in row} == {stage}
            assert {a.microbatch % count for a in row if a.kind is Kind.F} == {replica}
            for action in (a for a in row if a.kind is Kind.F and not vertical):
                num_done = max(0, action.microbatch // count - warmup)
                assert read[action] == num_done // (window // count), action
        first += count
    assert peak_in_flight(build_graph(schedule)) == [
        min((ranks - 1 - sum(replicas[:stage])) // count + 1, window * steps // count)
        for stage, count in enumerate(replicas)
        for _ in range(count)
    ]


def test_replicas_of_one_each_are_no_replicas():
    assert stepped([1, 1, 1], 5).rows == stepped(3, 5).rows


def test_a_replica_that_reads_ahead_of_its_step_is_shown():
    text = to_text(stepped([2, 1], 4))
    assert "0F4@1 0B2" in text
    with pytest.raises(ScheduleError, match="by what its own lane has stepped it is to read 1"):
        check(from_text(text.replace("0F4@1 0B2", "0F4@0 0B2")))
    with pytest.raises(ScheduleError, match="no rank can move"):
        check(from_text(text.replace("0F4@1 0B2", "0F4@2 0B2")))


@pytest.mark.parametrize(
    "shape, replicas, expected",
    [
        (Shape(3, 2, 2), [2, 2], r"replicas=\[2,2\] takes 4 devices, there are 3: .*set num_devices=4"),
        (Shape(3, 3, 2), [2, 1], r"replicas=\[2,1\] counts 2 stages, the partition has 3"),
        (Shape(3, 2, 3), [2, 1], r"a step adds up 3 microbatches, which 2 replicas cannot share evenly"),
        (Shape(3, 2, 2), [3, 0], r"replicas=\[3,0\]: a stage has a whole number of replicas, 1 or more"),
    ],
)
def test_replicas_that_do_not_fit_are_refused(shape, replicas, expected):
    with pytest.raises(ValueError, match=expected):
        entry("pipedream").build(shape, replicas=replicas)


def test_replicas_must_divide_the_minibatches():
    pipedream = entry("pipedream")
    with pytest.raises(ValueError, match=r"every 6 microbatches .* must divide their number, 8; take num_microb.*=6"):
        pipedream.steps(8, 1, [2, 3])
    assert pipedream.steps(8, 3, [2, 1]) == (2, 12)
    assert pipedream.steps(8, 3) == (1, 24)
    assert entry("1f1b").steps(8, 3) == (8, 3)
