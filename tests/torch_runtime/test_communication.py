"""Messages of lowered tables: alive or dead by kind of queue, the cycle by name, and torch 2.15's five settings."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch_cases import FAITHFUL, LATER, TWO_WAY, schedule_near

from rpbench.cli import dispatch
from rpbench.cost.constant import unit_times
from rpbench.ir.partition import symmetric
from rpbench.ir.schedule import ScheduleError
from rpbench.sim.longest_path import simulate
from rpbench.torch_runtime.communication.execution import Durations, Queues, find_levels
from rpbench.torch_runtime.communication.settings import Settings, lower_as_torch
from rpbench.torch_runtime.communication.tokens import read_table
from rpbench.torch_runtime.communication.verdict import judge
from rpbench.torch_runtime.formats.tables import to_csv
from rpbench.torch_runtime.lowering import lower
from rpbench.torch_runtime.versions import load_runtime

# 1F1B on two ranks, two microbatches, its messages put in by hand.
ALIVE = (
    "0F0,0SEND_F0,0RECV_B0,0F1,0SEND_F1,0B0,0RECV_B1,0B1\n"
    "1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1"
)  # fmt: skip
CROSSED = ALIVE.replace("0RECV_B0,0F1,0SEND_F1", "0F1,0SEND_F1,0RECV_B0")  # both ranks send first
SWAPPED = ALIVE.replace("1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1", "1RECV_F1,1RECV_F0,1F0,1B0,1SEND_B0,1F1")


def verdicts(text, *, grouped=False):
    table = read_table(text)
    return [judge(table, queues, grouped=grouped).verdict for queues in Queues]


@pytest.mark.parametrize("name", [*FAITHFUL, *LATER, *TWO_WAY])
def test_what_we_lower_is_alive_in_every_kind_of_queue(name):
    schedule = schedule_near(name, 4, 8)
    table = read_table(lower(schedule).to_csv(sharded=True), schedule.shape.num_stages)
    for queues, grouped in itertools.product(Queues, (False, True)):
        assert judge(table, queues, grouped=grouped).verdict == "alive"


@pytest.mark.parametrize("name", FAITHFUL)
def test_without_time_for_messages_a_table_takes_what_the_simulator_says(name):
    schedule = schedule_near(name, 4, 8)
    count = schedule.shape.num_stages
    costs = unit_times(count).table(symmetric((1,) * count))
    lasts = {kind: float(costs.work[kind][0].main + costs.work[kind][0].pre) for kind in costs.work}
    found = judge(
        read_table(lower(schedule).to_csv()),
        Queues.EDGE,
        durations=Durations(
            lambda rank, token: sum(
                next(lasts[kind] for kind in lasts if kind.name == part.kind) for part in token.parts
            )
        ),
    )
    assert found.execution.makespan == pytest.approx(float(simulate(schedule, costs).makespan))


def test_two_ranks_that_both_send_first_are_dead_where_directions_share_a_queue():
    assert verdicts(ALIVE) == ["alive"] * 3
    assert verdicts(CROSSED) == ["alive", "dead", "dead"]
    cycle = judge(read_table(CROSSED), Queues.PAIR).cycle
    assert [(each.rank, each.place, each.action) for each in cycle] == [(0, 4, "0RECV_B0"), (1, 4, "1RECV_F1")]
    assert cycle[0].why == "stands in its queue behind 0SEND_F1 (action 3)"
    assert cycle[1].row == "... 1F0 1B0 1SEND_B0 >1RECV_F1< 1F1 1B1 1SEND_B1 ..."


def test_a_group_of_sends_and_receives_passes_together():
    """What `batch_isend_irecv` is for: the same two ranks live where each hands over both messages at once."""
    assert verdicts(CROSSED.replace("1SEND_B0,1RECV_F1", "1RECV_F1,1SEND_B0"), grouped=False) == ["alive"] * 3
    assert verdicts(CROSSED, grouped=True) == ["alive", "alive", "alive"]


def test_a_ring_of_three_ranks_stops_only_where_all_messages_share_a_queue():
    """Two stages a rank. Rank 1 asks for its second forward's input before it sends the output of its first one."""
    ring = (
        "0F0,0SEND_F0,3RECV_F0,3F0,3SEND_F0,3RECV_B0,3B0,3SEND_B0,0RECV_B0,0B0\n"
        "1RECV_F0,1F0,1SEND_F0,4RECV_F0,4F0,4SEND_F0,4RECV_B0,4B0,4SEND_B0,1RECV_B0,1B0,1SEND_B0\n"
        "2RECV_F0,2F0,2SEND_F0,5RECV_F0,5F0,5B0,5SEND_B0,2RECV_B0,2B0,2SEND_B0"
    )
    early = ring.replace("1SEND_F0,4RECV_F0", "4RECV_F0,1SEND_F0")
    assert verdicts(ring) == ["alive"] * 3
    assert dict(zip(Queues, verdicts(early), strict=True)) == {"edge": "alive", "pair": "alive", "group": "dead"}
    cycle = judge(read_table(early), Queues.GROUP).cycle
    assert [each.action for each in cycle] == ["3SEND_F0", "2SEND_F0", "1SEND_F0"]


