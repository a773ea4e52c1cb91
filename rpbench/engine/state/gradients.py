"""Gradients: what backward stages hand to the optimizer, in a fixed order (`rpbench.engine.state.accumulation`)."""

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from rpbench.engine.host_order import ToldLock
from rpbench.engine.state.accumulation import Groups

Place = tuple[int, str]  # module of the model, name of the parameter in it
Tensors = dict[Place, torch.Tensor]


def mean_of(found: Sequence[Mapping[Place, torch.Tensor]]) -> Tensors:
    """The mean of some gradients, in float32 or wider; one that lacks a parameter has 0 there."""
    total: Tensors = {}
    for gradients in found:
        for place, gradient in gradients.items():
            wide = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
            total[place] = total[place] + wide if place in total else wide
    return {place: gradient / len(found) for place, gradient in total.items()}


@dataclass
class Sum:
    """A sum of gradients per parameter. The first ones are taken as they are: autograd may still share them."""

    values: Tensors = field(default_factory=dict)
    owned: set[Place] = field(default_factory=set)  # made here, so that more may be added in place

    def add(self, gradients: Mapping[Place, torch.Tensor]) -> None:
        for place, gradient in gradients.items():
            if place not in self.values:
                self.values[place] = gradient
            elif place in self.owned:
                self.values[place].add_(gradient)
            else:
                self.values[place] = self.values[place] + gradient
                self.owned.add(place)


class Window(Protocol):
    """The gradient of one stage for one step while it grows."""

    @property
    def is_complete(self) -> bool:
        """Whether every microbatch is in the total."""

    @property
    def total(self) -> Tensors:
        """The sum over the step's microbatches."""

    def share(self, device: int) -> Tensors:
        """What a device steps with."""

    def add(self, microbatch: int, gradients: Mapping[Place, torch.Tensor]) -> None:
        """Add the gradient of one microbatch."""

    def store(self, microbatches: Iterable[int], copy: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Bring home what a device has of these microbatches."""

    def drop(self) -> None:
        """Let go of the total."""


class _Window:
    """A gradient that is added up where it is made, group by group."""

    def __init__(self, groups: Groups, *, at_home: bool) -> None:
        self.away = [set() if at_home else set(group) for group in groups]  # microbatches no STORE:G has brought
        self.group_of = {microbatch: number for number, group in enumerate(groups) for microbatch in group}
        self.missing = [len(group) for group in groups]
        self.sums = [Sum() for _ in groups]
        self.sum = Sum()
        self.num_folded = 0
        self.lock = ToldLock()

    @property
    def is_complete(self) -> bool:
        return self.num_folded == len(self.sums)

    @property
    def total(self) -> Tensors:
        return self.sum.values

    def share(self, device: int) -> Tensors:
        return self.sum.values

    def drop(self) -> None:
        self.sum = Sum()

    def add(self, microbatch: int, gradients: Mapping[Place, torch.Tensor]) -> None:
        number = self.group_of[microbatch]
        self.sums[number].add(gradients)  # a group belongs to one lane
        self.missing[number] -= 1
        if not self.missing[number]:
            with self.lock:
                self._fold()

    def _fold(self) -> None:
        """Add the groups that are complete to the total, as long as none before them is missing."""
        while self.num_folded < len(self.sums) and self._is_home(self.num_folded):
            self.sum.add(self.sums[self.num_folded].values)
            self.sums[self.num_folded] = Sum()
            self.num_folded += 1

    def _is_home(self, number: int) -> bool:
        return not self.missing[number] and not self.away[number]

    def store(self, microbatches: Iterable[int], copy: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Bring home the groups of these microbatches that are complete."""
        with self.lock:
            for microbatch in microbatches:
                number = self.group_of[microbatch]
                self.away[number].discard(microbatch)
                if self._is_home(number) and number >= self.num_folded:
                    on_device = self.sums[number].values
                    self.sums[number] = Sum({place: copy(value) for place, value in on_device.items()})
            self._fold()


class Gradients:
    """The gradients of all stages and steps.

    Args:
        groups: (backward stage, version) -> microbatches in groups.
        keep: keep the totals of steps that are done, to compare them.
        on_devices: stages whose sums stay on a device until they are stored.
        reduced: (backward stage, version) -> the window of a gradient that replicas make together.
        split: what becomes of a window whose gradient devices and host share.
    """

    def __init__(
        self,
        groups: Mapping[tuple[int, int], Groups],
        *,
        keep: bool = False,
        on_devices: Container[int] = (),
        reduced: Mapping[tuple[int, int], Window] | None = None,
        split: Callable[[int, int, Window], Window] | None = None,
    ) -> None:
        self._windows: dict[tuple[int, int], Window] = dict(reduced or {})
        for place, found in groups.items():
            if place not in self._windows:
                self._windows[place] = _Window(found, at_home=place[0] not in on_devices)
        if split is not None:
            self._windows = {place: split(*place, window) for place, window in self._windows.items()}
        self._keep = keep

    def add(self, stage: int, version: int, microbatch: int, gradients: Mapping[Place, torch.Tensor]) -> None:
        """Add the gradient of one microbatch for the step to `version`."""
        self._windows[stage, version].add(microbatch, gradients)

    def store(
        self, stage: int, version: int, microbatches: Iterable[int], copy: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        """Bring home what a device has added up for these microbatches."""
        self._windows[stage, version].store(microbatches, copy)

    def total(self, stage: int, version: int) -> Tensors:
        """The sum over a step's microbatches; parameters that no microbatch used are missing."""
        return self._complete(stage, version).total

    def share(self, stage: int, version: int, device: int) -> Tensors:
        """What one of the replicas that share a stage steps with: flat shards of the total, or all of it."""
        return self._complete(stage, version).share(device)

    def _complete(self, stage: int, version: int) -> Window:
        window = self._windows[stage, version]
        if not window.is_complete:
            raise RuntimeError(f"gradient of stage {stage} for version {version} is taken before it is complete")
        return window

    def window(self, stage: int, version: int) -> Window:
        """The gradient of a stage for the step to a version as it grows."""
        return self._windows[stage, version]

    def drop(self, stage: int, version: int) -> None:
        """Let go of a total that has been used."""
        if not self._keep:
            self._windows[stage, version].drop()

    def totals(self) -> Iterator[tuple[int, Tensors]]:
        """(version, gradients of one stage) for every step that is still here."""
        return ((version, gradients) for version, _, gradients in self.by_stage())

    def by_stage(self) -> Iterator[tuple[int, int, Tensors]]:
        """The same with the stage: (version, stage, gradients)."""
        for stage, version in sorted(self._windows):
            yield version, stage, self.total(stage, version)
