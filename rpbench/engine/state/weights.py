"""Weights: what forward and backward read, per module and version, at home on the host.

A version is the number of optimizer steps its tensors have seen. It is kept until there is a newer one and no action
will read it any more; then its memory is reused for a later version. Tensors are handed out as autograd leaves and
never written while they can be read.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

import torch
from torch import nn

from rpbench.engine.host_order import ReportedLock
from rpbench.engine.peers import empty_like, fill
from rpbench.engine.state.checkpoint import State
from rpbench.engine.state.gradients import Tensors
from rpbench.engine.workload import Workload

Named = dict[str, torch.Tensor]
MastersOf = Callable[[int | None], Tensors]
"""A replica that keeps masters of its own, or None -> the masters of a stage, by place."""

PlaceOf = Callable[[int, int | None], torch.device]
"""A module, and which of its replicas or None -> the accelerator that keeps it."""


class WeightSource(Protocol):
    """The source of the weights of forward and backward."""

    def all_of(self, module: int, version: int) -> Named:
        """Every tensor a module needs to run, by name."""

    def leaves(self, module: int, version: int) -> Named:
        """The trainable ones: leaves that gradients are asked for."""

    def release(self, module: int, version: int) -> None:
        """One of the counted reads of a version is over."""


class Weights:
    """The working weights of a model, as a `WeightSource`."""

    def __init__(
        self,
        workload: Workload,  # whose modules give version 0; they are copied, not touched
        reads: Mapping[tuple[int, int], int],  # (module, version) -> how often the schedule will read it
        # version -> trainable weights to begin with, 0 and older ones; None: the modules' own
        start: Mapping[int, Tensors] | None = None,
        place_of: PlaceOf | None = None,  # where modules are at home; None: where their tensors are
    ) -> None:
        self._place_of = place_of
        self._reads = Counter(reads)
        self._lock = ReportedLock()
        self._spare: dict[int, list[Named]] = {}
        self._frozen: list[Named] = []
        self._versions: dict[tuple[int, int], Named] = {}
        self._newest = [0] * len(workload.modules)
        for module, layer in enumerate(workload.modules):
            home = {name: tensor.to(self._home(module, tensor)) for name, tensor in untrained(layer).items()}
            self._frozen.append(home)
        begun = start or {0: {place: workload.parameter(place) for place in workload.owner_of}}
        for version, found in begun.items():
            for module in range(len(workload.modules)):
                own = {name: tensor.detach() for (other, name), tensor in found.items() if other == module}
                if own:
                    self._versions[module, version] = self._kept(module, own)
        self.num_live = [len(begun)] * len(workload.modules)
        self.most_live = self.num_live[0]

    def all_of(self, module: int, version: int) -> Named:
        return self._frozen[module] | self.leaves(module, version)

    def leaves(self, module: int, version: int) -> Named:
        if not self._trains(module):
            return {}
        found = self._versions.get((module, version))
        if found is None:
            raise RuntimeError(
                f"module {module} is read at version {version}, but version {self._newest[module]} is its newest"
                " and older ones that nobody was to read are gone"
            )
        return found

    def publish(self, modules: Iterable[int], version: int, masters: MastersOf) -> None:
        """Make a new version of some modules; `masters` has the values of all their trainable parameters."""
        for module in modules:
            if not self._trains(module):
                continue
            fresh = self._memory(module)
            with torch.no_grad():
                self._write(module, fresh, masters)
            with self._lock:
                before = self._newest[module]
                self._versions[module, version] = fresh
                self._newest[module] = version
                self.num_live[module] += 1
                self._drop_if_unread(module, before)
                self.most_live = max(self.most_live, self.num_live[module])

    def rewrite(self, modules: Iterable[int], version: int, masters: MastersOf) -> None:
        """Write other values into a version that no action has computed with."""
        for module in modules:
            if self._trains(module):
                with torch.no_grad():
                    self._write(module, self._versions[module, version], masters)

    def _kept(self, module: int, tensors: Named) -> Named:
        """A version of a module in memory of its own."""
        return {name: self._copied(module, tensor) for name, tensor in tensors.items()}

    def _home(self, module: int, tensor: torch.Tensor, owner: int | None = None) -> torch.device:
        """The device that keeps a module, or a replica's part of it."""
        return tensor.device if self._place_of is None else self._place_of(module, owner)

    def _copied(self, module: int, tensor: torch.Tensor, owner: int | None = None) -> torch.Tensor:
        return tensor.detach().to(self._home(module, tensor, owner), copy=True).requires_grad_()

    def _write(self, module: int, fresh: Named, masters: MastersOf) -> None:
        for name, tensor in fresh.items():
            fill(tensor, masters(None)[module, name])

    def lend(self, module: int, number: int, values: Tensors) -> None:
        """Add a module's tensors with other values, in its own types, as version `number`, below 0."""
        own = self.leaves(module, self._newest[module])
        if own:
            self._versions[module, number] = {
                name: values[module, name].detach().to(tensor.dtype, copy=True).requires_grad_()
                for name, tensor in own.items()
            }

    def take_back(self, module: int, number: int) -> None:
        self._versions.pop((module, number), None)

    def release(self, module: int, version: int) -> None:
        with self._lock:
            self._reads[module, version] -= 1
            self._drop_if_unread(module, version)

    def _trains(self, module: int) -> bool:
        return (module, self._newest[module]) in self._versions

    def _memory(self, module: int) -> Named:
        with self._lock:
            spare = self._spare.get(module)
            if spare:
                return spare.pop()
        like = self._versions[module, self._newest[module]]
        return {name: empty_like(tensor).requires_grad_() for name, tensor in like.items()}

    def _drop_if_unread(self, module: int, version: int) -> None:
        if version == self._newest[module] or self._reads[module, version] > 0:
            return
        tensors = self._versions.pop((module, version), None)
        if tensors is not None:
            self._spare.setdefault(module, []).append(tensors)
            self.num_live[module] -= 1


def untrained(module: nn.Module) -> Named:
    """Tensors that a module computes with but does not train, by name."""
    parameters = module.named_parameters(remove_duplicate=False)
    return {name: each.detach() for name, each in parameters if not each.requires_grad} | dict(module.named_buffers())


def begin(workload: Workload, state: State, num_stale: int) -> dict[int, Tensors]:
    """The working weights of a resumed run: version 0 from the masters, and the older ones that were saved."""
    newest = {
        place: state.masters[owner].to(workload.parameter(place).dtype) for place, owner in workload.owner_of.items()
    }
    return {0: newest} | {-age: state.stale[age] for age in range(1, num_stale + 1)}


def at_home(place_of: Callable[[int], torch.device], devices: Mapping[int, int]) -> PlaceOf:
    """The accelerator of a module's replica, or without replicas that of the module's device."""
    return lambda module, owner: place_of(devices[module] if owner is None else owner)


def masters_of(workload: Workload, start: State | None = None, place_of: PlaceOf | None = None) -> Tensors:
    """The masters by owner's place: a copy of every trainable parameter, in float32 or wider.

    Values are those of `start`, or else of the modules; each master is on the device of its module.
    """
    owners = dict.fromkeys(workload.owner_of.values())
    begun = {owner: workload.parameter(owner).detach() if start is None else start.masters[owner] for owner in owners}
    return {
        owner: value.to(place_of(owner[0], None) if place_of else value.device, master_dtype(value.dtype), copy=True)
        for owner, value in begun.items()
    }


def master_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type in which weights are updated."""
    return torch.promote_types(dtype, torch.float32)
