"""Every rule of the checks, by a change to a good schedule that breaks just that rule."""

from dataclasses import replace

import pytest
from editing import edit, instead, schedule_of, swapped, with_action, without
from hypothesis import given, settings
from hypothesis import strategies as st

from rpbench.ir.action import Action, Kind
from rpbench.ir.checks.check import check
from rpbench.ir.policy import Policy
from rpbench.ir.schedule import Schedule, ScheduleError, Shape, Weights
from rpbench.passes.lower import add_steps, lower_communication, split_backward
from rpbench.registry import entries

GOOD = entries()["1f1b"].build(Shape(3, 3, 4))
STEPS = add_steps(entries()["1f1b"].build(Shape(3, 3, 2, num_steps=2)))
SENT = lower_communication(GOOD)
ROUNDPIPE = entries()["roundpipe"].build(Shape(3, 2, 3, 3, fused=True))


def refused(schedule: Schedule, **bounds) -> str:
    """The message of the check, which must fit on a screen."""
    with pytest.raises(ScheduleError) as caught:
        check(schedule, **bounds)
    message = str(caught.value)
    assert len(message.splitlines()) <= 8
    assert all(len(line) <= 120 for line in message.splitlines())
    return message


def test_the_schedules_broken_below_are_good():
    for schedule in (GOOD, STEPS, ROUNDPIPE, split_backward(GOOD)):
        check(schedule)
    check(SENT, rendezvous=True)


# --- completeness -------------------------------------------------------------------------------------------


def test_missing_forward():
    assert refused(without(GOOD, 0, "0F1")).splitlines() == [
        "0F1 is missing: every forward stage runs each of the 4 microbatches once",
        "  rank 0   >0F0< 0F2 0B0 0F3 0B1 0B2 0B3",
        "  add it; 0F0 is its nearest relative",
    ]


@pytest.mark.parametrize(
    "schedule, missing",
    [
        (without(GOOD, 1, "1B2"), "1B2"),
        (without(ROUNDPIPE, 2, "2FB1"), "2FB1"),
        (without(split_backward(GOOD), 1, "1W2"), "1W2"),
        (without(split_backward(GOOD), 1, "1I2"), "1I2"),
        (instead(GOOD, 1, "1B2", "1I2"), "1W2"),
    ],
)
def test_missing_backward(schedule, missing):
    assert refused(schedule).startswith(f"{missing} is missing")


def test_a_stage_without_any_action():
    shape = Shape(2, 2, 1)
    assert refused(schedule_of("0F0 0B0", "", shape=shape)).startswith("1F0 is missing")


def test_duplicate_on_one_rank():
    assert refused(with_action(GOOD, 0, 2, "0F1")).splitlines() == [
        "0F1 stands twice; an action runs once",
        "  rank 0   0F0 >0F1< >0F1< 0F2 0B0 0F3 0B1 0B2 0B3",
    ]


def test_duplicate_on_two_ranks():
    message = refused(with_action(GOOD, 2, 0, "0F1"))
    assert message.startswith("0F1 stands twice")
    assert "rank 0   0F0 >0F1<" in message
    assert "rank 2   >0F1< 2F0" in message


def test_a_step_is_not_taken_twice():
    assert refused(with_action(STEPS, 0, 9, "0STEP@1")).startswith("0STEP@1 stands twice")


def test_both_forms_of_backward():
    message = refused(instead(GOOD, 0, "0B1", "0B1", "0I1", "0W1"))
    assert message.startswith("0B1 and 0I1 and 0W1: B is I and W in one")
    assert ">0B1< >0I1< >0W1<" in message


def test_both_forms_of_backward_are_found_where_another_has_none():
    assert "B is I and W in one" in refused(without(instead(GOOD, 0, "0B1", "0B1", "0I1", "0W1"), 0, "0B3"))


