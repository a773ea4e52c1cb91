"""Collectives among the ranks of one process, each rank on a thread of its own.

At a rendezvous the nth call of a rank meets the nth call of every other rank, and each gets the values of all, in the
order of ranks. An all-reduce consists of two halves, as on a ring:

    reduce-scatter   rank r adds up slice r of all tensors, that of rank 0 first
    all-gather       every rank takes the slices of all

A sum has the same bits in any order of arrival. Of a tensor of n bytes, a rank sends n - n/p in the first half and
(p - 1) n/p in the second: 2 (p - 1) n/p in all (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for
clusters of workstations", JPDC 2009, section 3). Here nothing is copied but what is added; the bytes are counted as if
every rank had a memory of its own.
"""

import threading
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Self

import torch

Add = Callable[..., torch.Tensor]  # (tensor, tensor, out=tensor)


class Parted(RuntimeError):
    """A meeting that cannot take place: another rank has failed, or the run has been stopped."""


@dataclass
class _Round:
    """One meeting: the values so far, by rank."""

    values: list[Any]
    subject: Hashable
    num_missing: int


class Rendezvous:
    """A meeting point of ranks, for any number of exchanges in a run; `wait_s`: how long each waited."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.wait_s = [0.0] * num_ranks
        self._came = [0] * num_ranks
        self._rounds: dict[int, _Round] = {}
        self._changed = threading.Condition()
        self._stopped = False

    def exchange(self, rank: int, value: Any, subject: Hashable = None) -> tuple[Any, ...]:
        """The values of all ranks at their next meeting, by rank; read-only until the meeting after.

        Raises Parted if the others will not come, RuntimeError if they come for another subject.
        """
        with self._changed:
            found = self._enter(rank, value, subject)
            if found.num_missing and not self._stopped:
                began = time.perf_counter()
                self._changed.wait_for(lambda: self._stopped or not found.num_missing)
                self.wait_s[rank] += time.perf_counter() - began
            if found.num_missing:
                raise Parted(f"rank {rank} waits for {found.num_missing} of {self.num_ranks} ranks that will not come")
            return tuple(found.values)

    def stop(self) -> None:
        """Raise `Parted` in every rank that waits, or comes later."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def _enter(self, rank: int, value: Any, subject: Hashable) -> _Round:
        number = self._came[rank]
        self._came[rank] += 1
        found = self._rounds.setdefault(number, _Round([None] * self.num_ranks, subject, self.num_ranks))
        if found.subject != subject:
            self._stopped = True
            self._changed.notify_all()
            raise RuntimeError(f"rank {rank} comes to meeting {number} for {subject}, others for {found.subject}")
        found.values[rank] = value
        found.num_missing -= 1
        if not found.num_missing:
            del self._rounds[number]
            self._changed.notify_all()
        return found


class Rank:
    """A rank in the collectives; counts its halves of all-reduces, and the bytes it sent for them."""

    def __init__(self, meeting: Rendezvous, rank: int) -> None:
        self.meeting, self.rank = meeting, rank
        self.num_halves = self.sent_bytes = 0

    @property
    def num_sums(self) -> Fraction:
        """All-reduces so far."""
        return Fraction(self.num_halves, 2)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Itself: copies of a module take part in the same collectives."""
        return self

    def gather(self, value: Any, subject: Hashable = None) -> tuple[Any, ...]:
        return self.meeting.exchange(self.rank, value, subject)

    def reduce_scatter(self, tensor: torch.Tensor, add: Add = torch.add) -> torch.Tensor:
        """Slice r of the sum over all ranks, flat; `tensor` may be written again after the next meeting."""
        flat, p = tensor.contiguous().flatten(), self.meeting.num_ranks
        own = slice(len(flat) * self.rank // p, len(flat) * (self.rank + 1) // p)
        brought = self.gather(flat, ("sum", tuple(tensor.shape), tensor.dtype))
        total = brought[0][own].clone()
        for other in brought[1:]:
            add(total, other[own], out=total)
        self.num_halves += 1
        self.sent_bytes += (len(flat) - len(total)) * tensor.element_size()
        return total

    def all_gather(self, part: torch.Tensor) -> torch.Tensor:
        """The flat parts of all ranks behind one another."""
        found = torch.cat(self.gather(part, ("parts", part.dtype)))
        self.num_halves += 1
        self.sent_bytes += (self.meeting.num_ranks - 1) * part.numel() * part.element_size()
        return found

    def all_reduce(self, tensor: torch.Tensor, add: Add = torch.add) -> torch.Tensor:
        """The sum over all ranks, in their order: the same bits on every rank. `tensor` is not changed."""
        return self.all_gather(self.reduce_scatter(tensor, add)).view(tensor.shape)

    def scatter_sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Slice r of the sum over all ranks along dimension 1, which divides."""
        slices = torch.stack(tensor.chunk(self.meeting.num_ranks, 1))
        return self.reduce_scatter(slices).view(slices.shape[1:])

    def gather_slices(self, part: torch.Tensor) -> torch.Tensor:
        """The slices of all ranks side by side along dimension 1."""
        found = self.all_gather(part.contiguous().flatten())
        return torch.cat(found.view(self.meeting.num_ranks, *part.shape).unbind(), 1)
