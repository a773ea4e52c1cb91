"""Who watches ranks, and what a rank makes of its request, without starting any."""

import os
import signal
import socket
from types import SimpleNamespace

import pytest
from torch_cases import TINY

from rpbench.engine.workload import Workload
from rpbench.torch_runtime.processes.diagnosis import Phase, RunFailed, Standing
from rpbench.torch_runtime.processes.launch import Sentinel
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
