"""What a text may say and not mean: fields of other kinds, versions only time could tell, transfers of too much."""

from dataclasses import replace

import pytest
from editing import edit, instead, schedule_of, with_action

from rpbench.ir.action import Kind, parse
from rpbench.ir.analysis import Analysis
from rpbench.ir.checks.check import check
from rpbench.ir.checks.residency import stays_on_devices
from rpbench.ir.policy import Policy
from rpbench.ir.schedule import Schedule, ScheduleError, Shape, Weights
from rpbench.passes.lower import add_steps, split_backward
from rpbench.passes.offload import offload, stream
from rpbench.registry import entry
from tests.one_by_one import waits_for

STASHED = add_steps(entry("pipedream").build(Shape(2, 2, 1, num_steps=5)))
SHARED = entry("megatron_tp").lower(entry("megatron_tp").build(Shape(2, 2, 2)), prefetch=1)
STREAMED = stream(add_steps(replace(entry("1f1b").build(Shape(2, 2, 2, num_steps=2)), weights=Weights.STREAMED)))
PARTNERS = entry("bpipe").build(Shape(4, 4, 5))


def refused(schedule: Schedule) -> str:
    with pytest.raises(ScheduleError) as caught:
        check(schedule)
    assert len(str(caught.value).splitlines()) <= 8
    return str(caught.value)


def test_what_is_changed_below_is_good():
    for schedule in (STASHED, SHARED, STREAMED, PARTNERS):
        check(schedule)


@pytest.mark.parametrize(
    "schedule, said",
    [
        (instead(SHARED, 0, "0B1", "0B1@2"), "0B1@2: version 2: there are 1 steps"),
        (
            edit(SHARED, 0, lambda row: row.__setitem__(0, parse("0SUM_F0@1")), "net"),
            "0SUM_F0@1: it names a version, but neither reads weights nor makes them",
        ),
        (instead(STASHED, 0, "0F1", "0F1@9"), "0F1@9: version 9: there are 5 steps"),
        (with_action(STASHED, 0, 0, "0LOAD:G"), "0LOAD:G: a LOAD moves P, O, A"),
        (with_action(STASHED, 0, 0, "0STORE:P"), "0STORE:P: a STORE moves G, O, A"),
        (
            with_action(STASHED, 0, 0, "0STORE:O>1"),
            "0STORE:O>1: peer 1: only SEND, RECV, STORE:A, LOAD:A, LOAD:P, STORE:G name a rank",
        ),
        (with_action(STASHED, 0, 0, "0LOAD:P>moon"), "0LOAD:P>moon: peer moon: a LOAD or STORE names the host"),
        (
            edit(STREAMED, 0, lambda row: row.__setitem__(0, parse("0STORE:G>1")), "d2h"),
            "0STORE:G>1 hands gradients to a rank and 0STORE:G to the host: one of both for a stage",
        ),
        (
            edit(PARTNERS, 0, lambda row: row.__setitem__(0, row[0]._replace(peer=103)), "h2d"),
            "0LOAD:A1>103: peer 103: ranks are 0 to 3",
        ),
        (
            edit(PARTNERS, 0, lambda row: row.__setitem__(0, row[0]._replace(peer=2)), "h2d"),
            "0LOAD:A1>2 and 0STORE:A1>3 name different peers",
        ),
        (
            edit(PARTNERS, 0, lambda row: row.__setitem__(0, row[0]._replace(peer=0)), "h2d"),
            "0LOAD:A1>0 stands on rank 0: its peer is another one",
        ),
        (with_action(STASHED, 0, 1, "0SUM_F0"), "0SUM_F0: stage 0 is out of range for SUM_F: none in this shape"),
        (with_action(SHARED, 0, 1, "0R0"), "0R0: stage 0 is out of range for R: none in this shape"),
    ],
)
def test_a_field_that_means_nothing(schedule, said):
    assert said in refused(schedule)


def test_what_runs_together_changes_no_weights():
    together = edit(STASHED, 0, lambda row: row.__setitem__(slice(3, 5), [parse("(0STEP@1;0F2)OVERLAP")]))
    assert "(0STEP@1;0F2)OVERLAP" in str(together)
    assert refused(together).startswith("(0STEP@1;0F2)OVERLAP: an OVERLAP holds computations")


