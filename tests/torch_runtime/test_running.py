"""Schedules on torch's runtime, a process a rank: plain training's gradients, our rows, our timelines."""

import io
import math
import os
import signal
import socket
import time
from dataclasses import replace
from queue import SimpleQueue
from types import SimpleNamespace

import pytest
import torch
from torch_cases import FAITHFUL, LATER, TINY, TWO_WAY, request_for, schedule_near

from rpbench.cost.hardware.collective_rates import COLLECTIVES
from rpbench.engine.layout import layout_of
from rpbench.engine.reference import train_reference
from rpbench.ir.action import Kind
from rpbench.ir.schedule import ScheduleError, to_text
from rpbench.models.linear import Linear
from rpbench.registry import entries
from rpbench.side_processes import is_first_rank, under_torchrun
from rpbench.torch_runtime.processes import launch
from rpbench.torch_runtime.processes.diagnosis import RunFailed
from rpbench.torch_runtime.processes.ranks import Ranks
from rpbench.torch_runtime.processes.worker import pass_on, start_group
from rpbench.torch_runtime.recorded.gathering import SplitLinear, compare, summation_order
from rpbench.torch_runtime.request import check_request, make_request
from rpbench.torch_runtime.shards import CollectiveRequest

BAR = 1e-15
FAULTY = "tests.torch_runtime.faulty_worker"


@pytest.fixture(scope="module")
def two():
    with Ranks(2) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def four():
    with Ranks(4) as ranks:
        yield ranks


def assert_as_plain_training(outcome, *, relative=True):
    fields = outcome.fields()
    assert fields["grad_max_abs_diff"] <= BAR
    if relative:
        assert fields["grad_max_rel_diff"] <= BAR
    assert fields["weight_max_abs_diff"] <= 1e-14
    assert fields["copies_max_abs_diff"] == 0.0
    assert fields["rows_as_ours"]
    assert outcome.losses == pytest.approx(outcome.answer["reference_losses"], rel=1e-15, abs=0)


def assert_is_a_timeline(outcome):
    """The same type as the simulator's: every action once, in order on its rank, after what it needs."""
    timeline = outcome.timeline()
    assert timeline.schedule.rows == outcome.request.lowered.table.rows
    assert 0 < timeline.makespan <= outcome.wall_s()
    ended = {}
    for span in timeline.spans():
        assert span.start <= span.end
        for part in span.action.sub or (span.action,):
            ended[part.kind, part.stage, part.microbatch] = span.end
    for span in timeline.spans():
        if span.action.kind is Kind.F and span.action.stage:
            assert ended[Kind.F, span.action.stage - 1, span.action.microbatch] <= span.start
    waits_s = outcome.fields()["wait_s"]
    assert min(waits_s) >= 0
    assert sum(waits_s) > 0


# One of each sort; all of them are in the slow tests.
@pytest.mark.parametrize("name", ["1f1b", "dualpipe"])
def test_gradients_weights_and_rows(two, name):
    outcome = two.run(request_for(name, num_steps=2))
    assert_as_plain_training(outcome)
    assert_is_a_timeline(outcome)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*FAITHFUL, *LATER, *TWO_WAY])
def test_all_schedules_on_two_ranks(two, name):
    assert_as_plain_training(two.run(request_for(name, 2, 8, num_steps=2, microbatch_sequences=2)))


@pytest.mark.slow
@pytest.mark.parametrize("name", [*FAITHFUL, *LATER, *TWO_WAY])
def test_all_schedules_on_four_ranks(four, name):
    outcome = four.run(request_for(name, 4, 8, num_steps=2))
    assert_as_plain_training(outcome)
    assert_is_a_timeline(outcome)


@pytest.mark.slow
@pytest.mark.parametrize("name, chunks", [("interleaved_1f1b", 4), ("hanayo", 4), ("interleaved_zb", 3)])
def test_more_stages_a_rank(two, name, chunks):
    assert_as_plain_training(
        two.run(make_request(schedule_near(name, 2, 8, chunks), TINY, dtype="float64", verify=True))
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["1f1b", "interleaved_1f1b", "zb_v", "dualpipe_v"])
@pytest.mark.parametrize("mode", ["plain", "fsdp2", "replicate"])
def test_pipeline_times_data(four, name, mode):
    assert_as_plain_training(four.run(request_for(name, 2, 4, num_steps=2, data_parallel=2, data_mode=mode)))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["1f1b", "interleaved_1f1b", "zb_v", "dualpipe_v"])
def test_pipeline_times_tensor(four, name):
    """Sums over halves of a matrix round otherwise, and that is all: no bit differs where plain training halves too."""
    outcome = four.run(request_for(name, 2, 4, num_steps=2, tensor_parallel=2))
    assert_as_plain_training(outcome, relative=False)
    fields = outcome.fields()
    assert 0 < fields["grad_max_rel_diff"] < 1e-13
    assert fields["same_sums_grad_max_abs_diff"] == fields["same_sums_weight_max_abs_diff"] == 0.0


