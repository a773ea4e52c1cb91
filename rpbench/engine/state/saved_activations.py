"""Saved activations: the tensors that graphs of forwards have saved, on their device or moved off it.

A graph whose activations move holds views of storages that are kept here:

    forward    every storage that the graph saves is noted once, however many saved tensors are views of it
    STORE:A    its bytes are copied to the host or a partner, and freed on the device
    LOAD:A     they are copied back to the device, and freed where they waited
    backward   each saved tensor is made from its storage, with its type, shape, strides and offset

Weights, buffers and constants that a graph has saved stay on the device. A backward whose activations are not there
raises an error that names the missing LOAD:A.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from rpbench.engine.compute.segments import Segment, segment_of
from rpbench.engine.state.device_memory import DeviceMemory, Held
from rpbench.engine.state.gradients import Move
from rpbench.ir.action import Action
from rpbench.models.constants import is_constant

OWN, OF_PARTNER = "activations", "activations of a partner"  # as the ledger calls them


class _Saved:
    """One storage that a graph has saved: its bytes, flat, on the device (`here`), or where they wait (`away`)."""

    def __init__(self, here: Held, reader: str) -> None:
        self.here: Held | None = here
        self.away: Held | None = None
        self.reader = reader


class _View(NamedTuple):
    """A saved tensor: where it lies in its storage."""

    saved: _Saved
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def tensor(self) -> torch.Tensor:
        """The saved tensor, on the device; raises RuntimeError while it is away."""
        here = self.saved.here
        if here is None:
            raise RuntimeError(self.saved.reader)
        storage = here.tensor.untyped_storage()
        made = torch.empty(0, dtype=self.dtype, device=here.tensor.device)
        return made.set_(storage, self.offset, self.size, self.stride)  # type: ignore[arg-type]  # untyped ones too


class _SavedByForward:
    """The storages that the graph of one forward has saved, without those of `stays`; `hold` is called with each.

    `reader` is the error message for a backward that comes too early.
    """

    def __init__(self, reader: str, stays: Iterable[torch.Tensor], hold: Callable[[Held], None]) -> None:
        self.is_away = False
        self._reader, self._hold = reader, hold
        self._stays = {tensor.untyped_storage().data_ptr() for tensor in stays}
        self._found: dict[int, _Saved] = {}  # address -> storage; held, so that no address comes twice
        self._live: list[weakref.ref[_Saved]] = []

    def pack(self, tensor: torch.Tensor) -> _View | torch.Tensor:
        """The view that the graph holds in place of a tensor."""
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if address in self._stays or not storage.nbytes() or is_constant(tensor):
            return tensor if tensor.is_leaf else tensor.detach()
        saved = self._found.get(address)
        if saved is None:
            held = Held(torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage))
            self._hold(held)
            saved = self._found[address] = _Saved(held, self._reader)
        return _View(saved, tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def end(self) -> None:
        """The graph is complete: from now on it alone keeps the storages alive."""
        self._live = [weakref.ref(saved) for saved in self._found.values()]
        self._found = {}

    def all(self) -> list[_Saved]:
        """The storages that the graph still holds, in the order in which it saved them."""
        found = (reference() for reference in self._live)
        return [saved for saved in found if saved is not None]


class SavedActivations:
    """The saved activations of a run, by stage and microbatch; `memory`, if any, counts their bytes."""

    def __init__(self, memory: DeviceMemory | None) -> None:
        self._memory = memory
        self._found: dict[tuple[int, Segment], _SavedByForward] = {}

    def __len__(self) -> int:
        return len(self._found)

    @contextmanager
    def noting(self, stage: int, segment: Segment, stays: Iterable[torch.Tensor]) -> Iterator[None]:
        """Inside, the forward of a stage makes its graph; `stays` are the weights and buffers that it reads."""
        found = _SavedByForward(_not_back(f"the backward of {stage}F{segment[0]}", stage, segment), stays, self._hold)
        with torch.autograd.graph.saved_tensors_hooks(found.pack, _unpack):
            yield
        found.end()
        self._found[stage, segment] = found

    def store(self, action: Action, copy: Move) -> None:
        """Move an action's activations to its partner or the host; RuntimeError if they are not there."""
        found = self._found.get((action.stage, segment_of(action)))
        if found is None or found.is_away:
            raise RuntimeError(f"{action} stores activations that are not on its device")
        found.is_away = True
        for saved in found.all():
            assert saved.here is not None  # or it has been refused
            saved.away = Held(copy(saved.here.tensor))
            saved.here = None
            if isinstance(action.peer, int):
                self._hold(saved.away, OF_PARTNER, action.peer)

    def load(self, action: Action, device: int, copy: Move) -> None:
        """Bring an action's activations back to their device; RuntimeError if they have not left it."""
        found = self._found.get((action.stage, segment_of(action)))
        if found is None or not found.is_away:
            raise RuntimeError(f"{action} loads activations that are not away: no STORE:A has taken them")
        for saved in found.all():
            assert saved.away is not None  # or it has been refused
            saved.here = Held(copy(saved.away.tensor))
            self._hold(saved.here, OWN, device)
            saved.away = None
        found.is_away = False

    def take(self, action: Action) -> None:
        """Free what a forward has saved, for its backward; RuntimeError if it is not on the device."""
        place = action.stage, segment_of(action)
        if self._found[place].is_away:
            raise RuntimeError(_not_back(str(action), *place))
        del self._found[place]

    def _hold(self, held: Held, what: str = OWN, device: int | None = None) -> None:
        if self._memory is not None:
            self._memory.hold(held.tensor, what, device, held)


def _unpack(found: _View | torch.Tensor) -> torch.Tensor:
    return found.tensor() if isinstance(found, _View) else found


def _not_back(reader: str, stage: int, segment: Segment) -> str:
    return f"{reader} reads activations that are not on its device: no {stage}LOAD:A{segment[0]} has brought them"
