"""Messages: put so that each pair of ranks agrees on their order, with our numbers and with torch's."""

import re
from dataclasses import replace

import pytest
from torch_cases import FAITHFUL, LATER, TWO_WAY, schedule_near

from rpbench.ir.action import RECV, SEND, Kind, text
from rpbench.ir.checks.check import check
from rpbench.ir.schedule import ScheduleError, Shape
from rpbench.registry import entries
from rpbench.torch_runtime.formats.tables import find_chains
from rpbench.torch_runtime.lowering import check_message_order, lower


def test_two_ranks_by_hand():
    lowered = lower(entries()["1f1b"].build(Shape(2, 2, 1)))
    assert lowered.tokens(0) == ["0F0", "0SEND_F0", "0RECV_B0", "0B0"]
    assert lowered.tokens(1) == ["1RECV_F0", "1F0", "1B0", "1SEND_B0"]
    assert lowered.tokens(0, sharded=True) == [
        "0UNSHARD",
        "0F0",
        "0SEND_F0",
        "0RECV_B0",
        "0B0",
        "0REDUCE_GRAD",
        "0RESHARD",
    ]


@pytest.mark.parametrize("name", [*FAITHFUL, *LATER, *TWO_WAY])
def test_rows_run_even_where_a_send_waits_for_its_receive(name):
    for num_ranks, factor in ((2, 1), (2, 3), (4, 1), (4, 2)):
        schedule = schedule_near(name, num_ranks, factor * num_ranks)
        lowered = lower(schedule)
        check(lowered.schedule, rendezvous=True)
        for rank in range(lowered.num_ranks):
            actions = [action._replace(peer=None) for action in lowered.row(rank)]
            assert [lowered.chains.action(token) for token in lowered.tokens(rank)] == actions
            kept = [action for action in actions if action.kind not in SEND | RECV]
            assert kept == list(schedule.compute(rank))


def test_two_directions_are_one_pipeline_cut_in_the_middle():
    """Chimera on 2 ranks: microbatch 0 goes down, 1 goes up and is microbatch 0 of stages 2 and 3."""
    chains = find_chains(entries()["chimera"].build(Shape(2, 2, 2)))
    assert chains.routes == ((0, 1), (1, 0))
    assert chains.microbatches == ((0,), (1,))
    assert chains.ranks == (0, 1, 1, 0)
    assert chains.stages_of(0) == [0, 3]
    assert text(chains.action("3SEND_B0")) == "1SEND_B1"


def with_row(schedule, rank, change):
    rows = [dict(row) for row in schedule.rows]
    rows[rank]["compute"] = tuple(change(list(rows[rank]["compute"])))
    return replace(schedule, rows=tuple(rows))


def deferred(row):
    """Every receive right before what uses it, as `defer_pp_recv` has it."""
    row = list(row)
    for receive in [action for action in row if action.kind in RECV]:
        row.remove(receive)
        users = (Kind.F,) if receive.kind is Kind.RECV_F else (Kind.B, Kind.I)
        place = next(i for i, a in enumerate(row) if a[1:3] == receive[1:3] and a.kind in users)
        row.insert(place, receive)
    return row


def test_deferred_receives_swap_messages_and_are_refused():
    lowered = lower(schedule_near("zb_v", 2, 8)).schedule
    for rank in range(2):
        lowered = with_row(lowered, rank, deferred)
    with pytest.raises(ScheduleError, match=r"rank 0 is at .* where rank 1 is at .*: a pair of ranks keeps one order"):
        check_message_order(lowered)


def test_a_message_without_its_other_end_is_refused():
    lowered = lower(entries()["1f1b"].build(Shape(2, 2, 2))).schedule
    broken = with_row(lowered, 1, lambda row: [action for action in row if text(action) != "1RECV_F1>0"])
    with pytest.raises(ScheduleError, match=re.escape("keeps one order of messages")):
        check_message_order(broken)


def test_digests_tell_tables_and_cuts_apart():
    one, other = lower(schedule_near("1f1b", 2, 4)), lower(schedule_near("1f1b", 2, 6))
    assert one.digest == lower(schedule_near("1f1b", 2, 4)).digest != other.digest
    recut = replace(one.table, partition=replace(one.table.partition, forward=(2, 14), backward=(2, 14)))
    assert lower(recut).digest != one.digest
