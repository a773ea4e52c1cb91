"""Gradients: the sums that backward stages hand to the optimizer, added in the order of a step's groups
(`rpbench.engine.state.accumulation`).

With STORE:G>q a sum goes from device to device, or groups of devices send sums home (`rpbench.ir.waits.handovers`):

    round      device 0   g0                    -> device 1
               device 1   (g0) + g1             -> device 2
               device 2   ((g0) + g1) + g2      -> device 0, and so on; the last one sends it to the home of the stage

    in groups  device 1   g1                    -> device 0
               device 0   g0 + g1               -> home        total = 0 + (g0 + g1)
               device 3   g3                    -> device 2
               device 2   g2 + g3               -> home        total = (g0 + g1) + (g2 + g3)

The order of a sum follows from the schedule, whatever the pace of the devices.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from rpbench.engine.host_order import ReportedLock
from rpbench.engine.state.accumulation import Groups, microbatches_of
from rpbench.ir.analysis import Analysis
from rpbench.ir.waits.moves import has_transfers

Place = tuple[int, str]  # module of the model, name of the parameter in it
Tensors = dict[Place, torch.Tensor]
Move = Callable[[torch.Tensor], torch.Tensor]  # a tensor -> its copy elsewhere, in a storage of its own


def mean_of(found: Sequence[Tensors]) -> Tensors:
    """The mean of some gradients, in float32 or wider; one that lacks a parameter has 0 there."""
    total: Tensors = {}
    for gradients in found:
        for place, gradient in gradients.items():
            wide = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
            total[place] = total[place] + wide if place in total else wide
    return {place: gradient / len(found) for place, gradient in total.items()}


@dataclass
class Sum:
    """A sum of gradients per parameter. The first one is not copied, nor written to: autograd may share it."""

    values: Tensors = field(default_factory=dict)
    owned: set[Place] = field(default_factory=set)  # made here, so that more may be added in place

    def add(self, gradients: Tensors) -> None:
        for place, gradient in gradients.items():
            if place not in self.values:
                self.values[place] = gradient
            elif place in self.owned:
                self.values[place].add_(gradient)
            else:
                self.values[place] = self.values[place] + gradient
                self.owned.add(place)


class Window(ABC):
    """The gradient of one stage for one step as it is added up. Here every device steps with the whole total."""

    def __init__(self, num_parts: int) -> None:
        self._sum = Sum()
        self._num_parts, self._num_added = num_parts, 0  # what the total consists of, and how much of it is there

    @property
    def is_complete(self) -> bool:
        """Whether every microbatch is in the total."""
        return self._num_added == self._num_parts

    @abstractmethod
    def add(self, microbatch: int, gradients: Tensors) -> None:
        """Add the gradient of one microbatch."""

    @abstractmethod
    def store(self, microbatches: Iterable[int], copy: Move) -> None:
        """Move a device's gradients of these microbatches off it."""

    @property
    def total(self) -> Tensors:
        """The sum over the step's microbatches."""
        return self._sum.values

    def shard(self, device: int) -> Tensors:
        """The gradient that a device steps with."""
        return self._sum.values

    def drop(self) -> None:
        """Free the total."""
        self._sum = Sum()


class _Window(Window):
    """A gradient that is added up where it is made, group by group."""

    def __init__(self, groups: Groups, *, at_home: bool) -> None:
        super().__init__(len(groups))
        self.away = [set() if at_home else set(group) for group in groups]  # microbatches no STORE:G has brought
        self.group_of = {microbatch: number for number, group in enumerate(groups) for microbatch in group}
        self.missing = [len(group) for group in groups]
        self.sums = [Sum() for _ in groups]
        self.lock = ReportedLock()

    def add(self, microbatch: int, gradients: Tensors) -> None:
        number = self.group_of[microbatch]
        self.sums[number].add(gradients)  # a group belongs to one lane
        self.missing[number] -= 1
        if not self.missing[number]:
            with self.lock:
                self._fold()

    def _fold(self) -> None:
        """Add the groups that are complete to the total, as long as none before them is missing."""
        while not self.is_complete and self._is_home(self._num_added):
            self._sum.add(self.sums[self._num_added].values)
            self.sums[self._num_added] = Sum()
            self._num_added += 1

    def _is_home(self, number: int) -> bool:
        return not self.missing[number] and not self.away[number]

    def store(self, microbatches: Iterable[int], copy: Move) -> None:
        """Bring home the groups of these microbatches that are complete."""
        with self.lock:
            for microbatch in microbatches:
                number = self.group_of[microbatch]
                self.away[number].discard(microbatch)
                if self._is_home(number) and number >= self._num_added:
                    on_device = self.sums[number].values
                    self.sums[number] = Sum({place: copy(value) for place, value in on_device.items()})
            self._fold()


class CarriedWindow(Window):
    """A gradient whose sum goes from device to device and takes up the step's microbatches in this order."""

    def __init__(self, order: Sequence[int]) -> None:
        super().__init__(len(order))
        self._order = list(order)
        self._own = {microbatch: Sum() for microbatch in order}
        self._missing = set(order)  # whose gradient has not been made

    def add(self, microbatch: int, gradients: Tensors) -> None:
        self._own[microbatch].add(gradients)
        self._missing.discard(microbatch)

    def store(self, microbatches: Iterable[int], copy: Move) -> None:
        """Add some microbatches to the sum and send it on; RuntimeError if the sum or a gradient is not there."""
        for microbatch in microbatches:
            due = self._order[self._num_added]
            if microbatch != due or microbatch in self._missing:
                raise RuntimeError(f"the sum is handed on for microbatch {microbatch}, but that of {due} is not in it")
            self._sum.add(self._own.pop(microbatch).values)
            self._num_added += 1
        values = {place: copy(value) for place, value in self._sum.values.items()}
        owned = {place for place in values if place in self._sum.owned or values[place] is not self._sum.values[place]}
        self._sum = Sum(values, owned)