@pytest.mark.parametrize(
    "schedule, said",
    [
        (instead(GOOD, 0, "0F3", "0F4"), "0F4: microbatch 4 is out of range for F: 0 to 3"),
        (instead(GOOD, 0, "0F3", "3F3"), "3F3: stage 3 is out of range for F: 0 to 2"),
        (instead(GOOD, 0, "0F3", "0F3.1"), "0F3.1: part 1 is out of range for F: 0 to 0"),
        (instead(STEPS, 0, "0STEP@2", "0STEP@3"), "0STEP@3: version 3 is out of range for STEP: 1 to 2"),
        (instead(STEPS, 0, "0STEP@2", "0STEP"), "0STEP: version None is out of range for STEP: 1 to 2"),
        (instead(ROUNDPIPE, 2, "2FB1", "2B1"), "2B1: stage 2 is out of range for B: 0 to 1"),
        (instead(GOOD, 2, "2B1", "2FB1"), "2FB1: stage 2 is out of range for FB: none in this shape"),
        (with_action(GOOD, 0, 0, "0RECV_F0>1"), "0RECV_F0>1: stage 0 is out of range for RECV_F: 1 to 2"),
        (with_action(GOOD, 2, 0, "2SEND_F0>0"), "2SEND_F0>0: stage 2 is out of range for SEND_F: 0 to 1"),
        (with_action(GOOD, 0, 0, "3UNSHARD"), "3UNSHARD: stage 3 is out of range for UNSHARD: 0 to 2"),
        (with_action(GOOD, 0, 0, "0STORE:A4>host"), "microbatch 4 is out of range for STORE: 0 to 3"),
    ],
)
def test_index_out_of_range(schedule, said):
    message = refused(schedule)
    assert said in message
    assert f">{said.split(':')[0]}" in message or "STORE" in said


def test_an_action_needs_a_microbatch():
    assert "F names no microbatch" in refused(edit(GOOD, 0, lambda row: row.insert(0, Action(Kind.F, 0))))


# --- placement ----------------------------------------------------------------------------------------------


def test_an_action_stands_where_its_stage_is_placed():
    moved = with_action(without(GOOD, 0, "0B3"), 1, 8, "0B3")
    message = refused(moved)
    assert message.startswith("0B3 stands on rank 1, but stage 0 is placed on rank 0")
    assert message.splitlines()[1].endswith(">0B3<")


def test_bound_weights_keep_a_microbatch_on_one_rank():
    moved = replace(with_action(without(GOOD, 0, "0B3"), 1, 8, "0B3"), placement=())
    message = refused(moved)
    assert message.startswith("0B3 on rank 1 needs the weights that 0F3 uses on rank 0")
    assert ">0F3<" in message
    assert ">0B3<" in message
    check(replace(moved, weights=Weights.STREAMED))


def test_stages_that_are_cut_apart_are_not_bound():
    shape = Shape(2, 2, 1, num_backward_stages=1)
    message = refused(schedule_of("0F0", "1F0 0B0", shape=shape))
    assert message.startswith("0F0 is of a stage whose layers are others in backward")
    check(replace(schedule_of("0F0", "1F0 0B0", shape=shape), weights=Weights.STREAMED))


def test_two_ranks_may_hold_one_stage_for_different_microbatches():
    check(schedule_of("0F0 1F0 1B0 0B0", "0F1 1F1 1B1 0B1", placement=((0, 1), (0, 1))))


def test_a_step_stands_where_the_gradients_are():
    moved = replace(with_action(without(STEPS, 0, "0STEP@2"), 1, 10, "0STEP@2"), placement=())
    assert refused(moved).startswith("0STEP@2 stands on rank 1, which has no gradient of stage 0")


def test_compute_stands_on_the_compute_lane():
    moved = with_action(without(GOOD, 0, "0B3"), 0, 0, "0B3", lane="host")
    message = refused(moved)
    assert message.startswith("0B3 stands on lane host")
    assert "rank 0/host   >0B3<" in message


def test_a_placement_lists_every_stage():
    assert refused(replace(GOOD, placement=((0,), (1,)))).startswith("placement lists 2 stages")


# --- order --------------------------------------------------------------------------------------------------