def test_devices_with_shares_of_a_matrix_run_one_thing_at_a_time():
    together = edit(SHARED, 0, lambda row: row.__setitem__(slice(0, 1), [parse("(0F0;0F1)OVERLAP")]))
    together = edit(together, 0, lambda row: row.remove(parse("0F1")))
    assert "meet inside every computation" in refused(together)


def test_every_part_of_an_overlap_has_a_version_of_its_own():
    """Forward reads what is newest, backward what its own forward read."""
    order = "0F0 0F1 0B0 0STEP@1 (0F2;0B1)OVERLAP 0STEP@2 0B2 0STEP@3"
    schedule = schedule_of(order, shape=Shape(1, 1, 1, num_steps=3), policy=Policy.STASH)
    versions = check(schedule)
    number = next(number for number, action in enumerate(schedule.compute(0)) if action.kind is Kind.OVERLAP)
    forward, backward = schedule.compute(0)[number].sub
    assert (versions.of(number, forward), versions.of(number, backward)) == (1, 0)
    assert refused(instead(schedule, 0, "(0F2;0B1)OVERLAP", "(0F2;0B1@1)OVERLAP")).startswith("0B1@1 reads version 0")


def test_a_backward_in_pieces_reads_what_its_first_piece_reads():
    order = "0F0 0F1 0R1 0B0 0STEP@1 0B1 0STEP@2"
    schedule = schedule_of(order, shape=Shape(1, 1, 1, num_steps=2), policy=Policy.LATEST)
    found = {str(action): version for action, version in zip(schedule.compute(0), check(schedule).read, strict=True)}
    assert found["0R1"] == found["0B1"] == 0
    halves = schedule_of("0F0 0F1 0I1 0B0 0STEP@1 0W1 0STEP@2", shape=schedule.shape, policy=Policy.LATEST)
    assert check(halves).read[5] == 0


# --- versions that only time could tell ----------------------------------------------------------------------


def test_a_replica_that_does_not_step_names_what_it_reads():
    shape, everywhere = Shape(2, 1, 2, num_steps=2), ((0, 1),)
    rows = "0F0@0 0B0 0STEP@1 0F2@1 0B2 0STEP@2", "0F1@0 0B1 0F3@1 0B3"
    check(schedule_of(*rows, shape=shape, policy=Policy.STASH, placement=everywhere))
    unnamed = schedule_of(rows[0], rows[1].replace("@1", ""), shape=shape, policy=Policy.STASH, placement=everywhere)
    assert refused(unnamed).startswith("0F3 names no version, and stage 0 has replicas")
    other = schedule_of(rows[0], rows[1].replace("@1", "@0"), shape=shape, policy=Policy.STASH, placement=everywhere)
    assert refused(other).startswith("0F3@0 reads version 0 here, but by what its own lane has stepped it is to read 1")
    drifting = schedule_of(*rows, shape=shape, policy=Policy.LATEST, placement=everywhere)
    assert "it takes stages without replicas" in refused(drifting)


@pytest.mark.parametrize("policy", [Policy.STASH, Policy.LATEST, Policy.VERTICAL, Policy.PREDICT])
def test_a_stage_that_steps_elsewhere_settles_nothing(policy):
    order = entry("1f1b").build(Shape(2, 2, 1, num_steps=3))
    message = refused(replace(add_steps(order, lane="host"), policy=policy))
    assert message.startswith(f"policy {policy.value} reads the newest version of a stage, which only time could tell")


def test_weights_that_are_brought_have_a_version_known_beforehand():
    assert "reads what is newest" in refused(replace(STREAMED, policy=Policy.STASH))


# --- transfers ----------------------------------------------------------------------------------------------


def test_one_transfer_brings_one_version():
    stepped = schedule_of("0F0 0B0 0STEP@1 0F1 0B1 0STEP@2", shape=Shape(1, 1, 1, num_steps=2))
    once = with_action(with_action(stepped, 0, 0, "0LOAD:P", "h2d"), 0, 1, "0FREE:P", "h2d")
    assert refused(once).startswith("0LOAD:P brings version 0, and 0F1 reads version 1")


def test_one_transfer_brings_one_set_of_layers():
    order = entry("roundpipe").build(Shape(2, 2, 2, 3, fused=True))
    per_step = offload(add_steps(order), gradients="step")
    assert "serves stage" in refused(per_step)
    assert "both ways, whose layers differ" in refused(per_step)


