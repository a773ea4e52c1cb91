"""Who is at fault when ranks have stopped, from where each of them stands."""

import pytest
from torch_cases import schedule_near

from rpbench.torch_runtime.lowering import lower
from rpbench.torch_runtime.processes.diagnosis import (
    Evidence,
    Phase,
    Place,
    Standing,
    diagnose,
    read_file,
    read_standing,
    unpack,
)

LOWERED = lower(schedule_near("1f1b", 2, 4))
CLOSED = "RuntimeError: [gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:52461"


def at(rank, token, phase, at_s=10.0):
    return Standing(1, LOWERED.tokens(rank).index(token), phase, at_s)


WAITS = at(0, "0B0", Phase.WAITING), at(1, "1B0", Phase.COMPUTING)


def found(standings=WAITS, errors=None, exits=None, **more):
    return diagnose(LOWERED, Evidence(standings, errors or {}, exits or {}, {}, **more))


@pytest.mark.parametrize(
    "evidence, rank, cause, said",
    [
        ({"exits": {1: -9}, "errors": {0: CLOSED}}, 1, "died", "rank 1 died (signal 9, which the kernel sends"),
        ({"exits": {1: 3}}, 1, "died", "rank 1 died (exit status 3) at 1B0 of step 1"),
        ({"exits": {1: None}, "errors": {0: CLOSED}}, 1, "died", "its process is gone"),
        ({"errors": {0: CLOSED, 1: "ValueError: no"}}, 1, "raised", "rank 1 failed (ValueError: no) at 1B0"),
        ({"errors": {1: "RuntimeError: DefaultCPUAllocator: can't allocate memory"}}, 1, "out of memory", "ran out of"),
        ({}, 1, "hung", "rank 1 hangs: it has all it waits for"),
        ({"frozen": frozenset({0})}, 0, "hung", "rank 0 is stopped"),
        ({"errors": {0: CLOSED}}, 1, "hung", "rank 1 hangs"),
    ],
)
def test_the_one_at_fault(evidence, rank, cause, said):
    error = found(**evidence)
    assert (error.rank, error.cause) == (rank, cause)
    assert said in str(error)
    assert "rank 0 waits" in str(error)
    assert ">0B0<" in str(error)
    assert ">1B0<" in str(error)


def test_of_ranks_with_engines_of_their_own_the_one_at_fault_is_named_alone():
    error = diagnose(None, Evidence([Standing(2, 5, Phase.COMPUTING, 10.0)] * 2, {}, {1: -9}, {1: "node7"}))
    assert (error.rank, error.cause, error.action) == (1, "died", "")
    assert str(error).startswith("rank 1 on node7 died (signal 9")
    assert "of step 2" in str(error)


def test_one_that_waits_for_a_message_not_sent_is_not_at_fault():
    """Rank 0 waits for the gradient that rank 1 has not sent; rank 1 has its input and stands before computing it."""
    error = found((at(0, "0B0", Phase.WAITING, 5.0), at(1, "1F0", Phase.WAITING, 9.0)))
    assert (error.rank, error.action) == (1, "1F0")


def test_the_first_rank_may_hang_too():
    error = found((at(0, "0F3", Phase.COMPUTING), at(1, "1F3", Phase.WAITING)))
    assert (error.rank, error.cause, error.action) == (0, "hung", "0F3")


def test_messages_that_all_miss_are_no_ones_fault():
    error = found((at(0, "0B0", Phase.WAITING), at(1, "1F3", Phase.WAITING)), errors={})
    assert error.rank in (0, 1)


def test_a_board_outlives_its_writer(tmp_path):
    place = Place(tmp_path / "board")
    place.write(Phase.COMPUTING, 7, 2)
    packed = place.pack()
    assert read_file(tmp_path / "board")[:3] == (2, 7, Phase.COMPUTING)
    assert unpack(packed)[:3] == (2, 7, Phase.COMPUTING)
    assert unpack(b"torn") == Standing()
    store = {"board/1": b"elsewhere:/nowhere", "standing/1": packed}
    assert read_standing(store.get, 1)[:3] == (2, 7, Phase.COMPUTING)
    assert read_standing(store.get, 0) == Standing()
