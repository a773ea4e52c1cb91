"""Reduced gradients: sums over replicas, and each replica's part of them.

A REDUCE_GRAD does its device's part: it fetches the device's elements of every replica's gradient and adds them up in
the order of the replicas' first microbatches (a reduce-scatter). Where nothing is kept in shards, the device then puts
its sum on every other replica (an all-reduce):

    device 0   fetch a1 a2, A = a0 + a1 + a2   put A on 1 and 2        sends and receives 2 (n - 1) / n of a stage
    device 1   fetch b0 b2, B = b0 + b1 + b2   put B on 0 and 2
    device 2   fetch c0 c1, C = c0 + c1 + c2   put C on 0 and 1

No replica waits for another within its part: edges of the program order the gradients of the others before it, and the
STEP after all parts. A STORE:G takes a device's shard of the sum home.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext

import torch

from rpbench.engine.host_order import ReportedLock
from rpbench.engine.peers import at, here
from rpbench.engine.state.accumulation import Reduction
from rpbench.engine.state.gradients import Move, Sum, Tensors, Window
from rpbench.engine.state.ownership import Sharing, join, take

Carry = Callable[[torch.Tensor, int], torch.Tensor]
"""A tensor and a device -> its copy there."""

Hold = Callable[[int, str, int], None]
"""Counts bytes: called with a device, a class of tensors and how many more bytes of them it has than before."""


class _Sum:
    """One sum over replicas: the gradient of each, until all have fetched their part."""

    def __init__(self, parts: Reduction) -> None:
        self.made = {device: Sum() for device in parts}
        self.missing = {device: len(microbatches) for device, microbatches in parts.items()}
        self.waiting: dict[int, Tensors] = {}  # device -> its shard, where that is to be stored
        self.reduced: set[int] = set()
        self.num_home = 0


class ReducedWindow(Window):
    """A shared stage's gradient of a step, summed over replicas; `hold` counts the gradients not reduced yet."""

    def __init__(self, sums: Sequence[Reduction], sharing: Sharing, hold: Hold) -> None:
        self._sums = [_Sum(parts) for parts in sums]
        self._of = {
            microbatch: (found, device)
            for found, parts in zip(self._sums, sums, strict=True)
            for device, microbatches in parts.items()
            for microbatch in microbatches
        }
        self._sharing, self._hold = sharing, hold
        # device -> owner -> what the device has of the owner's elements
        self._held = {device: {owner: Sum() for owner in sharing.owned} for device in sharing.owned}
        self._lock = ReportedLock()

    def add(self, microbatch: int, gradients: Tensors) -> None:
        found, device = self._of[microbatch]
        more = sum(gradients[place].nbytes for place in gradients.keys() - found.made[device].values.keys())
        found.made[device].add(gradients)
        found.missing[device] -= 1
        self._count(device, more)

    def reduce(self, device: int, microbatch: int, carry: Carry) -> None:
        """A device's part of the sum with one of its microbatches; RuntimeError if a gradient is missing."""
        found, _ = self._of[microbatch]
        late = [other for other, number in found.missing.items() if number]
        if late:
            raise RuntimeError(f"device {device} reduces what device {late[0]} has not made yet")
        total = Sum()
        for source, made in found.made.items():
            part = take(made.values, self._sharing.owned[device])
            total.add({p: here(piece) if source == device else carry(piece, device) for p, piece in part.items()})
        # What only this replica has made is still a view of a gradient that is to go.
        values = {place: piece if place in total.owned else piece.clone() for place, piece in total.values.items()}
        if self._sharing.scatters:
            if self._sharing.stored:
                found.waiting[device] = values
            else:
                self._held[device][device].add(values)
        else:
            for other in self._sharing.owned:
                copies = {place: piece if other == device else carry(piece, other) for place, piece in values.items()}
                with at(next(iter(copies.values())).device) if copies else nullcontext():
                    self._held[other][device].add(copies)
        self._end(found, device)

    def store(self, microbatches: Iterable[int], copy: Move) -> None:
        """Bring a device's shards of some sums home, in order."""
        for microbatch in microbatches:
            found, device = self._of[microbatch]
            shard = found.waiting.pop(device, None)
            if shard is not None:  # or it has gone home with another microbatch
                self._held[device][device].add({place: copy(piece) for place, piece in shard.items()})
                with self._lock:
                    found.num_home += 1

    @property
    def is_complete(self) -> bool:
        num = len(self._held)
        return all(found.num_home == num if self._sharing.stored else len(found.reduced) == num for found in self._sums)

    @property
    def total(self) -> Tensors:
        """Joined from all shards, or the first replica's."""
        held = self._held
        if self._sharing.scatters:
            return join((_here(held[device][device].values) for device in held), self._sharing.shapes)
        return self.shard(next(iter(held)))

    def shard(self, device: int) -> Tensors:
        """The gradient that a device steps with: the elements it owns, flat; or all, where nothing is scattered."""
        if self._sharing.scatters:
            return self._held[device][device].values
        return join((_here(held.values) for held in self._held[device].values()), self._sharing.shapes)

    def drop(self) -> None:
        self._held = {device: {owner: Sum() for owner in held} for device, held in self._held.items()}

    def _end(self, found: _Sum, device: int) -> None:
        """Free the gradients once every replica has fetched its part of them."""
        with self._lock:
            found.reduced.add(device)
            if len(found.reduced) < len(found.made):
                return
            for source, made in found.made.items():
                self._count(source, -sum(value.nbytes for value in made.values.values()))
            found.made.clear()

    def _count(self, device: int, num_bytes: int) -> None:
        """Count gradients that are to be scattered; others are counted as staying."""
        if self._sharing.scatters:
            self._hold(device, "gradients on their way", num_bytes)


def _here(tensors: Tensors) -> Tensors:
    return {place: here(tensor) for place, tensor in tensors.items()}
