"""Every rule about transfers, by a change to a good schedule that breaks just that rule."""

from dataclasses import replace
from fractions import Fraction

import pytest
from editing import edit, with_action

from rpbench.ir.action import Action, Kind, parse
from rpbench.ir.analysis import Analysis
from rpbench.ir.checks.check import check
from rpbench.ir.partition import Partition, symmetric
from rpbench.ir.policy import Policy
from rpbench.ir.schedule import Schedule, ScheduleError, Shape, from_text, to_text
from rpbench.passes.lower import add_steps
from rpbench.passes.offload import offload, shard, stream
from rpbench.registry import entry
from rpbench.sim.checked import checked_graph

CUT = Partition((2, 2), (2, 2, 0), fused=True)


def roundpipe(num_steps: int = 2, **options) -> Schedule:
    shape = Shape(2, 2, 3, 3, num_steps=num_steps, fused=True)
    return add_steps(entry("roundpipe").build(shape, round_size=3, **options).with_partition(CUT))


def data_parallel(num_devices: int = 2, num_stages: int = 2, num_steps: int = 1, microbatches: int = 2) -> Schedule:
    """Every device takes whole microbatches through all stages."""
    order = [(Kind.F, stage) for stage in range(num_stages)] + [
        (Kind.B, stage) for stage in reversed(range(num_stages))
    ]
    rows: list[list[Action]] = [[] for _ in range(num_devices)]
    for microbatch in range(microbatches * num_steps):
        rows[microbatch % num_devices] += [Action(kind, stage, microbatch) for kind, stage in order]
    return Schedule(Shape(num_devices, num_stages, microbatches, num_steps=num_steps), tuple(map(tuple, rows)))


STREAMED = stream(roundpipe())
SHARDED = shard(data_parallel())
OFFLOADED = offload(add_steps(data_parallel(num_steps=2), lane="host"))


def broken(schedule: Schedule) -> str:
    with pytest.raises(ScheduleError) as error:
        check(schedule)
    return str(error.value)


def moved(schedule: Schedule, device: int, lane: str, token: str, place: int) -> Schedule:
    def change(row: list[Action]) -> None:
        action = parse(token)
        row.remove(action)
        row.insert(place, action)

    return edit(schedule, device, change, lane)


def taken(schedule: Schedule, device: int, lane: str, token: str) -> Schedule:
    return edit(schedule, device, lambda row: row.remove(parse(token)), lane)


@pytest.mark.parametrize("good", [STREAMED, SHARDED, OFFLOADED, stream(roundpipe(asynchronous=True), prefetch=2)])
def test_good_schedules_are_good_and_read_back(good):
    check(good)
    assert from_text(to_text(good)) == good


def test_the_lanes_of_the_first_device_by_hand():
    """One round on two devices; job k = 0F 1F 2FB 1B 0B of round 0 and 1 goes to device k mod 2."""
    lanes = stream(roundpipe(num_steps=1)).lanes[0]
    assert " ".join(map(str, lanes["h2d"])) == (
        "0LOAD:P@0 2LOAD:P@0 "  # for 0F and, ahead, for the fused stage: nothing else comes in for 0F
        "2RECV_F0>1 0FREE:P 0LOAD:P@0 2RECV_F1>1 0LOAD:P.1@0 2RECV_F2>1 0LOAD:P.2@0 "  # 0B's in the gaps
        "0RECV_B0>1 0RECV_B1>1 0RECV_B2>1 2FREE:P 0FREE:P"
    )
    assert " ".join(map(str, lanes["d2h"])) == (
        "0SEND_F0>1 0SEND_F1>1 0SEND_F2>1 2SEND_B0>1 2SEND_B1>1 2SEND_B2>1 2STORE:G 2FREE:G 0STORE:G 0FREE:G"
    )


def edges(schedule: Schedule) -> set[tuple[str, str]]:
    found = Analysis(schedule)
    actions = found.index.actions
    return {(str(actions[before]), str(actions[after])) for before, after in found.transfer_edges}


