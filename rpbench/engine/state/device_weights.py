"""Device weights: copies of weights on devices, which LOAD makes and FREE removes.

With transfers in the schedule a device computes on its own copies, never on the host's weights. Reading weights that
have not been loaded is an error, and freed ones hold NaN, so that a wrong order shows.
"""

import threading
from collections.abc import Iterable, Mapping
from typing import Protocol

import torch

from rpbench.engine.executor import Gate, Handler
from rpbench.engine.layout import Layout
from rpbench.engine.shards.reduced_gradients import Hold
from rpbench.engine.state.gradients import Tensors
from rpbench.engine.state.weights import MastersOf, Named, PlaceOf, Weights
from rpbench.engine.state.weights_read import Reads
from rpbench.engine.workload import Workload
from rpbench.ir.action import Action, Kind
from rpbench.ir.analysis import Analysis
from rpbench.ir.waits.moves import Transfer
from rpbench.ir.waits.visits import Visit, actions_of

HANDED_OVER = "weights from a peer"


class Copy(Protocol):
    """Copies a tensor over a lane of a device: to a peer if there is one, else to it (h2d, net) or the host (d2h)."""

    def __call__(self, tensor: torch.Tensor, device: int, lane: str, peer: int | None = None) -> torch.Tensor: ...


def copy_in_memory(tensor: torch.Tensor, device: int, lane: str, peer: int | None = None) -> torch.Tensor:
    """A copy in the same memory, for devices that are threads."""
    return tensor.detach().clone()


