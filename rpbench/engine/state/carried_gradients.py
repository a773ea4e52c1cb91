"""Carried: gradients that go from device to device, each adding its own part before it passes the sum on.

A STORE:G>q is an arrow. A sum goes round, or sums of groups of devices go home (`rpbench.ir.waits.handovers`):

    round      device 0   g0                    -> device 1
               device 1   (g0) + g1             -> device 2
               device 2   ((g0) + g1) + g2      -> device 0, and so on; the last one sends it to the home of the stage

    in groups  device 1   g1                    -> device 0
               device 0   g0 + g1               -> home        total = 0 + (g0 + g1)
               device 3   g3                    -> device 2
               device 2   g2 + g3               -> home        total = (g0 + g1) + (g2 + g3)

The order of a sum is that of the arrows, or of the microbatches, whatever the pace of the devices.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from rpbench.engine.host_order import ToldLock
from rpbench.engine.state.accumulation import microbatches_of
from rpbench.engine.state.gradients import Place, Sum, Tensors, Window
from rpbench.ir.analysis import Analysis
from rpbench.ir.index import Index
from rpbench.ir.waits.handovers import GroupSum
from rpbench.ir.waits.moves import has_transfers


class _OneSum:
    """A window whose total is one sum, and whole on every device."""

    _sum: Sum

    @property
    def total(self) -> Tensors:
        return self._sum.values

    def share(self, device: int) -> Tensors:
        return self._sum.values

    def drop(self) -> None:
        self._sum = Sum()


class CarriedWindow(_OneSum):
    """The gradient of one stage for one step; see `rpbench.engine.state.gradients.Window`.

    Args:
        order: the step's microbatches in the order in which the sum comes to them.
    """

    def __init__(self, order: Sequence[int]) -> None:
        self._order = list(order)
        self._own = {microbatch: Sum() for microbatch in order}
        self._missing = set(order)  # whose gradient has not been made
        self._num_carried = 0
        self._sum = Sum()

    def add(self, microbatch: int, gradients: Mapping[Place, torch.Tensor]) -> None:
        self._own[microbatch].add(gradients)
        self._missing.discard(microbatch)

    def store(self, microbatches: Iterable[int], copy: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Add the gradients of some microbatches to the sum, and hand it on.

        Raises:
            RuntimeError: if the sum is not there yet, or a gradient has not been made.
        """
        for microbatch in microbatches:
            due = self._order[self._num_carried]
            if microbatch != due or microbatch in self._missing:
                raise RuntimeError(f"the sum is handed on for microbatch {microbatch}, but that of {due} is not in it")
            self._sum.add(self._own.pop(microbatch).values)
            self._num_carried += 1
        values = {place: copy(value) for place, value in self._sum.values.items()}
        owned = {place for place in values if place in self._sum.owned or values[place] is not self._sum.values[place]}
        self._sum = Sum(values, owned)

    @property
    def is_complete(self) -> bool:
        return self._num_carried == len(self._order)


class _GroupSum:
    """What goes home at a time.

    Args:
        parts: the microbatches that each device brings, in the order in which they are added.
        last: the first microbatch of the device that adds the parts up and sends them home.
    """

    def __init__(self, parts: Iterable[tuple[int, ...]], last: int) -> None:
        self.parts = {part[0]: Sum() for part in parts}
        self.missing = {microbatch for part in parts for microbatch in part}  # not made, or not where they are added
        self.last = last
        self.at_home: Tensors | None = None

    def send(self, first: int, copy: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Send a part to where it is added, or the sum home."""
        own = self.parts[first].values
        if first != self.last:
            self.parts[first] = Sum({place: copy(value) for place, value in own.items()})
            return
        total = Sum()
        for part in self.parts.values():
            total.add(part.values)
        self.parts.clear()
        self.at_home = {place: copy(value) for place, value in total.values.items()}


class GroupedWindow(_OneSum):
    """The gradient of one stage for one step, whose home adds up what groups of devices send there.

    Args:
        sums: those of the groups, each as the microbatches of its parts, and the first microbatch of the part whose
            device sends it home.
    """

    def __init__(self, sums: Sequence[tuple[Sequence[tuple[int, ...]], int]]) -> None:
        self._sums = [_GroupSum(parts, last) for parts, last in sums]
        self._of = {
            microbatch: (found, part[0])
            for found, (parts, _) in zip(self._sums, sums, strict=True)
            for part in parts
            for microbatch in part
        }
        self._made: set[int] = set()
        self._num_added = 0
        self._sum, self._lock = Sum(), ToldLock()

    def add(self, microbatch: int, gradients: Mapping[Place, torch.Tensor]) -> None:
        found, first = self._of[microbatch]
        found.parts[first].add(gradients)
        with self._lock:
            self._made.add(microbatch)

    def store(self, microbatches: Iterable[int], copy: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Send what a device has made of some microbatches on, and add up what is at home.

        Raises:
            RuntimeError: if a gradient that belongs to the sum has not been made, or has not come.
        """
        own = list(microbatches)
        found, first = self._of[own[0]]
        late = [microbatch for microbatch in own if microbatch not in self._made]
        others = found.missing - set(own) if first == found.last else set()
        if late or others:
            away = min(late or others)
            raise RuntimeError(f"the sum is handed on for microbatch {own[0]}, but that of {away} is not in it")
        found.send(first, copy)
        with self._lock:
            found.missing -= set(own)
            self._add_up()

    def _add_up(self) -> None:
        """Add what has come home to the total, as long as nothing before it is missing."""
        while self._num_added < len(self._sums):
            values = self._sums[self._num_added].at_home
            if values is None:
                return
            self._sum.add(values)
            self._sums[self._num_added].at_home = {}
            self._num_added += 1

    @property
    def is_complete(self) -> bool:
        return self._num_added == len(self._sums)


def carried_windows(analysis: Analysis) -> dict[tuple[int, int], Window]:
    """(backward stage, version of the step) -> the gradient that goes round or in groups; none where nothing does."""
    if not has_transfers(analysis.schedule):
        return {}
    handovers, index = analysis.moves.handovers, analysis.index
    found: dict[tuple[int, int], Window] = {
        (stage, step + 1): CarriedWindow([mb for transfer in carriers for mb in microbatches_of(index, transfer)])
        for (stage, step), carriers in handovers.carried.items()
    }
    for (stage, step), sums in handovers.grouped.items():
        found[stage, step + 1] = GroupedWindow([_parts(index, one) for one in sums])
    return found


def _parts(index: Index, one: GroupSum) -> tuple[list[tuple[int, ...]], int]:
    return [microbatches_of(index, part) for part in one.parts], microbatches_of(index, one.last)[0]
