"""Ranks that meet: sums of the same bits for everyone, whoever comes first, and nobody who waits for ever."""

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from rpbench.engine.shards.collectives import Parted, Rank, Rendezvous


def each(num_ranks: int, work: Callable[[Rank], Any], meeting: Rendezvous | None = None) -> list[Any]:
    """What every rank's work comes to, or raises, each on a thread of its own."""
    meeting = meeting or Rendezvous(num_ranks)
    found: list[Any] = [None] * num_ranks

    def run(rank: int) -> None:
        try:
            found[rank] = work(Rank(meeting, rank))
        except RuntimeError as error:
            found[rank] = error
            meeting.stop()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert not any(thread.is_alive() for thread in threads)
    return found


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("shape", [(4, 6), (7,), (1,), ()])
def test_everybody_gets_the_sum_in_the_order_of_ranks(num_ranks: int, shape: tuple[int, ...]) -> None:
    own = [torch.randn(shape, generator=torch.Generator().manual_seed(rank)) for rank in range(num_ranks)]
    expected = own[0]
    for other in own[1:]:
        expected = expected + other

    def work(rank: Rank) -> list[torch.Tensor]:
        time.sleep(0.001 * (num_ranks - rank.rank))  # the last one comes first
        return [rank.all_reduce(own[rank.rank]) for _ in range(3)]

    for sums in each(num_ranks, work):
        assert all(torch.equal(total, expected) for total in sums)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_sum_sends_what_a_ring_does(num_ranks: int) -> None:
    def work(rank: Rank) -> tuple[int, int]:
        rank.all_reduce(torch.zeros(8, 3, dtype=torch.float64))
        return rank.num_sums, rank.sent_bytes

    assert each(num_ranks, work) == [(1, 2 * (num_ranks - 1) * 24 * 8 // num_ranks)] * num_ranks


def test_a_rank_that_fails_sends_the_others_home() -> None:
    def work(rank: Rank) -> torch.Tensor:
        if rank.rank == 1:
            raise RuntimeError("no more")
        return rank.all_reduce(torch.ones(3))

    first, second, third = each(3, work)
    assert isinstance(first, Parted)
    assert isinstance(third, Parted)
    assert str(second) == "no more"


def test_whoever_comes_after_the_end_is_sent_home() -> None:
    meeting = Rendezvous(2)
    meeting.stop()
    with pytest.raises(Parted):
        meeting.exchange(0, "late")


def test_ranks_that_come_for_different_things_are_told() -> None:
    found = each(2, lambda rank: rank.all_reduce(torch.zeros(2 + rank.rank)))
    assert any("comes to meeting 0 for" in str(error) for error in found)
    assert all(isinstance(error, RuntimeError) for error in found)


def test_a_meeting_knows_who_waited() -> None:
    meeting = Rendezvous(2)
    each(2, lambda rank: rank.gather(None), meeting)
    assert sorted(wait_s > 0 for wait_s in meeting.wait_s) == [False, True]