def test_a_backward_before_its_forward():
    assert refused(swapped(GOOD, 1, "1F0", "1B0")).splitlines() == [
        "no rank can move",
        "  rank 1 waits at 1B0 for 1F0   >1B0< 1F1 1F0 1F2 1B1 1F3 1B2 1B3",
    ]


def test_a_backward_waits_for_its_recomputation():
    check(schedule_of("0F0 0R0 0B0"))
    assert "waits at 0B0 for 0R0" in refused(schedule_of("0F0 0B0 0R0"))
    assert "waits at 0R0 for 0F0" in refused(schedule_of("0R0 0F0 0B0"))
    assert refused(schedule_of("0F0 0R0 0R0 0B0")).startswith("0R0 stands twice")


def test_sequence_parts_run_up_forward_and_down_backward():
    """Causal attention: part 1 reads the keys of part 0, so its gradient comes back first (Seq1F1B)."""
    shape = Shape(2, 2, 1, num_parts=2)
    good = schedule_of("0F0 0F0.1 0B0.1 0B0", "1F0 1F0.1 1B0.1 1B0", shape=shape)
    check(lower_communication(good), rendezvous=True)
    assert "waits at 0F0.1 for 0F0" in refused(swapped(good, 0, "0F0", "0F0.1"))
    assert "waits at 1B0 for 1B0.1" in refused(swapped(good, 1, "1B0", "1B0.1"))
    assert "waits at 1B0.1 for 1F0.1" in refused(swapped(good, 1, "1B0.1", "1F0.1"))
    assert refused(without(good, 0, "0F0.1")).startswith("0F0.1 is missing")


def test_overlap_holds_independent_actions():
    together = instead(without(GOOD, 1, "1F0"), 1, "1B0", "(1F0;1B0)OVERLAP")
    message = refused(together)
    assert message.startswith("(1F0;1B0)OVERLAP runs its parts together, but 1B0 waits for the other")
    check(instead(without(GOOD, 1, "1F2"), 1, "1B0", "(1F2;1B0)OVERLAP"))


# --- communication ------------------------------------------------------------------------------------------


def test_rendezvous_needs_communication():
    message = refused(GOOD, rendezvous=True)
    assert message.startswith("1SEND_B0>0 is missing: 0B0 on rank 0 uses what 1B0 makes on rank 1")
    assert "lower_communication" in message


@pytest.mark.parametrize("rendezvous", [False, True])
@pytest.mark.parametrize(
    "schedule, said",
    [
        (without(SENT, 1, "1RECV_F2>0"), "1RECV_F2>0 is missing: 1F2 on rank 1 uses what 0F2"),
        (instead(SENT, 1, "1RECV_F2>0", "1RECV_F2>2"), "1RECV_F2>2 on rank 1 must be 1RECV_F2>0 on rank 1"),
        (instead(SENT, 0, "0SEND_F2>1", "0SEND_F2"), "0SEND_F2 on rank 0 must be 0SEND_F2>1"),
        (
            with_action(without(SENT, 0, "0SEND_F2>1"), 2, 0, "0SEND_F2>1"),
            "0SEND_F2>1 on rank 2 must be 0SEND_F2>1 on rank 0",
        ),
        (
            with_action(lower_communication(entries()["gpipe"].build(Shape(1, 1, 1))), 0, 0, "0RECV_B0"),
            "stage 0 is out of range for RECV_B",
        ),
        (with_action(schedule_of("0F0 1F0 1B0 0B0"), 0, 1, "0SEND_F0>0"), "0SEND_F0>0 moves nothing"),
    ],
)
def test_communication_matches_what_crosses(schedule, said, rendezvous):
    assert said in refused(schedule, rendezvous=rendezvous)


def test_a_backward_waits_for_what_its_rank_receives():
    """The way from the last forward stage to the top backward stage, where the directions are cut apart."""
    lowered = lower_communication(entries()["roundpipe"].build(Shape(2, 1, 1, 2)))
    assert [str(action) for action in lowered.compute(1)] == ["1RECV_F0>0", "1B0", "1SEND_B0>0"]
    early = swapped(lowered, 1, "1RECV_F0>0", "1B0")
    assert "rank 1 waits at 1B0 for 1RECV_F0>0" in refused(early)