def test_ranks_that_wait_for_each_other_are_dead_in_every_kind_of_queue():
    """Rank 0 wants a gradient before it sends what that is made from; rank 1 wants both inputs first."""
    text = "0F0,0SEND_F0,0RECV_B0,0B0,0F1,0SEND_F1,0RECV_B1,0B1\n1RECV_F0,1F0,1RECV_F1,1F1,1B0,1SEND_B0,1B1,1SEND_B1"
    assert verdicts(text) == ["dead"] * 3
    cycle = judge(read_table(text), Queues.EDGE).cycle
    assert [(each.rank, each.action) for each in cycle] == [(0, "0B0"), (1, "1SEND_B0"), (1, "1F1"), (0, "0SEND_F1")]
    assert cycle[0].why == "waits for 0RECV_B0 (action 2 of rank 0)"
    assert cycle[1].why == "comes after 1F1 (action 3)"


def test_a_receive_of_another_tensor_is_seen():
    assert verdicts(SWAPPED)[0] == "mixed"
    wrong = judge(read_table(SWAPPED), Queues.EDGE).cycle[0]
    assert (wrong.rank, wrong.action, wrong.why) == (1, "1RECV_F1", "it gets what 0SEND_F0 of rank 0 sends")


@pytest.mark.parametrize(
    "text, verdict, rank, action, why",
    [
        (ALIVE.replace(",1SEND_B1", ""), "dead", 0, "0B1", "waits for 0RECV_B1"),
        (ALIVE.replace("0RECV_B1,", ""), "broken", 0, "0B1", "0RECV_B1 does not stand before it"),
        (ALIVE.replace("0F0,0SEND_F0", "0SEND_F0,0F0"), "broken", 0, "0SEND_F0", "has not been computed before it"),
        (ALIVE.replace("0RECV_B1,0B1", "0B1,0RECV_B1"), "broken", 0, "0B1", "0RECV_B1 does not stand before it"),
    ],
)
def test_what_is_wrong_is_named_by_rank_and_action(text, verdict, rank, action, why):
    found = judge(read_table(text), Queues.EDGE)
    assert (found.verdict, found.cycle[0].rank, found.cycle[0].action) == (verdict, rank, action)
    assert why in found.cycle[0].why


def test_a_message_without_its_other_end_stops_who_waits_for_it():
    cycle = judge(read_table(ALIVE.replace(",1SEND_B1", "")), Queues.EDGE).cycle
    assert cycle[-1].why == "rank 1 has no send left for it"


@pytest.mark.parametrize(
    "text, said",
    [
        ("0F0,0SEND_X0,0B0", r"row 1 \(rank 0\): '0SEND_X0' is no action of a table"),
        (ALIVE.replace("1SEND_B1", "1SEND_F1"), "1SEND_F1: stage 1 is the last one, nothing is there to talk to"),
        (ALIVE.replace("0SEND_F1", "0SEND_F0"), "0SEND_F0 stands twice: a tensor goes to its stage once"),
        (ALIVE.replace("1B1", "1W1"), "1I1 is missing"),
        (ALIVE.replace("1SEND_B1", "0SEND_F1"), "0SEND_F1, but stage 0 is computed by rank 0"),
        ("0F0,0SEND_F0,1RECV_F0,1F0,1B0,0B0", "0SEND_F0 goes to a stage of the same rank, which needs no message"),
        ("0SEND_F0", "holds no computation"),
        ("0F0,\r0B0,0B1\n", "0F0, but stage 0 is computed by rank 1"),  # torch's own reader ends a row there
        ("0F0,0WAIT_REDUCE_GRAD,0B0", "0WAIT_REDUCE_GRAD, but 0REDUCE_GRAD is not under way there"),
        (ALIVE.replace("1SEND_B1", "1SEND_B1,1WAIT_SEND_B1"), r"0SEND_F0 has no wait, where others of the table have"),
        (ALIVE.replace("1SEND_B1", "1WAIT_SEND_B1,1SEND_B1"), "0SEND_F0 has no wait"),
        (ALIVE.replace("1RECV_F1", "1RECV_F1,1RECV_F2"), "1RECV_F2, but the last microbatch is 1"),
        ("0F0,0B0\n2F0,2B0", "stage 1 is computed in no row"),
    ],
)
def test_a_table_that_cannot_be_is_refused(text, said):
    with pytest.raises(ScheduleError, match=said):
        read_table(text)