def test_what_waits_for_what():
    found = edges(STREAMED)
    assert {("0LOAD:P@0", "0F0"), ("0F2", "0FREE:P"), ("2LOAD:P@0", "2FB0"), ("0LOAD:P.2@0", "0B0")} <= found
    assert {("0B2", "0STORE:G"), ("0STORE:G", "0FREE:G"), ("0STORE:G", "0STEP@1"), ("0STEP@1", "0LOAD:P@1")} <= found
    assert {("1F0", "1STORE:A0"), ("1STORE:A0", "1LOAD:A0"), ("1LOAD:A0", "1B0"), ("1B0", "1FREE:A0")} <= found
    assert ("2STEP@1", "0LOAD:P@1") not in found  # other layers
    assert {("1B1", "1REDUCE_GRAD"), ("1B0", "1REDUCE_GRAD"), ("0UNSHARD", "0F0")} <= edges(SHARDED)


@pytest.mark.parametrize("outer", [2, 4])
def test_replicas_that_gather_and_sum_nothing_bring_what_they_lack(outer):
    """(n - 1) / n of the weights, n being the two devices of the schedule, each as often as it is run."""
    plain = data_parallel()
    outside = replace(plain, shape=replace(plain.shape, outer_replicas=outer))
    found = Analysis(shard(outside, parameters="visit", gradients=None))
    replicas = outer * plain.shape.num_ranks
    assert {each.share for each in found.payload.values() if each.lane == "net"} == {Fraction(replicas - 1, replicas)}


def test_a_shard_is_loaded_before_it_is_gathered_and_stored_after_it_is_reduced():
    both = offload(shard(data_parallel(), gradients="visit"), parameters="visit")
    check(both)
    assert {("0LOAD:P", "0UNSHARD"), ("1REDUCE_GRAD", "1STORE:G")} <= edges(both)


def test_an_asynchronous_step_prefetches_over_its_end_and_a_synchronous_one_cannot():
    def ahead(schedule: Schedule) -> bool:
        row = stream(schedule, activations=True).lanes[1]["h2d"]
        loads = [place for place, action in enumerate(row) if str(action).startswith("0LOAD:P@")]
        uploads = [place for place, action in enumerate(row) if action.kind is Kind.RECV_B and action.microbatch == 2]
        return loads[0] < uploads[-1]

    assert ahead(roundpipe(asynchronous=True))
    assert not ahead(roundpipe())


CASES = [
    (taken(STREAMED, 0, "h2d", "2LOAD:P@0"), "stage 2 has 1 visits in 1 steps on rank 0 and 0 LOAD:P"),
    (taken(STREAMED, 0, "h2d", "2FREE:P"), "2LOAD:P@0 is never freed: every LOAD:P has one FREE:P"),
    (with_action(STREAMED, 0, 0, "2FREE:P", "h2d"), "2FREE:P frees what is not there"),
    (with_action(STREAMED, 0, 0, "2LOAD:P@0", "h2d"), "stage 2 has 1 visits in 1 steps on rank 0 and 2 LOAD:P"),
    (moved(STREAMED, 0, "h2d", "2FREE:P", 0), "2FREE:P stands before 2LOAD:P@0, which it is to end"),
    (
        with_action(taken(STREAMED, 0, "h2d", "2FREE:P"), 0, 4, "2FREE:P"),
        "2FB2 uses what 2FREE:P has freed",
    ),
    (with_action(STREAMED, 0, 0, "2LOAD:P@0"), "2LOAD:P@0 stands on lane compute, it belongs on lane h2d"),
    (with_action(STREAMED, 1, 0, "2STORE:G", "h2d"), "2STORE:G stands on lane h2d, it belongs on lane d2h"),
    (taken(STREAMED, 0, "h2d", "0LOAD:P.1@0"), "0LOAD:P.2@0 is a piece out of order"),
    (taken(STREAMED, 0, "d2h", "2STORE:G"), "stage 2 has 1 visits in 1 steps on rank 0 and 0 STORE:G"),
    (with_action(STREAMED, 0, 0, "2FREE:G", "d2h"), "2 FREE:G of stage 2 on rank 0 for 1 gradients that leave it"),
    (taken(STREAMED, 1, "d2h", "1STORE:A1"), "1LOAD:A1: these activations are loaded, but never stored"),
    (taken(STREAMED, 1, "h2d", "1LOAD:A1"), "1STORE:A1: these activations are stored, but never loaded again"),
    (taken(STREAMED, 1, "h2d", "1FREE:A1"), "1LOAD:A1 is never freed"),
    (with_action(STREAMED, 1, 0, "0FREE:A1", "h2d"), "0FREE:A1 frees what is not there"),
    (with_action(STREAMED, 1, 0, "1LOAD:A1", "h2d"), "1LOAD:A1 stands twice; it moves once"),
    (with_action(SHARDED, 0, 0, "0UNSHARD", "net"), "stage 0 has 2 visits in 1 steps on rank 0 and 3 UNSHARD"),
    (taken(SHARDED, 0, "net", "1RESHARD"), "1UNSHARD is never freed: every UNSHARD has one RESHARD"),
    (with_action(SHARDED, 0, 0, "1LOAD:O@1", "h2d"), "1LOAD:O@1 is of no use: there is no 1STEP@1"),
]


