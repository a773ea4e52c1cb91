"""Passes: what they add, what they leave alone, and that no rank can hang on what they wrote."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
from editing import schedule_of
from hypothesis import given, settings
from hypothesis import strategies as st

from rpbench.ir.action import COMPUTE, RECV, SEND, Kind
from rpbench.ir.checks.check import check
from rpbench.ir.policy import Policy
from rpbench.ir.schedule import Schedule, ScheduleError, Shape, Weights
from rpbench.passes.lower import add_steps, lower_communication, split_backward
from rpbench.passes.offload import stream
from rpbench.registry import entries


@st.composite
def schedules(draw) -> Schedule:
    ranks, microbatches = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    steps = draw(st.integers(1, 2))
    name = draw(st.sampled_from(["gpipe", "1f1b", "looped_bfs", "roundpipe"]))
    if name == "roundpipe":
        fused = draw(st.booleans())
        shape = Shape(ranks, draw(st.integers(1, 5)), microbatches, draw(st.integers(1, 5)), steps, fused=fused)
    else:
        chunks = draw(st.integers(1, 2)) if name == "looped_bfs" else 1
        shape = Shape(ranks, ranks * chunks, microbatches, num_steps=steps)
    return entries()[name].build(shape)


def compute_rows(schedule: Schedule) -> list[list[str]]:
    return [
        [str(action) for action in schedule.compute(device) if action.kind in COMPUTE]
        for device in range(schedule.shape.num_ranks)
    ]


# --- communication ------------------------------------------------------------------------------------------


def test_communication_of_three_stages_on_two_ranks():
    """Stages 0 and 1 meet on rank 0, so only the way to stage 2 and back is sent.

    By rounds: 0F0 | 1F0 | 0F1 2F0 | 1F1 2B0 | 1B0 2F1 | ...; what is sent after a round stands behind it.
    """
    shape = Shape(2, 3, 2)
    schedule = schedule_of("0F0 1F0 0F1 1F1 1B0 0B0 1B1 0B1", "2F0 2B0 2F1 2B1", shape=shape)
    lowered = lower_communication(schedule)
    assert [" ".join(map(str, lowered.compute(rank))) for rank in range(2)] == [
        "0F0 1F0 1SEND_F0>1 0F1 1F1 1SEND_F1>1 1RECV_B0>1 1B0 0B0 1RECV_B1>1 1B1 0B1",
        "2RECV_F0>0 2F0 2B0 2RECV_F1>0 2SEND_B0>0 2F1 2B1 2SEND_B1>0",
    ]


@settings(deadline=None, max_examples=50)
@given(schedules(), st.sampled_from(["compute", "net"]))
def test_lowered_schedules_cannot_hang(schedule, lane):
    lowered = lower_communication(schedule, lane)
    check(lowered, rendezvous=True)
    assert compute_rows(lowered) == compute_rows(schedule)
    assert all(
        (action.kind in COMPUTE) == (name == "compute") or lane == "compute"
        for _, name, row in lowered.items()
        for action in row
    )


def test_a_pipe_sends_each_boundary_twice_for_every_microbatch():
    ranks, microbatches = 4, 6
    lowered = lower_communication(entries()["1f1b"].build(Shape(ranks, ranks, microbatches)))
    kinds = Counter(action.kind for _, _, row in lowered.items() for action in row)
    assert {kinds[kind] for kind in SEND | RECV} == {(ranks - 1) * microbatches}


def test_a_schedule_is_lowered_once():
    lowered = lower_communication(entries()["1f1b"].build(Shape(2, 2, 2)))
    with pytest.raises(ScheduleError, match="holds SEND or RECV already"):
        lower_communication(lowered)
    with pytest.raises(ValueError, match="lane='host'"):
        lower_communication(entries()["1f1b"].build(Shape(2, 2, 2)), lane="host")


def test_a_forward_is_not_held_up_by_the_next_microbatch():
    """In warmup a RECV stands before its own forward, not in a heap at the start (pytorch issue 188833)."""
    lowered = lower_communication(entries()["1f1b"].build(Shape(3, 3, 6)))
    assert [str(action) for action in lowered.compute(1)[:5]] == [
        "1RECV_F0>0", "1F0", "1RECV_F1>0", "1SEND_F0>2", "1F1",
    ]  # fmt: skip


# --- optimizer steps ----------------------------------------------------------------------------------------


def test_steps_follow_the_last_gradient_of_their_window():
    stepped = add_steps(entries()["looped_bfs"].build(Shape(2, 4, 2, num_steps=2)))
    assert " ".join(map(str, stepped.compute(0))) == (
        "0F0 0F1 2F0 2F1 2B1 2B0 2STEP@1 0B1 0B0 0STEP@1 0F2 0F3 2F2 2F3 2B3 2B2 2STEP@2 0B3 0B2 0STEP@2"
    )


def test_a_split_backward_steps_after_its_weight_gradient():
    stepped = add_steps(split_backward(entries()["1f1b"].build(Shape(1, 1, 2))))
    assert " ".join(map(str, stepped.compute(0))) == "0F0 0I0 0W0 0F1 0I1 0W1 0STEP@1"


def test_streamed_steps_go_to_the_host_of_the_last_gradient():
    """3 devices and 5 jobs a round: the second round, of one microbatch, starts on device 2."""
    stepped = add_steps(entries()["roundpipe"].build(Shape(3, 2, 4, 3, fused=True)))
    hosts = [" ".join(map(str, lanes.get("host", ()))) for lanes in stepped.lanes]
    assert hosts == ["0STEP@1", "2STEP@1", "1STEP@1"]


def test_steps_are_added_to_rows_that_wait_for_each_other():
    """All gradients of a stage stand in one lane, so that their order is known though the ranks cannot run."""
    stuck = schedule_of("0F0 0B0 0F1 0B1", "1F1 1B1 1F0 1B0")
    rows = [" ".join(map(str, add_steps(stuck).compute(rank))) for rank in range(2)]
    assert rows == ["0F0 0B0 0F1 0B1 0STEP@1", "1F1 1B1 1F0 1B0 1STEP@1"]


@pytest.mark.parametrize("lane, named", [("compute", ["0F0@0", "0F2@1"]), ("host", ["0F0", "0F2"])])
def test_forwards_are_named_where_their_own_lane_tells_what_they_read(lane, named):
    rows, shape = ("0F0 0B0 0F2 0B2", "0F1 0B1 0F3 0B3"), Shape(2, 1, 2, num_steps=2)
    stepped = add_steps(schedule_of(*rows, shape=shape, policy=Policy.STASH, placement=((0, 1),)), lane=lane)
    assert [str(action) for action in stepped.compute(0) if action.kind is Kind.F] == named


@pytest.mark.parametrize("name, shape", [("looped_bfs", Shape(1, 2, 4)), ("gpipe", Shape(2, 2, 5))])
def test_loaded_activations_have_two_buffers(name, shape):
    order = replace(entries()[name].build(shape), weights=Weights.STREAMED)
    for lanes in stream(add_steps(order)).lanes:
        moved = [action.kind for action in lanes["h2d"] if action.object == "A"]
        held = [moved[: end + 1].count(Kind.LOAD) - moved[:end].count(Kind.FREE) for end in range(len(moved))]
        assert all(number <= 2 for number in held)


@settings(deadline=None, max_examples=50)
@given(schedules())
def test_one_step_for_every_backward_stage_and_window(schedule):
    stepped = add_steps(schedule)
    check(stepped)
    steps = [(lane, action) for _, lane, row in stepped.items() for action in row if action.kind is Kind.STEP]
    lane = "host" if schedule.weights is Weights.STREAMED else "compute"
    assert {name for name, _ in steps} == {lane}
    assert sorted((action.stage, action.version) for _, action in steps) == [
        (stage, version)
        for stage in range(schedule.shape.num_backward_stages)
        for version in range(1, schedule.shape.num_steps + 1)
    ]
    check(add_steps(schedule, lane="host"))
    check(lower_communication(stepped), rendezvous=True)


def test_host_steps_of_an_asynchronous_run_stand_version_by_version():
    schedule = replace(entries()["roundpipe"].build(Shape(2, 2, 3, 3, num_steps=3, fused=True)), policy=Policy.DELAYED)
    for lanes in add_steps(schedule).lanes:
        versions = [action.version for action in lanes.get("host", ())]
        assert versions == sorted(versions)


def test_steps_are_added_once():
    with pytest.raises(ScheduleError, match="holds STEP actions already"):
        add_steps(add_steps(entries()["gpipe"].build(Shape(2, 2, 2))))
    with pytest.raises(ValueError, match="lane='net'"):
        add_steps(entries()["gpipe"].build(Shape(2, 2, 2)), lane="net")
    with pytest.raises(ScheduleError, match="no weight gradient of stage 1 for version 1"):
        add_steps(schedule_of("0F0 0B0", "1F0"))


# --- backward in one piece or two ---------------------------------------------------------------------------


def test_backward_is_split_in_place():
    split = split_backward(entries()["1f1b"].build(Shape(2, 2, 2)))
    assert " ".join(map(str, split.compute(0))) == "0F0 0F1 0I0 0W0 0I1 0W1"


@settings(deadline=None, max_examples=50)
@given(schedules())
def test_every_weight_gradient_follows_its_input_gradient(schedule):
    split = split_backward(schedule)
    check(split)
    for device, lane, row in split.items():
        whole = schedule.lanes[device][lane]
        back = [action for action in row if action.kind is not Kind.W]
        assert [a._replace(kind=Kind.B) if a.kind is Kind.I else a for a in back] == list(whole)
        follows = [(first, second) for first, second in pairwise(row) if second.kind is Kind.W]
        assert all(first._replace(kind=Kind.W) == second for first, second in follows)
        assert len(row) - len(back) == sum(action.kind is Kind.B for action in whole)