class DeviceWeights(Weights):
    """Weights of which a computation reads the copies that a LOAD has made on its device."""

    def __init__(
        self,
        workload: Workload,
        counts: Mapping[tuple[int, int], int],  # as in `Weights`, and so is `start`
        start: Mapping[int, Tensors] | None,
        reads: Reads,
        layout: Layout,
        analysis: Analysis,  # of a schedule with LOAD:P and FREE:P
        copy: Copy,
        *,
        hold: Hold,  # counts the bytes of weights that a device has from another one
        pin: bool = False,  # keep the host's weights in pinned memory
        place_of: PlaceOf | None = None,
    ) -> None:
        super().__init__(workload, counts, start, place_of)
        self._pin, self._hold = pin, hold
        if pin:
            self._frozen = [{name: tensor.pin_memory() for name, tensor in named.items()} for named in self._frozen]
            self._versions = {place: _pinned(named) for place, named in self._versions.items()}
        self._reader, self._layout, self._copy = reads, layout, copy
        self._index, self._moves = analysis.index, analysis.moves
        self._handovers, transfers = self._moves.handovers, self._moves.transfers[Kind.LOAD, "P"]
        self._loads = {piece: transfer for transfer in transfers for piece in transfer.pieces}
        self._ends = {transfer.end: transfer for transfer in transfers}
        self._users = users_of(transfers)
        self._streamed = {visit.stage for transfer in transfers for visit in transfer.visits}
        self._copies: dict[Transfer, dict[int, Named]] = {}
        self._now = threading.local()

    def on_device(self, handler: Handler) -> Handler:
        """The handler of a computation, reading what is on its device."""

        def run(action: Action, number: int, gate: Gate) -> None:
            self._now.transfer = self._users.get((number, action.kind is not Kind.F, action.stage))
            self._now.device = self._index.device(number)
            self._now.action = action
            try:
                handler(action, number, gate)
            finally:
                self._now.action = None

        return run

    def all_of(self, module: int, version: int) -> Named:
        action = getattr(self._now, "action", None)
        if action is None or action.stage not in self._streamed or self._is_home(action.stage):  # or nobody computes
            return self._at_home(module, version)
        found = None if self._now.transfer is None else self._copies.get(self._now.transfer, {}).get(module)
        if found is None:
            raise RuntimeError(
                f"{action} reads module {module}, which is not on its device: no {self._brings(action.stage)}"
            )
        return found

    def _is_home(self, stage: int) -> bool:
        """Whether the device that computes keeps the stage, and loads no copy of it."""
        return self._now.transfer is None and self._handovers.homes.get(stage) == self._now.device

    def _brings(self, stage: int) -> str:
        """The action that brings a stage's weights to their device."""
        return "LOAD:P"

    def leaves(self, module: int, version: int) -> Named:
        return {name: tensor for name, tensor in self.all_of(module, version).items() if tensor.requires_grad}

    def load(self, action: Action, number: int) -> None:
        """Load a piece of a stage's weights: every n-th tensor of n pieces."""
        transfer = self._loads[number]
        visit = transfer.visits[0]
        ranges = self._layout.backward if visit.backward else self._layout.forward
        modules = ranges[visit.stage]
        copies = self._copies.setdefault(transfer, {module: {} for module in modules})
        version = self._version(visit)
        if number in self._handovers.origins:
            self._take_over(number, copies, version)
            return
        place = 0
        for module in modules:
            for name, tensor in self._loaded(module, version, visit.device).items():
                if place % len(transfer.pieces) == action.part:
                    copied = self._copy(tensor, visit.device, "h2d")
                    copies[module][name] = copied.requires_grad_(tensor.requires_grad)
                place += 1

    def rewrite(self, modules: Iterable[int], version: int, masters: MastersOf) -> None:
        """As `Weights.rewrite`; devices that have loaded the version load it again."""
        changed = set(modules)
        super().rewrite(changed, version, masters)
        for transfer in dict.fromkeys(self._loads.values()):
            copies = self._copies.get(transfer)
            if copies is not None and self._version(transfer.visits[0]) == version and not changed.isdisjoint(copies):
                for piece in transfer.pieces:
                    self.load(self._index.actions[piece], piece)

    def _take_over(self, number: int, copies: dict[int, Named], version: int) -> None:
        """Copy a stage from what another device has loaded, or from where it is at home."""
        origin, device = self._handovers.origins[number], self._index.device(number)
        for module in copies:
            found = self._at_home(module, version) if origin is None else self._copies[origin][module]
            for name, tensor in found.items():
                local = self._handovers.is_local(number)
                copied = tensor.detach().clone() if local else self._copy(tensor, device, "net")
                copies[module][name] = copied.requires_grad_(tensor.requires_grad)
        self._hold(device, HANDED_OVER, num_bytes(copies))

    def _version(self, visit: Visit) -> int:
        return self._reader.version(next(actions_of(self._index, visit)), visit.first)

    def _loaded(self, module: int, version: int, device: int) -> Named:
        """The tensors that a LOAD brings to a device."""
        return self._at_home(module, version)

    def _memory(self, module: int) -> Named:
        found = super()._memory(module)
        return _pinned(found) if self._pin else found

    def _at_home(self, module: int, version: int) -> Named:
        return self._frozen[module] | super().leaves(module, version)

    def free(self, number: int) -> None:
        """Free a device's copies; a later read finds NaN."""
        transfer = self._ends[number]
        if transfer.pieces[0] in self._handovers.origins:
            self._hold(transfer.visits[0].device, HANDED_OVER, -num_bytes(self._copies[transfer]))
        for named in self._copies.pop(transfer).values():
            for tensor in named.values():
                if tensor.is_floating_point():
                    # Unseen by autograd: a W that is put off has the graph of its I, and reads no weight any more.
                    tensor.data.fill_(torch.nan)

    def leaves_between(self, stage: int) -> bool:
        """Whether a stage's weights leave the device between its forward and its backward."""
        forward, backward = (
            {transfer for (_, back, found), transfer in self._users.items() if found == stage and back is side}
            for side in (False, True)
        )
        return not forward <= backward


def users_of(transfers: Iterable[Transfer]) -> dict[tuple[int, bool, int], Transfer]:
    """(number of a computation, whether backward, stage) -> the transfer that brings its weights."""
    return {
        (number, visit.backward, visit.stage): transfer
        for transfer in transfers
        for visit in transfer.visits
        for number in visit.numbers
    }


def num_bytes(copies: Mapping[int, Named]) -> int:
    return sum(tensor.nbytes for named in copies.values() for tensor in named.values())


def _pinned(named: Named) -> Named:
    """Leaves in pinned memory, the same where they are there already."""
    return {
        name: tensor if tensor.is_pinned() else tensor.detach().pin_memory().requires_grad_()
        for name, tensor in named.items()
    }