@pytest.mark.parametrize("by_inputs", [False, True])
def test_a_product_in_parts_is_the_product(by_inputs):
    """Small whole numbers: sums are exact in any order, so that parts and whole agree in every bit."""
    linear = Linear(6, 4, bias=True)
    for number, parameter in enumerate(linear.parameters()):
        parameter.data = torch.arange(parameter.numel()).reshape(parameter.shape) % 5 - 2.0 + number
    x = (torch.arange(30).reshape(5, 6) % 7 - 3.0).requires_grad_()
    found = []
    for module in (linear, SplitLinear(linear, 2, by_inputs=by_inputs)):
        y = module(x)
        found.append((y, *torch.autograd.grad((y * torch.arange(4.0)).sum(), (x, *linear.parameters()))))
    assert all(one.equal(other) for one, other in zip(*found, strict=True))
    assert [name for name, _ in SplitLinear(linear, 2, by_inputs=by_inputs).named_parameters()] == ["weight", "bias"]


@pytest.mark.slow
def test_dropout_draws_what_plain_training_draws(two):
    schedule = schedule_near("zb_v", 2, 4)
    request = make_request(schedule, replace(TINY, dropout=0.2), dtype="float64", verify=True)
    assert_as_plain_training(two.run(request))


# --- what goes wrong ---


def test_the_comparison_sees_a_wrong_a_missing_and_a_foreign_gradient():
    request = request_for("zb_v", optimizer=None)
    member = SimpleNamespace(request=request, lowered=request.lowered)
    groups = summation_order(request.lowered.table, 1, 1)
    layout = layout_of(request.lowered.table.partition)
    found = train_reference(request.workload(), layout, groups, request.settings(), updates=False)
    gradients = found.gradients[-1]
    place = max(gradients)
    wrong = gradients | {place: gradients[place] + 1e-9}
    fewer = {other: value for other, value in gradients.items() if other != place}
    differences = [compare(member, each, found.masters)["grad_max_abs_diff"] for each in (gradients, wrong, fewer)]
    assert differences == [0.0, pytest.approx(1e-9), float("inf")]


def test_data_parallel_ranks_add_up_microbatches_of_their_own():
    table = request_for("1f1b").lowered.table
    assert summation_order(table, 2, 2)[1, 2] == ((8, 9, 10, 11), (12, 13, 14, 15))


@pytest.mark.slow
def test_a_wrong_gradient_of_one_rank_is_seen():
    with Ranks(2, program=(FAULTY, "1", "gradient", "none")) as ranks:
        fields = ranks.run(request_for("1f1b")).fields()
    assert fields["grad_max_abs_diff"] == pytest.approx(1e-9, rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "what, cause, said",
    [
        ("exit", "died", "rank 1 died (exit status 3) at 1B1 of step 0"),
        ("kill", "died", "rank 1 died (signal 9, which the kernel sends when memory is out) at 1B1 of step 0"),
        ("boo", "raised", "rank 1 failed (RuntimeError: boo went wrong) at 1B1 of step 0"),
        ("memory", "out of memory", "rank 1 ran out of memory (OutOfMemoryError: CUDA out of memory"),
        ("hang", "hung", "rank 1 hangs: it has all it waits for and does not go on, at 1B1 of step 0"),
        ("stop", "hung", "rank 1 is stopped: its process is there and runs nothing, at 1B1 of step 0"),
    ],
)
def test_one_rank_ends_all_with_its_name_its_action_and_the_marked_table(what, cause, said):
    ranks = Ranks(2, stall_s=15, program=(FAULTY, "1", "1B1", what))
    pids, began = ranks.pids, time.monotonic()
    with pytest.raises(RunFailed) as failed:
        ranks.run(request_for("1f1b"))
    assert said in str(failed.value)
    assert ">1B1<" in str(failed.value)
    assert (failed.value.rank, failed.value.cause, failed.value.action) == (1, cause, "1B1")
    assert time.monotonic() - began < 60
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.slow
def test_a_rank_that_never_comes_is_named():
    ranks = Ranks(2, stall_s=2)
    os.kill(ranks.pids[1], signal.SIGSTOP)
    with pytest.raises(RunFailed, match=r"rank 1 is stopped: .* before its first action") as failed:
        ranks.run(request_for("1f1b"))
    assert failed.value.rank == 1