# --- the five settings ----------------------------------------------------------------------------------------


def test_the_rows_that_torch_makes_of_two_microbatches():
    """Written down from the rules of torch 2.15: 1F1B on two ranks."""
    table = read_table("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1")
    rows = lower_as_torch(table, Settings()).to_csv().splitlines()
    assert rows == [
        "0UNSHARD,0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0WAIT_SEND_F0,0RECV_B1,0B1,0WAIT_SEND_F1,0REDUCE_GRAD,"
        "0WAIT_REDUCE_GRAD,0RESHARD",
        "1UNSHARD,1RECV_F0,1F0,1RECV_F1,1B0,1SEND_B0,1F1,1B1,1SEND_B1,1REDUCE_GRAD,1WAIT_REDUCE_GRAD,1RESHARD,"
        "1WAIT_SEND_B0,1WAIT_SEND_B1",
    ]
    one = lower_as_torch(table, Settings(max_outstanding_sends=1)).to_csv().splitlines()
    assert one[0].startswith("0UNSHARD,0F0,0SEND_F0,0F1,0WAIT_SEND_F0,0SEND_F1")


@pytest.mark.parametrize("name", FAITHFUL)
def test_settings_keep_what_they_promise(name):
    table = read_table(to_csv(schedule_near(name, 4, 8)))
    plain = find_levels(lower_as_torch(table, Settings()))
    for most in (1, 2):
        budget = lower_as_torch(table, Settings(max_outstanding_sends=most))
        assert find_levels(budget).sends == most < plain.sends
        assert judge(budget, Queues.EDGE).verdict == "alive"
    late = find_levels(lower_as_torch(table, Settings(defer_pp_recv=True)))
    assert late.receive_buffers <= plain.receive_buffers
    if name != "dualpipe_v":  # whose pairs need two stages at a time
        assert find_levels(lower_as_torch(table, Settings(max_active_stages=1))).gathered_stages == 1


def test_deferred_receives_swap_messages_of_a_v_and_stop_pairs_on_one_communicator():
    """The wrong gradients that torch 2.13 gives with `defer_pp_recv` in ZB-V, without an error."""
    late = lower_as_torch(read_table(to_csv(schedule_near("zb_v", 4, 8))), Settings(defer_pp_recv=True))
    assert [judge(late, queues).verdict for queues in Queues] == ["mixed", "dead", "dead"]


def test_time_of_gathers_is_hidden_as_far_as_they_are_issued_ahead():
    """Two stages on a rank, each gathered in 3: 3 before the first computation; the second is gathered meanwhile."""
    table = read_table("0F0,0F1,1F0,1F1,1B0,1B1,0B0,0B1")
    times = Durations(gather={0: 3.0, 1: 3.0})
    spans = [
        judge(lower_as_torch(table, Settings(unshard_lookahead=ahead)), Queues.EDGE, durations=times).execution.makespan
        for ahead in ("full", (1,))
    ]
    assert spans == [3 + 8 + 1, 3 + 8 + 3]


def test_a_deferred_reduction_runs_beside_the_next_computations():
    table = read_table("0F0,1F0,1B0,0B0")
    times = Durations(reduce={0: 3.0, 1: 3.0})
    spans = [
        judge(
            lower_as_torch(table, Settings(defer_reduce_grad_wait=late)), Queues.EDGE, durations=times
        ).execution.makespan
        for late in (False, True)
    ]
    assert spans == [4 + 3 + 3, 3 + 3 + 3]  # the last computation is under the first reduction


@pytest.mark.parametrize("name", FAITHFUL)
def test_our_rows_are_torchs(name, tmp_path):
    """Where torch has the settings: its own passes, action for action."""
    schedules = load_runtime()
    if not hasattr(schedules, "_add_wait_send_budget"):
        pytest.skip("this torch has no such settings")
    schedule = schedule_near(name, 4, 6)
    text = to_csv(schedule)
    table = read_table(text)
    for late, deferred, most, stages in itertools.product((False, True), (False, True), (None, 1, 3), (2, 3)):
        settings = Settings(stages, "auto", deferred, late, most)
        rows = {
            rank: [schedules._Action.from_str(cell) for cell in line.split(",")]
            for rank, line in enumerate(text.split("\n"))
        }
        rows = {
            rank: schedules._add_reduce_grad(
                schedules._add_unshard_reshard(row, stages, unshard_lookahead=min(rank + 2, stages)),
                schedule.shape.num_microbatches,
                defer_reduce_grad_wait=deferred,
            )
            for rank, row in rows.items()
        }
        holder = table.rank_of.__getitem__
        rows = schedules._add_wait_send(schedules._add_send_recv(rows, holder, schedule.shape.num_stages))
        rows = schedules._defer_recv_ops(rows, holder) if late else rows
        try:
            rows = rows if most is None else schedules._add_wait_send_budget(rows, holder, most)
        except ValueError:
            with pytest.raises(ScheduleError, match=f"max_outstanding_sends={most}: rank"):
                lower_as_torch(table, settings)
            continue
        assert lower_as_torch(table, settings).to_csv() == "\n".join(",".join(map(str, row)) for row in rows.values())