def test_a_stage_that_comes_twice_in_an_overlap_is_visited_once():
    schedule = schedule_of("0F0 0F1 (0B0;0B1)OVERLAP 0STEP@1", shape=Shape(1, 1, 2))
    ((forward, backward),) = Analysis(schedule).visits
    assert (forward.numbers, backward.numbers, backward.last_gradient) == ((0, 1), (2,), 2)


def test_an_overlap_ends_one_visit_and_begins_the_next():
    """Stage 1 turns round in it, the forward first: its backwards, there and after it, are one visit."""
    schedule = schedule_of("0F0 1F0 0F1 (1F1;1B0)OVERLAP 1B1 0B0 0B1 0STEP@1 1STEP@1", shape=Shape(1, 2, 2))
    (visits,) = Analysis(schedule).visits
    found = [(visit.backward, visit.stage, visit.numbers) for visit in visits]
    forwards = [(False, 0, (0,)), (False, 1, (1,)), (False, 0, (2,)), (False, 1, (3,))]
    assert found == [*forwards, (True, 1, (3, 4)), (True, 0, (5, 6))]


# --- what stays on a device -----------------------------------------------------------------------------------


@pytest.mark.parametrize("lane, stays", [("compute", True), ("host", False)])
def test_a_stage_that_its_host_steps_leaves_the_device(lane, stays):
    assert stays_on_devices(add_steps(entry("1f1b").build(Shape(2, 2, 2)), lane=lane)) is stays


@pytest.mark.parametrize("name", ["seq1f1b", "vocab_parallel"])
def test_streamed_weights_need_stages_that_leave_nothing_behind(name):
    schedule = replace(entry(name).build(Shape(2, 2, 2)), weights=Weights.STREAMED)
    assert "stay on their devices, and so does their stage" in refused(schedule)


def test_a_share_is_the_part_of_its_device():
    crossed = replace(SHARED, rows=tuple(reversed(SHARED.rows)))
    assert "which is on another rank" in refused(crossed)


def test_a_share_of_the_head_stands_with_its_stage():
    order = entry("vocab_parallel").build(Shape(2, 2, 2))
    swapped = replace(order, placement=((1,), (0,)))
    assert "is placed on rank" in refused(swapped)
    assert "bound weights stay on one rank" in refused(replace(swapped, rows=_crossed(order), placement=()))


def _crossed(order: Schedule) -> tuple:
    """The stages on each other's ranks, the shares of the head where they were."""
    rows = [order.compute(rank) for rank in range(2)]
    heads = [[action for action in row if action.kind in (Kind.HF, Kind.HB)] for row in rows]
    others = [[action for action in row if action.kind not in (Kind.HF, Kind.HB)] for row in rows]
    return tuple((*others[1 - rank], *heads[rank]) for rank in range(2))


@pytest.mark.parametrize(
    "sizes, said",
    [
        ({"num_head_shards": 2, "num_parts": 2}, "sequences are whole"),
        ({"num_head_shards": 2, "num_stages": 1}, "share d is stepped with stage d"),
        ({"tensor_parallel": True, "num_parts": 2, "fused": True}, "not cut apart or fused"),
    ],
)
def test_a_shape_that_nothing_could_run(sizes, said):
    with pytest.raises(ValueError, match=said):
        Shape(**{"num_ranks": 2, "num_stages": 2, "num_microbatches": 2} | sizes)


@pytest.mark.parametrize("sizes, what", [((10**5, 1), "forward"), ((1, 10**5), "backward")])
def test_a_shape_far_larger_than_its_rows_is_refused_before_room_is_made_for_it(sizes, what):
    shape = Shape(1, sizes[0], 1, num_backward_stages=sizes[1])
    message = refused(schedule_of("0F0 0B0", shape=shape))
    assert message.startswith(f"the rows hold 2 actions, too few to run 1 microbatches through {10**5} {what} stages")


def test_a_split_backward_of_shares_ends_when_all_devices_have_met():
    """Nobody finishes its I before the others, so that no W comes earlier."""
    schedule = split_backward(entry("megatron_tp").build(Shape(2, 1, 1)))
    found = Analysis(schedule)
    weights = [number for number, action in enumerate(found.index.actions) if action.kind is Kind.W]
    inputs = [number for number, action in enumerate(found.index.actions) if action.kind is Kind.I]
    assert [{producer for producer, _ in waits_for(found.index, found.index.actions[w])} for w in weights] == [
        set(inputs)
    ] * 2
    assert found.versions.live == (1,)
