"""Who watches ranks, and what a rank makes of its request, without starting any."""

import os
import signal
import socket
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch_cases import TINY

from rpbench.engine.workload import Workload
from rpbench.torch_runtime.processes.diagnosis import Evidence, Phase, RunFailed, Standing
from rpbench.torch_runtime.processes.launch import LAST_WORDS_S, PERIOD_S, Sentinel
from rpbench.torch_runtime.processes.member import Member
from rpbench.torch_runtime.processes.ranks import START_S, _Watch
from rpbench.torch_runtime.request import TorchRequest


@pytest.fixture
def sentinel(monkeypatch, tmp_path):
    """One that ends nothing: what it would kill, and how it would leave, is noted."""
    found = object.__new__(Sentinel)
    done = []
    monkeypatch.setattr(os, "kill", lambda pid, number: done.append((pid, number)))
    monkeypatch.setattr(os, "_exit", lambda status: done.append(status))
    board = f"{socket.gethostname()}:{tmp_path}/board".encode()
    found._get = {"board/1": board, "pid/1": b"4711", "board/2": b"elsewhere:/board", "pid/2": b"4712"}.get
    found._lives = lambda rank: True
    found._place = SimpleNamespace(path=tmp_path / "own" / "board")
    return found, done


def test_a_rank_of_this_host_that_hangs_is_killed_and_one_elsewhere_is_left(sentinel):
    found, done = sentinel
    found._end(1)
    found._end(2)
    assert done == [(4711, signal.SIGKILL)]


@pytest.mark.parametrize("rank, says", [(0, True), (1, True), (2, False)])
def test_the_first_rank_and_the_one_at_fault_say_what_happened(sentinel, capsys, rank, says):
    found, done = sentinel
    found._rank, found._verdict = rank, lambda: RunFailed("rank 1 died", 1, "died")
    found._leave()
    assert ("rank 1 died" in capsys.readouterr().err) is says
    assert done == [1]


@pytest.mark.parametrize("comes", [True, False])
def test_after_anothers_failure_a_rank_leaves_only_if_its_main_thread_does_not_come(sentinel, comes):
    """What the main thread waits for others' last words must be over before."""
    found, _ = sentinel
    waited, answers, left = [], iter([False, comes, True]), []
    found._stop = SimpleNamespace(wait=lambda seconds: waited.append(seconds) or next(answers))
    found._rank, found._set, found._get = 0, lambda *_: None, {"failed": b"1"}.get
    found._place.pack, found._leave = lambda: b"", lambda: left.append(True)
    found._publish_and_look()
    assert left == [True] * (not comes)
    assert waited[1] > LAST_WORDS_S
    assert waited[::2] == [PERIOD_S] * 2


def test_a_failure_is_told_to_all_ranks_before_their_last_words_are_waited_for(sentinel, monkeypatch):
    found, _ = sentinel
    board, told = {}, []
    found._rank, found._set, found._place.pack = 2, board.__setitem__, lambda: b"here"
    found._stop, found._verdict = SimpleNamespace(set=lambda: told.append("stopped")), lambda: "verdict"
    monkeypatch.setattr(time, "sleep", lambda seconds: told.append((seconds, dict(board))))
    assert found.failure(ValueError("so")) == "verdict"
    waited = {"error/2": b"ValueError: so", "standing/2": b"here", "failed": b"1"}
    assert told == [(LAST_WORDS_S, waited), "stopped"]


@pytest.mark.parametrize("comes", [True, False])
def test_without_a_store_a_rank_ends_only_if_its_main_thread_does_not_come(sentinel, capsys, comes):
    found, done = sentinel
    waited = []
    found._stop = SimpleNamespace(wait=lambda seconds: waited.append(seconds) or comes)

    def gone():
        raise dist.DistError("no store")

    found._publish_and_look = gone
    found._watch()
    assert done == [1] * (not comes)
    assert ("no store" in capsys.readouterr().err) is not comes
    assert waited[0] > LAST_WORDS_S


def test_the_evidence_is_who_is_gone_here_who_raised_and_who_says_nothing(sentinel):
    """Rank 0 raised, 1 is gone, 2 is silent elsewhere, 3 speaks, 4 has not come yet."""
    found, _ = sentinel
    here, now = socket.gethostname(), time.time()
    boards = {f"board/{rank}": f"{host}:/absent".encode() for rank, host in enumerate((here, here, "there", "there"))}
    spoke = {f"alive/{rank}": repr(now - ago_s).encode() for rank, ago_s in enumerate((9.0, 9.0, 9.0, 1.0, 1.0))}
    found._get = (boards | spoke | {"error/0": b"ValueError: so", "pid/1": b"4711"}).get
    found._world, found._lives = 5, lambda rank: rank == 0
    hosts = {0: here, 1: here, 2: "there", 3: "there"}
    errors, gone = {0: "ValueError: so"}, {1: None}
    assert found._evidence() == Evidence([Standing()] * 5, errors, gone, hosts, frozenset({2}))