def test_a_rank_without_its_peer_says_who_has_not_come(monkeypatch):
    with socket.socket() as one, socket.socket() as other:  # of nobody, once they are closed
        one.bind(("127.0.0.1", 0))
        other.bind(("127.0.0.1", 0))
        port, another = one.getsockname()[1], other.getsockname()[1]
    where = {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for name, value in where.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(
        RunFailed, match=r"rank 1 has not come within 0.2 s of rank 0, nor have 1 more; 1 of 3"
    ) as failed:
        start_group("cpu", 0.2)
    assert (failed.value.rank, failed.value.cause) == (1, "absent")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("MASTER_PORT", str(another))
    with pytest.raises(RunFailed, match=f"rank 0 has not come: 127.0.0.1:{another} does not answer"):
        start_group("cpu", 0.2)


def test_a_rank_whose_parent_is_killed_takes_the_folder_with_it(tmp_path):
    folder = tmp_path / "ranks"
    folder.mkdir()
    (folder / "rank0").write_bytes(b"")
    lines = SimpleQueue()
    for said, is_there in (("1\nend\n", True), ("1\n", False)):
        pass_on(io.StringIO(said), lines, folder)
        assert [lines.get(), lines.get()] == ["1", None]
        assert folder.exists() == is_there


def test_different_tables_on_two_ranks_are_refused_before_anything_runs(two):
    one, other = request_for("1f1b"), request_for("gpipe")
    with pytest.raises(ValueError, match="rank 1 has another table or request than rank 0"):
        two._answers([one, other])
    assert two.run(one).rows_as_ours  # and the ranks live on


def test_too_few_ranks_are_refused(two):
    with pytest.raises(ValueError, match="2 processes for a request of 4 ranks"):
        two.run(request_for("1f1b", 4))


def test_under_torchrun_the_world_must_fit(monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert under_torchrun()
    assert is_first_rank()
    with pytest.raises(ValueError, match=r"WORLD_SIZE=2: 1f1b has 4 pipeline ranks.* 4 processes; start torchrun with"):
        launch.run_on_torch(request_for("1f1b", 4))


@pytest.mark.parametrize(
    "fields, said",
    [
        ({"data_parallel": 2, "data_mode": "ddp"}, "data_mode=ddp: its hooks do not fire"),
        ({"data_parallel": 2, "data_mode": "fsdp2_reshard"}, "data_mode=fsdp2_reshard: a weight gradient that comes"),
        ({"data_mode": "zero"}, "data_mode=zero: one of plain, fsdp2, replicate"),
        ({"recompute": "all"}, "recompute=all: a backward in I and W recomputes once for every group"),
        ({"options": {"defer_pp_recv": True}}, "defer_pp_recv=True: messages carry no name, and deferring receives"),
        ({"options": {"scale_grads": True}}, "scale_grads=True; backend=torch takes no options"),
        ({"data_parallel": 2, "tensor_parallel": 2}, "backend=torch composes a pipeline with one of them"),
        ({"dtype": "bfloat16"}, "dtype=bfloat16: backend=torch trains in float64 or float32"),
        ({"device": "tpu"}, "device=tpu: cpu"),
        ({"num_steps": 0}, "num_steps=0: at least 1"),
        ({"optimizer": {"clip_norm": 1.0}}, "clip_norm and loss scaling look at all gradients"),
    ],
)
def test_what_would_be_wrong_without_an_error_is_refused_by_name(fields, said):
    with pytest.raises(ValueError, match=said):
        request_for("zb_v", **fields)


def test_models_that_do_not_cut_are_refused():
    schedule = schedule_near("1f1b", 2, 4)
    with pytest.raises(ValueError, match="ties embedding and head"):
        make_request(schedule, replace(TINY, tied=True))
    with pytest.raises(ValueError, match="sums to 16 layers, the model has 5"):
        make_request(schedule, replace(TINY, num_layers=5))
    with pytest.raises(ValueError, match="has no partition"):
        make_request(replace(schedule, partition=None), TINY)
    wide = schedule_near("1f1b", 4, 4)
    empty = replace(wide, partition=replace(wide.partition, forward=(8, 0, 4, 4), backward=(8, 0, 4, 4)))
    with pytest.raises(ValueError, match="stage 1 holds no layer"):
        make_request(empty, TINY)


def test_no_process_is_needed_to_refuse_a_schedule():
    request = request_for("1f1b")
    stale = entries()["pipedream"].build(schedule_near("1f1b", 2, 4).shape)
    with pytest.raises(ScheduleError, match="asynchronous"):
        check_request(replace(request, schedule=to_text(stale)))


def test_fields_say_what_ran(two):
    outcome = two.run(request_for("1f1b", verify=False, dtype="float32", num_warmup_steps=1, num_steps=2))
    fields = outcome.fields()
    assert fields["num_messages"] == 16  # 4 microbatches, two directions, a SEND and a RECV each
    assert fields["evidence"] == "measured"
    assert len(fields["step_walls_s"]) == len(fields["losses"]) == 2
    assert math.isclose(fields["losses"][0], math.log(TINY.vocab), rel_tol=0.1)
    assert "grad_max_abs_diff" not in fields
    assert len(set(fields["hosts"])) == 1
    assert fields["clock_error_s"] == 0.0


def test_collectives_of_every_size_are_timed(two):
    answer = two.time_collectives(CollectiveRequest(2, (4096, 65536), repeats=3))
    assert answer["backend"] == "gloo"
    assert list(answer["seconds"]) == list(COLLECTIVES)
    for found in answer["seconds"].values():
        assert list(found) == ["4096", "65536"]
        assert all(len(each) == 3 and min(each) > 0 for each in found.values())