def test_two_ranks_keep_the_order_of_their_tensors():
    crossed = swapped(SENT, 1, "1RECV_F0>0", "1RECV_F1>0")
    message = refused(crossed, rendezvous=True)
    assert message.startswith("rank 0 sends 0SEND_F0>1 while rank 1 waits to receive 1RECV_F1>0")


def test_a_blocking_send_needs_a_peer_that_receives():
    """Both ranks send before they receive: fine with buffers, a hang without (pytorch issue 172668)."""
    both_send = schedule_of(
        "0F0 0SEND_F0>1 0F1 0SEND_F1>1 0RECV_B0>1 0B0 0RECV_B1>1 0B1",
        "1RECV_F0>0 1F0 1B0 1SEND_B0>0 1RECV_F1>0 1F1 1B1 1SEND_B1>0",
    )
    check(both_send)
    lines = refused(both_send, rendezvous=True).splitlines()
    assert lines[0] == "no rank can move"
    assert lines[1].startswith("  rank 0 waits at 0SEND_F1>1 for 1RECV_F1>0   ")
    assert "0F1 >0SEND_F1>1< 0RECV_B0>1" in lines[1]
    assert lines[2].startswith("  rank 1 waits at 1SEND_B0>0 for 0RECV_B0>1   ")
    assert "1B0 >1SEND_B0>0< 1RECV_F1>0" in lines[2]
    assert lines[3] == "  a SEND waits until its peer comes to the RECV; lower_communication finds such an order"
    rows = [[action for action in both_send.compute(rank) if action.peer is None] for rank in range(2)]
    lowered = lower_communication(schedule_of(*(" ".join(map(str, row)) for row in rows)))
    check(lowered, rendezvous=True)


# --- memory -------------------------------------------------------------------------------------------------


def test_activations_in_flight_are_bounded():
    check(GOOD, max_in_flight=(3, 2, 1))
    assert refused(GOOD, max_in_flight=(3, 1, 1)).splitlines() == [
        "1F1 leaves 2 activations in flight on rank 1, 1 may be",
        "  rank 1   1F0 >1F1< 1B0 1F2 1B1 1F3 1B2 1B3",
        "  run a backward before it",
    ]


def test_a_split_backward_holds_its_activation_until_the_weight_gradient():
    check(split_backward(GOOD), max_in_flight=(3, 2, 1))
    late = edit(split_backward(GOOD), 2, lambda row: row.append(row.pop(row.index(Action(Kind.W, 2, 0)))))
    check(late)
    assert refused(late, max_in_flight=(3, 2, 1)).startswith("2F1 leaves 2 activations in flight on rank 2")


def test_a_bound_for_each_device_or_for_all():
    with pytest.raises(ValueError, match="give one for each of 3 ranks"):
        check(GOOD, max_in_flight=(3, 2))
    with pytest.raises(ValueError, match="a streamed schedule keeps none"):
        check(ROUNDPIPE, max_in_flight=3)


# --- versions and accumulation windows ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "schedule, said",
    [
        (without(STEPS, 1, "1STEP@1"), "1STEP@1 is missing: the gradients of microbatches 0 to 1 are never"),
        (swapped(STEPS, 1, "1B1", "1STEP@1"), "1STEP@1 stands before 1B1, whose gradient it must include"),
        (
            swapped(STEPS, 2, "2STEP@1", "2B2"),
            "2STEP@1 stands after 2B2, but is to apply only microbatches 0 to 1",
        ),
    ],
)
def test_a_step_takes_the_gradients_of_its_window(schedule, said):
    assert refused(schedule).startswith(said)


def test_a_flush_reads_the_version_just_published():
    message = refused(swapped(STEPS, 0, "0STEP@1", "0F2"))
    assert message.splitlines()[1].startswith("  rank 0 waits at 0F2 for 0STEP@1")
    assert message.splitlines()[2] == "  policy flush: 0F2 reads the version 0STEP@1 publishes"
    check(replace(swapped(STEPS, 0, "0STEP@1", "0F2"), policy=Policy.TWO_BW))


