"""Collectives between ranks: what cannot be timed is refused; a rank that hangs or dies ends all, with a message."""

from types import SimpleNamespace

import pytest

from rpbench.side_processes import GRACE_S
from rpbench.torch_runtime import shards
from rpbench.torch_runtime.processes.diagnosis import Phase, RunFailed
from rpbench.torch_runtime.processes.ranks import LAST_WORDS_S, Ranks
from rpbench.torch_runtime.processes.worker import from_line, to_line
from rpbench.torch_runtime.shards import COLLECTIVES, STALL_S, CollectiveRequest, run_collectives
from tests.torch_runtime.faulty_collectives import MARKED

FAULTY = "tests.torch_runtime.faulty_collectives"


def test_a_request_survives_the_line_it_is_sent_as():
    asked = CollectiveRequest(4, (64, 1024), 3, "cuda")
    assert from_line(to_line(asked)) == asked


@pytest.mark.parametrize(
    "asked, rule",
    [
        (CollectiveRequest(1), "ranks=1: a collective needs at least 2"),
        (CollectiveRequest(2, (4096,)), "at least two"),
        (CollectiveRequest(2, (4, 4096)), "a value of 4 bytes for every rank"),
        (CollectiveRequest(99, device="cuda"), "each rank needs one"),
    ],
)
def test_what_cannot_be_timed_is_refused(asked, rule):
    with pytest.raises(ValueError, match=rule):
        asked.check()


def test_the_board_says_which_collective_a_rank_is_at(monkeypatch):
    """Numbered through, size by size: of a rank that hangs this is all that is known."""
    written, begun = [], []
    alone = SimpleNamespace(get_backend=lambda: "gloo", get_rank=lambda: 0)
    monkeypatch.setattr(shards, "dist", alone)
    monkeypatch.setattr(shards, "timed", lambda name, size, *_: begun.append(len(written)) or (size, [0.5]))
    found = run_collectives(CollectiveRequest(2, (64, 1024)), SimpleNamespace(write=lambda *said: written.append(said)))
    calls = 2 * len(COLLECTIVES)
    assert written == [*((Phase.COMPUTING, number, 0) for number in range(calls)), (Phase.BETWEEN,)]
    assert begun == list(range(1, calls + 1))  # said before it begins
    assert found["seconds"] == {name: {"64": [0.5], "1024": [0.5]} for name in COLLECTIVES}


@pytest.mark.slow
def test_a_rank_that_hangs_ends_all():
    with Ranks(2, stall_s=20.0, program=(FAULTY, "hang")) as ranks:
        ranks.time_collectives(CollectiveRequest(2, (4096, 65536), repeats=1))
        with pytest.raises(RunFailed, match=r"rank . hangs"):
            ranks.time_collectives(CollectiveRequest(2, (MARKED, 65536), repeats=1))
        assert not ranks._processes


@pytest.mark.slow
@pytest.mark.parametrize("what, words", [("exit", "died .exit status 3"), ("kill", "died .signal -?9")])
def test_a_rank_that_dies_ends_all(what, words):
    with Ranks(2, program=(FAULTY, what)) as ranks:
        with pytest.raises(RunFailed, match=words) as caught:
            ranks.time_collectives(CollectiveRequest(2, (MARKED, 65536), repeats=1))
        assert caught.value.rank == 1
        assert not ranks._processes


def test_standing_still_and_the_end_of_all_leave_a_third_of_a_minute_to_start():
    assert STALL_S + LAST_WORDS_S + GRACE_S < 40