class _GroupSum:
    """One group's sum of `parts`, in their order; `last`: the first microbatch of the device that sends it home."""

    def __init__(self, parts: Iterable[tuple[int, ...]], last: int) -> None:
        self.parts = {part[0]: Sum() for part in parts}
        self.missing = {microbatch for part in parts for microbatch in part}  # not made, or not where they are added
        self.last = last
        self.at_home: Tensors | None = None

    def send(self, first: int, copy: Move) -> None:
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


class GroupedWindow(Window):
    """A gradient whose home adds up the sums that groups of devices send: `parts` and `last` of each `_GroupSum`."""

    def __init__(self, sums: Sequence[tuple[Sequence[tuple[int, ...]], int]]) -> None:
        super().__init__(len(sums))
        self._sums = [_GroupSum(parts, last) for parts, last in sums]
        self._of = {
            microbatch: (found, part[0])
            for found, (parts, _) in zip(self._sums, sums, strict=True)
            for part in parts
            for microbatch in part
        }
        self._made: set[int] = set()
        self._lock = ReportedLock()

    def add(self, microbatch: int, gradients: Tensors) -> None:
        found, first = self._of[microbatch]
        found.parts[first].add(gradients)
        with self._lock:
            self._made.add(microbatch)

    def store(self, microbatches: Iterable[int], copy: Move) -> None:
        """Send gradients on and add up the sums at home; RuntimeError if one has not been made or not come."""
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
            while not self.is_complete and (values := self._sums[self._num_added].at_home) is not None:
                self._sum.add(values)  # in order, up to the first that is missing
                self._sums[self._num_added].at_home = {}
                self._num_added += 1


class Gradients:
    """The gradients of all stages and steps."""

    def __init__(
        self,
        groups: Mapping[tuple[int, int], Groups],
        *,
        keep: bool = False,  # keep the totals of finished steps, to compare them
        on_devices: Container[int] = (),  # stages whose sums stay on a device until they are stored
        # (backward stage, version) -> the window of a gradient that replicas make together
        reduced: Mapping[tuple[int, int], Window] | None = None,
        # wraps every window, by stage and version, where devices and host share a gradient
        split: Callable[[int, int, Window], Window] | None = None,
    ) -> None:
        self._windows: dict[tuple[int, int], Window] = dict(reduced or {})
        for place, found in groups.items():
            if place not in self._windows:
                self._windows[place] = _Window(found, at_home=place[0] not in on_devices)
        if split is not None:
            self._windows = {place: split(*place, window) for place, window in self._windows.items()}
        self._keep = keep

    def add(self, stage: int, version: int, microbatch: int, gradients: Tensors) -> None:
        """Add the gradient of one microbatch for the step to `version`."""
        self._windows[stage, version].add(microbatch, gradients)

    def store(self, stage: int, version: int, microbatches: Iterable[int], copy: Move) -> None:
        """Bring home what a device has added up for these microbatches."""
        self._windows[stage, version].store(microbatches, copy)

    def total(self, stage: int, version: int) -> Tensors:
        """The sum over a step's microbatches; parameters that no microbatch used are missing."""
        return self._complete(stage, version).total

    def shard(self, stage: int, version: int, device: int) -> Tensors:
        """The gradient that a replica steps with: flat shards of the total, or all of it."""
        return self._complete(stage, version).shard(device)

    def _complete(self, stage: int, version: int) -> Window:
        window = self._windows[stage, version]
        if not window.is_complete:
            raise RuntimeError(f"gradient of stage {stage} for version {version} is taken before it is complete")
        return window

    def window(self, stage: int, version: int) -> Window:
        return self._windows[stage, version]

    def drop(self, stage: int, version: int) -> None:
        """Free a total that has been used, unless totals are kept."""
        if not self._keep:
            self._windows[stage, version].drop()

    def by_step(self) -> list[Tensors]:
        """The totals of all stages together, step by step."""
        found: dict[int, Tensors] = {}
        for stage, version in sorted(self._windows):
            found.setdefault(version, {}).update(self.total(stage, version))
        return [found[version] for version in sorted(found)]


def carried_windows(analysis: Analysis) -> dict[tuple[int, int], Window]:
    """(backward stage, version of the step) -> the window of a gradient that moves from device to device."""
    if not has_transfers(analysis.schedule):
        return {}
    handovers, index = analysis.moves.handovers, analysis.index
    found: dict[tuple[int, int], Window] = {
        (stage, step + 1): CarriedWindow([mb for transfer in carriers for mb in microbatches_of(index, transfer)])
        for (stage, step), carriers in handovers.carried.items()
    }
    for (stage, step), sums in handovers.grouped.items():
        found[stage, step + 1] = GroupedWindow(
            [([microbatches_of(index, p) for p in one.parts], microbatches_of(index, one.last)[0]) for one in sums]
        )
    return found