def test_steps_on_a_host_stand_in_order():
    order = replace(entries()["gpipe"].build(Shape(1, 1, 1, num_steps=2)), policy=Policy.DELAYED)
    stepped = add_steps(order, lane="host")
    check(stepped)
    crossed = edit(stepped, 0, list.reverse, lane="host")
    assert "rank 0/host waits at 0STEP@2 for 0STEP@1" in refused(crossed)


def test_a_written_version_is_the_one_that_is_read():
    check(instead(STEPS, 1, "1F2", "1F2@1"))
    message = refused(instead(STEPS, 1, "1F2", "1F2@0"))
    assert message.startswith("1F2@0 reads version 1 here, by policy flush")
    assert "write @1" in message
    assert refused(instead(GOOD, 1, "1F2", "1F2@1")).startswith("1F2@1 reads version 0 here")


def test_kept_versions_are_bounded():
    shape = Shape(4, 4, 1, num_steps=8)
    pipedream = add_steps(replace(entries()["1f1b"].build(Shape(4, 4, 8)), shape=shape, policy=Policy.STASH))
    check(pipedream, max_versions=4)
    message = refused(pipedream, max_versions=3)
    assert message.startswith("stage 0 keeps 4 weight versions at one time, 3 may be")
    assert ">0STEP@3<" in message


# --- any change ---------------------------------------------------------------------------------------------


@st.composite
def placed_actions(draw) -> tuple[Schedule, int, int]:
    """A good schedule with the device and place of one of its actions."""
    ranks, chunks, microbatches = draw(st.integers(2, 4)), draw(st.integers(1, 2)), draw(st.integers(2, 5))
    name = draw(st.sampled_from(["gpipe", "1f1b"] if chunks == 1 else ["looped_bfs"]))
    schedule = entries()[name].build(Shape(ranks, ranks * chunks, microbatches))
    if draw(st.booleans()):
        schedule = split_backward(schedule)
    device = draw(st.integers(0, ranks - 1))
    return schedule, device, draw(st.integers(0, len(schedule.compute(device)) - 1))


@settings(deadline=None, max_examples=50)
@given(placed_actions())
def test_a_dropped_action_is_named(chosen):
    schedule, device, place = chosen
    dropped = schedule.compute(device)[place]
    assert refused(edit(schedule, device, lambda row: row.pop(place))).startswith(f"{dropped} is missing")


@settings(deadline=None, max_examples=50)
@given(placed_actions(), st.data())
def test_a_repeated_action_is_named(chosen, data):
    schedule, device, place = chosen
    repeated = schedule.compute(device)[place]
    other = data.draw(st.integers(0, schedule.shape.num_ranks - 1))
    at = data.draw(st.integers(0, len(schedule.compute(other))))
    message = refused(edit(schedule, other, lambda row: row.insert(at, repeated)))
    assert message.startswith(f"{repeated} stands twice")
    assert message.count(f">{repeated}<") == 2


@settings(deadline=None, max_examples=50)
@given(placed_actions(), st.data())
def test_a_renumbered_action_is_named(chosen, data):
    schedule, device, place = chosen
    action = schedule.compute(device)[place]
    number = data.draw(st.integers(0, schedule.shape.num_microbatches + 2).filter(lambda n: n != action.microbatch))
    renumbered = action._replace(microbatch=number)
    message = refused(edit(schedule, device, lambda row: row.__setitem__(place, renumbered)))
    assert message.startswith(str(renumbered))


@settings(deadline=None, max_examples=50)
@given(placed_actions(), st.data())
def test_a_moved_action_is_named(chosen, data):
    schedule, device, place = chosen
    moved = schedule.compute(device)[place]
    other = data.draw(st.integers(0, schedule.shape.num_ranks - 1).filter(lambda rank: rank != device))
    elsewhere = edit(edit(schedule, device, lambda row: row.pop(place)), other, lambda row: row.append(moved))
    assert refused(elsewhere).startswith(f"{moved} stands on rank {other}")