# --- the command, and gloo ------------------------------------------------------------------------------------


def ask(capsys, *words):
    status = dispatch(["show", "check=communication", *words])
    out, err = capsys.readouterr()
    return status, out, err


def test_the_command_says_which_queues_a_foreign_table_dies_in(tmp_path, capsys):
    path = tmp_path / "theirs.csv"
    path.write_text(CROSSED)
    status, out, err = ask(capsys, f"schedule_file={path}")
    answer = json.loads(out)
    assert status == 1
    assert answer["messages_by"] == "file"
    assert {(each["channels"], each["grouped"]): each["verdict"] for each in answer["verdicts"]} == {
        ("edge", False): "alive",
        ("edge", True): "alive",
        ("pair", False): "dead",
        ("pair", True): "alive",
        ("group", False): "dead",
        ("group", True): "alive",
    }
    assert "rank 1 action 4, 1RECV_F1: stands in its queue behind 1SEND_B0 (action 3)" in err
    assert ask(capsys, f"schedule_file={path}", "channels=edge")[0] == 0


def test_the_command_gives_times_and_bytes_of_the_settings(capsys):
    words = ("schedule=zb_v", "num_devices=2", "num_microbatches=4", "model=tiny_gpt", "cluster=8x_rtx4090")
    status, out, _ = ask(capsys, *words, "data_parallel=4", "max_outstanding_sends=3")
    answer = json.loads(out)
    assert status == 0
    assert answer["messages_by"] == "torch 2.15"
    rows = {json.dumps(row["settings"]): row for row in answer["settings"]}
    plain, three, late = rows["{}"], rows['{"max_outstanding_sends": 3}'], rows['{"defer_pp_recv": true}']
    assert three["most_sends"] == 3 < plain["most_sends"]
    assert three["most_send_bytes"] * plain["most_sends"] == plain["most_send_bytes"] * 3 > 0
    assert late["verdicts"]["edge"] == "mixed"
    assert plain["makespan"]["edge"] > 0
    assert plain["most_gathered_bytes"] > 0


@pytest.mark.parametrize(
    "words, said",
    [
        (("check=speed",), "unknown check 'speed'"),
        (("format=torch_csv",), "check=communication format=torch_csv: the check prints its own answer"),
        (("channels=edges",), "unknown channels 'edges'; did you mean edge"),
        (("max_outstanding_sends=0",), "max_outstanding_sends=0: at least 1"),
        (("unshard_lookahead=9,9,9",), "unshard_lookahead=9,9,9: 4 numbers, one a rank"),
        (("defer_pp_recv=perhaps",), "defer_pp_recv=perhaps: true or false"),
        (("data_parallel=2", "cost=unit"), "data_parallel=2: gathering weights takes the time of their bytes"),
        (("schedule=roundpipe",), "its weights are streamed"),
    ],
)
def test_a_wrong_request_is_refused_with_status_2(words, said, capsys):
    own = [] if any(word.startswith("schedule=") for word in words) else ["schedule=1f1b"]
    status, out, err = ask(capsys, *own, "num_devices=4", "num_microbatches=4", *words)
    assert (status, out) == (2, "")
    assert said in err


def test_settings_are_refused_for_a_table_that_has_its_messages(tmp_path, capsys):
    path = tmp_path / "theirs.csv"
    path.write_text(ALIVE)
    status, _, err = ask(capsys, f"schedule_file={path}", "defer_pp_recv=true")
    assert status == 2
    assert "defer_pp_recv decides where messages stand, and the table has them already" in err


def test_mutated_tables_do_on_gloo_what_is_said_of_them():
    """A sample; a thousand by hand, as `tables_on_gloo.py` says."""
    tests = Path(__file__).parents[1]
    paths = os.pathsep.join((str(tests.parent), str(tests), os.environ.get("PYTHONPATH", "")))
    ran = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("tables_on_gloo.py")), "--tables", "8", "--seed", "7"],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": paths},
        timeout=300,
        check=False,
    )
    assert ran.returncode in (0, 1), ran.stderr
    answer = json.loads(ran.stdout)
    assert answer["differ"] == []
    assert {"alive: right", "dead: hangs", "mixed: wrong"} <= answer["seen"].keys()
