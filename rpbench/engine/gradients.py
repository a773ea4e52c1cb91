"""Gradients: what backward stages hand to the optimizer, added up in a fixed order (`rpbench.engine.accumulation`)."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from threading import Lock

import torch

from rpbench.engine.accumulation import Groups

Place = tuple[int, str]  # module of the model, name of the parameter in it
Tensors = dict[Place, torch.Tensor]


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


class _Window:
    """The gradient of one stage for one step while it grows."""

    def __init__(self, groups: Groups) -> None:
        self.group_of = {microbatch: number for number, group in enumerate(groups) for microbatch in group}
        self.missing = [len(group) for group in groups]
        self.sums = [Sum() for _ in groups]
        self.total = Sum()
        self.num_folded = 0
        self.lock = Lock()

    def add(self, microbatch: int, gradients: Mapping[Place, torch.Tensor]) -> None:
        number = self.group_of[microbatch]
        self.sums[number].add(gradients)  # a group belongs to one lane
        self.missing[number] -= 1
        if not self.missing[number]:
            with self.lock:
                self._fold()

    def _fold(self) -> None:
        """Add the groups that are complete to the total, as long as none before them is missing."""
        while self.num_folded < len(self.sums) and not self.missing[self.num_folded]:
            self.total.add(self.sums[self.num_folded].values)
            self.sums[self.num_folded] = Sum()
            self.num_folded += 1


class Gradients:
    """The gradients of all stages and steps.

    Args:
        groups: (backward stage, version) -> microbatches in groups.
        keep: keep the totals of steps that are done, to compare them.
    """

    def __init__(self, groups: Mapping[tuple[int, int], Groups], *, keep: bool = False) -> None:
        self._windows = {place: _Window(found) for place, found in groups.items()}
        self._keep = keep

    def add(self, stage: int, version: int, microbatch: int, gradients: Mapping[Place, torch.Tensor]) -> None:
        """Add the gradient of one microbatch for the step to `version`."""
        self._windows[stage, version].add(microbatch, gradients)

    def total(self, stage: int, version: int) -> Tensors:
        """The sum over a step's microbatches; parameters that no microbatch used are missing."""
        window = self._windows[stage, version]
        if window.num_folded < len(window.sums):
            raise RuntimeError(f"gradient of stage {stage} for version {version} is taken before it is complete")
        return window.total.values

    def drop(self, stage: int, version: int) -> None:
        """Let go of a total that has been used."""
        if not self._keep:
            self._windows[stage, version].total = Sum()

    def totals(self) -> Iterator[tuple[int, Tensors]]:
        """(version, gradients of one stage) for every step that is still here."""
        for stage, version in sorted(self._windows):
            yield version, self.total(stage, version)