def test_a_piece_with_a_number_of_any_size_is_out_of_order():
    piece = parse("0LOAD:P.1@0")._replace(part=2**32)  # more than a token can say
    bad = edit(STREAMED, 0, lambda row: row.insert(0, piece), "h2d")
    with pytest.raises(ScheduleError, match=r"0LOAD:P\.4294967296@0 is a piece out of order"):
        checked_graph(bad)


@pytest.mark.parametrize("bad, said", CASES, ids=[said[:40] for _, said in CASES])
def test_each_rule_has_its_counter_example(bad, said):
    message = broken(bad)
    assert said in message
    assert ">" in message.split("\n", 1)[1]
    assert len(message.splitlines()) <= 8


def test_a_stage_that_never_runs_there_is_not_loaded():
    two = Schedule(Shape(2, 2, 1), ((parse("0F0"), parse("0B0")), (parse("1F0"), parse("1B0"))))
    assert "1LOAD:P is of no use: rank 0 never runs stage 1" in broken(with_action(two, 0, 0, "1LOAD:P", "h2d"))


def test_a_version_written_on_a_load_is_the_one_that_is_read():
    def other(row: list[Action]) -> None:
        place = next(place for place, action in enumerate(row) if action.version == 1)
        row[place] = row[place]._replace(version=0)

    assert "brings version 0 to" in broken(edit(STREAMED, 0, other, "h2d"))


def test_a_load_behind_the_work_that_its_version_is_made_of_is_a_deadlock():
    def early(row: list[Action]) -> None:
        row.sort(key=lambda action: action.kind is not Kind.LOAD)

    assert "no rank can move" in broken(edit(STREAMED, 0, early, "h2d"))


def test_bad_requests_say_what_would_do():
    with pytest.raises(ScheduleError, match="add transfers of this kind once"):
        stream(STREAMED)
    with pytest.raises(ValueError, match="prefetch=-1"):
        stream(roundpipe(), prefetch=-1)
    with pytest.raises(ValueError, match="gradients='often': one of visit, step"):
        shard(data_parallel(), gradients="often")
    with pytest.raises(ScheduleError, match="cut apart"):
        shard(roundpipe())
    with pytest.raises(ScheduleError, match="reads what is newest"):
        stream(replace(add_steps(data_parallel()), policy=Policy.STASH))


def test_weights_that_go_round_come_from_where_they_are_stepped():
    """WeiPipe on 3 ranks: rank 2 steps stage 1, and nobody takes it from rank 1, also where all agree on that."""
    shape = Shape(3, 3, 3)
    weipipe = entry("weipipe")
    text = to_text(weipipe.lower(weipipe.build(shape).with_partition(symmetric((1, 1, 1))), prefetch=1, buffers=4))
    assert text.count("1LOAD:P@0>2") == 3
    check(from_text(text))
    with pytest.raises(ScheduleError, match="takes what rank 1 does not have: stage 1 is at home on rank 2"):
        check(from_text(text.replace("1LOAD:P@0>2", "1LOAD:P@0>1")))