def test_a_ranks_state_has_the_moments_of_what_has_stepped():
    stepped, fresh = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    other = torch.nn.Parameter(torch.ones(1))
    member = object.__new__(Member)
    member.parameters = {(0, "a"): stepped, (1, "b"): fresh, (2, "c"): other}
    member.optimizers = [
        SimpleNamespace(state={stepped: {"exp_avg": torch.zeros(2)}}),
        SimpleNamespace(state={other: {"step": torch.ones(())}}),
    ]
    named = member._named()
    assert named.keys() == {
        "model.0.a", "model.1.b", "model.2.c", "optimizer.state.0.a.exp_avg", "optimizer.state.2.c.step"
    }  # fmt: skip
    assert not any(tensor.requires_grad for tensor in named.values())


def test_trained_parameters_are_named_by_module_and_each_is_in_one_optimizer(monkeypatch):
    """Module 1 before module 10; what does not learn is left out; sharded ones have an optimizer of their own."""
    layers = {"10": torch.nn.Linear(2, 1, bias=False), "1": torch.nn.Linear(1, 2)}
    layers["1"].bias.requires_grad_(False)
    sharded = layers["10"].weight
    monkeypatch.setattr("rpbench.torch_runtime.processes.member.is_sharded", lambda parameter: parameter is sharded)
    member = object.__new__(Member)
    member.runtime = SimpleNamespace(_stage=SimpleNamespace(submod=SimpleNamespace(layers=layers)))
    member.request = SimpleNamespace(optimizer={}, settings=lambda: SimpleNamespace(make=lambda own: own))
    assert list(member.parameters) == [(1, "weight"), (10, "weight")]
    assert member._make_optimizers() == [[sharded], [layers["1"].weight]]
    member.request.optimizer = None
    assert member._make_optimizers() == []


def test_a_step_is_remembered_with_its_moments_its_ends_and_the_sum_of_its_losses(monkeypatch):
    """From second 2 to second 5; what is reduced afterwards is no part of it."""
    done, clock = [], iter([2.0, 5.0])
    monkeypatch.setattr(dist, "barrier", lambda: done.append("met"))
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    member = object.__new__(Member)
    weight = torch.nn.Parameter(torch.ones(1))
    weight.grad = torch.ones(1)
    member.parameters, member.steps, member.losses = {(0, "a"): weight}, [], []
    member.lowered, member.device = SimpleNamespace(num_microbatches=2), torch.device("cpu")
    member.recorder = SimpleNamespace(
        begin=done.append, on_gpu=False, moments=["0F0"], place=SimpleNamespace(write=lambda *said: done.append(said))
    )
    member._batch = lambda step: {"tokens": torch.zeros(2)}
    member.groups = SimpleNamespace(add_up=lambda parameters: done.append("added up"))

    def step(*, tokens, target, losses, return_outputs):
        assert weight.grad is None
        losses += [torch.tensor([0.5, 1.0]), torch.tensor([2.0])]

    member.runtime = SimpleNamespace(step=step)
    member._step(7)
    assert member.steps == [(["0F0"], 2.0, 5.0)]
    assert member.losses == [3.5]
    assert done == [7, "met", (Phase.BETWEEN, -1), "added up"]


@pytest.mark.parametrize("came, waits", [((1.0, 1.0), False), ((1.0, 0.0), True), ((0.0, 0.0), True)])
def test_one_process_that_never_came_is_enough(came, waits):
    watch = _Watch([], [os.getpid()] * 2, stall_s=1e9)
    found = [Standing(phase=Phase.WAITING, at_s=at_s) for at_s in came]
    assert watch._one_has_not_come(found) is False, "it may still come"
    watch._began -= 2 * START_S
    assert watch._one_has_not_come(found) is waits


def test_ranks_that_write_no_board_have_stopped_after_minutes(tmp_path):
    watch = _Watch([tmp_path / "0", tmp_path / "1"], [os.getpid()] * 2, stall_s=1e9)
    assert not watch.stalled()
    watch._began -= 2 * START_S
    assert watch.stalled()


@pytest.mark.parametrize(
    "data_parallel, data_mode, num_microbatches", [(1, "fsdp", 8), (4, "plain", 8), (4, "fsdp", 2), (2, "fsdp", 4)]
)
def test_a_loss_is_divided_once_where_the_average_over_replicas_divides_too(data_parallel, data_mode, num_microbatches):
    member = object.__new__(Member)
    member.request = SimpleNamespace(data_parallel=data_parallel, data_mode=data_mode)
    assert member._scaled(Workload([], None, 8)).num_microbatches == num_microbatches


def test_tokens_are_of_the_vocabulary_and_as_many_as_a_sequence_has():
    """19 tokens there are, and sequences of 3; two of them a microbatch."""
    request = object.__new__(TorchRequest)
    for name, value in {"text": None, "microbatch_sequences": 2, "seed": 0}.items():
        object.__setattr__(request, name, value)
    batches = [request._data(TINY).microbatch(0, number).tokens for number in range(40)]
    assert {tuple(tokens.shape) for tokens in batches} == {(2, 3)}
    assert {int(token) for tokens in batches for token in tokens.flatten()} == set(range(19))
