"""Notes: the trace of a simulated machine, and the device that each storage stands for; all memory is the host's."""

import itertools
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from sys import _getframe
from types import FrameType
from typing import Any

import torch
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_leaves

from rpbench.engine.host_order import HostOrder, Turns
from rpbench.engine.stream_order import trace as issued
from rpbench.engine.stream_order.trace import Call, Entry, Storage, Timeline, Trace
from rpbench.models.constants import constants


@dataclass
class Home:
    """The place of a storage."""

    num_bytes: int
    device: int | None = None  # index of a device; None: the host
    pinned: bool = False  # whether devices can read it by themselves
    number: int = -1  # in the trace of a machine
    machine: int = 0  # that machine's identity


_homes: dict[int, Home] = {}  # address of a storage's object -> where it is; constants outlive the machine they are of
_lock = threading.RLock()


def home_of(tensor: torch.Tensor, freed: Callable[[Home], None]) -> Home:
    """The home of a tensor's storage; `freed` is called with a new one when the storage is freed."""
    storage = tensor.untyped_storage()
    key = storage._cdata
    with _lock:
        found = _homes.get(key)
        if found is None:
            found = _homes[key] = Home(-(-storage.nbytes() // 512) * 512)
            weakref.finalize(storage, _forget, key, freed).atexit = False
        return found


def _forget(key: int, freed: Callable[[Home], None]) -> None:
    with _lock:
        found = _homes.pop(key)
    freed(found)


ENDLESS = 2**50  # bytes of a device without a limit

_HERE = str(Path(__file__).parent)
_PACKAGE = str(Path(__file__).parents[2])
_TORCH = str(Path(torch.__file__).parent)
_identities = itertools.count(1)


class _Local(threading.local):
    """The state of a thread."""

    def __init__(self) -> None:
        self.action = "outside of actions"  # that it runs, in words
        self.device = 0  # its current one
        self.streams: dict[int, torch.Stream] = {}  # its current one on each device
        self.makes_on: int | None = None  # the device that factories make tensors on; None: the host
        self.within: tuple[Any, ...] = ()  # the arguments of the call of torch that it is in


KIND = "privateuseone"  # torch's name for an unknown kind of device, for which the code has no special case


class Notes(HostOrder):
    """The trace and memory of a simulated machine; ValueError for no device, or a kind that this machine really has."""

    def __init__(
        self,
        num_devices: int,
        kind: str = KIND,
        *,
        keep_calls: bool = False,  # keep every operation for a replay in another order; nothing is freed then
        memory_bytes: int | None = None,  # memory of a device; None: no limit
        lost: Mapping[int, int] | None = None,  # device -> entries until it is lost; later ones raise torch's error
        seed: int = 0,  # of the order in which the lanes of a run take turns
    ) -> None:
        if num_devices < 1:
            raise ValueError(f"num_devices={num_devices}: a machine has at least one")
        here = torch.accelerator.current_accelerator()
        if here is not None and here.type == kind:
            raise ValueError(f"kind={kind}: this machine has real ones; leave it out to check the order alone")
        self._seed = seed
        self._memory_bytes, self._left = memory_bytes, dict(lost or {})
        self.num_devices, self.kind, self.trace = num_devices, kind, Trace()
        self.identity, self.keeps_calls = next(_identities), keep_calls
        self.lock, self.local = threading.RLock(), _Local()
        self.calls: dict[int, Call] = {}  # identity of an entry -> its operation, with `keep_calls`
        # storage -> its bytes before the first operation, with `keep_calls`
        self.begun_with: dict[Storage, torch.Tensor] = {}
        self.storages: dict[Storage, torch.Tensor] = {}  # every storage as bytes, with `keep_calls`
        self.held, self.peak = Counter[int](), Counter[int]()  # device -> bytes of its memory, now and at most
        self.defaults: dict[int, torch.Stream] = {}
        self._num_storages = 0
        self.events = itertools.count(1)  # their numbers
        self._timelines: dict[int, Timeline] = {}  # by the identity of a thread, also while it ends
        self._unnamed: set[Timeline] = set()  # streams that no action of a lane has used
        self._made_by: dict[Storage, Timeline] = {}  # storage of a device -> the thread that made it
        self._constants: set[Storage] = set()  # whose making has been waited for
        self._counts = False  # an allocator counts when it has handed something out

    # --- entries and storages ---

    def note(self, kind: Callable[..., Entry], *fields: Any) -> Any:
        """Add an entry by the calling thread."""
        with self.lock:
            entry = kind(self.thread(), self.local.action, _place(), *fields)
            self._check_there(entry)
            self.trace.entries.append(entry)
            if isinstance(entry, issued.Work) and entry.stream in self._unnamed and " of device" in entry.action:
                self._unnamed.remove(entry.stream)
                lane = entry.action.partition(" of ")[2]
                self.trace.names[entry.stream] = f"{lane} (accelerator {self.trace.devices[entry.stream]})"
            if isinstance(entry, issued.Synchronised | issued.SynchronisedEvent):
                self._publish_constants()
            return entry

    def _check_there(self, entry: Entry) -> None:
        """Raise as torch does if an entry uses a lost device."""
        if not self._left:
            return
        streams = getattr(entry, "streams", (getattr(entry, "stream", None),))
        for device in {self.trace.devices[stream] for stream in streams if stream is not None} & self._left.keys():
            self._left[device] -= 1
            if self._left[device] < 0:
                raise torch.AcceleratorError(f"device {self.kind}:{device} is lost")

    def thread(self) -> Timeline:
        own = threading.get_ident()
        if own not in self._timelines:
            self._timelines[own] = self.trace.timeline(f"thread {threading.current_thread().name}")
        return self._timelines[own]

    def starts_thread(self) -> None:
        """Give the calling thread a new timeline, even if an earlier thread had its identity."""
        with self.lock:
            self._timelines.pop(threading.get_ident(), None)

    def home(self, tensor: torch.Tensor) -> Home:
        """The home of a tensor's storage, numbered in this trace."""
        with self.lock:
            home = home_of(tensor, self._freed)
            if home.machine != self.identity:
                home.machine, home.number = self.identity, self._num_storages
                self._num_storages += 1
                if home.pinned:
                    self.note(issued.Pinned, home.number)
            if home.number in self._constants:
                self.note(issued.Awaited, ("constant", home.number))
            return home

    def is_born(self, home: Home, device: int, stream: Timeline) -> None:
        limit = self._memory_bytes
        if limit is not None and self.held[device] + home.num_bytes > limit:
            raise torch.OutOfMemoryError(
                f"{self.kind}:{device} is out of memory: {home.num_bytes} bytes are asked for, {self.held[device]} of "
                f"{limit} are held"
            )
        self._counts, home.device = True, device
        self._made_by[home.number] = self.thread()
        if home.num_bytes:
            self.note(issued.Born, stream, home.number)
            self.held[device] += home.num_bytes
            self.peak[device] = max(self.peak[device], self.held[device])

    def keep_beginning(self, tensor: torch.Tensor) -> None:
        """Keep the bytes of a storage before its first use in the trace."""
        home = self.home(tensor)
        if home.number not in self.storages:
            self.begun_with[home.number] = self.keep_storage(tensor).clone()

    def keep_storage(self, tensor: torch.Tensor) -> torch.Tensor:
        """Keep a storage from being freed; returns its bytes."""
        number = self.home(tensor).number
        if number not in self.storages:
            with no_dispatch():
                self.storages[number] = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
        return self.storages[number]

    def _freed(self, home: Home) -> None:
        notes = next((found for found in noting if found.identity == home.machine), None)
        if notes is None:
            return
        with notes.lock:
            notes.note(issued.Freed, home.number)
            if home.device is not None:
                notes.held[home.device] -= home.num_bytes

    def _publish_constants(self) -> None:
        """Signal constants whose maker has waited for them: other threads read them without a wait."""
        for tensor in constants():
            home = _homes.get(tensor.untyped_storage()._cdata)
            if home is not None and home.machine == self.identity and self._made_by.get(home.number) == self.thread():
                del self._made_by[home.number]
                self._constants.add(home.number)
                self.note(issued.Signalled, ("constant", home.number))

    # --- `rpbench.engine.host_order.HostOrder` ---

    def begins(self, what: str) -> None:
        self.local.action = what

    def signal(self, token: Hashable) -> None:
        self.note(issued.Signalled, token)

    def wait(self, token: Hashable) -> None:
        self.note(issued.Awaited, token)

    def turns(self, lanes: Sequence[int]) -> Turns:
        return Turns(lanes, self._seed)

    # --- devices and streams ---

    def index_of(self, device: Any) -> int | None:
        """Index of a device; None for the host and the meta device."""
        if device is None:
            return None
        found = torch.device(self.kind, device) if isinstance(device, int) else torch.device(device)
        if found.type != self.kind:
            return None
        index = self.local.device if found.index is None else found.index
        if index >= self.num_devices:
            raise RuntimeError(f"{found}: invalid device ordinal, there are {self.num_devices}")
        return index

    def chosen(self, device: Any) -> int:
        """Index of a device; None names that of the calling thread."""
        index = self.index_of(device)
        return self.local.device if index is None else index

    def reset_peak(self, device: Any = None) -> None:
        if not self._counts:
            raise RuntimeError("Invalid device argument ")  # as torch says it of CUDA
        self.peak[self.chosen(device)] = self.held[self.chosen(device)]

    def memory_info(self, device: Any = None) -> tuple[int, int]:
        """Free and total bytes."""
        whole = ENDLESS if self._memory_bytes is None else self._memory_bytes
        return whole - self.held[self.chosen(device)], whole

    @contextmanager
    def making_on(self, index: int | None) -> Iterator[None]:
        """Factories of this thread make tensors on a device."""
        with self._having("makes_on", index), self.calling():
            yield

    def calling(self, *given: Any) -> AbstractContextManager[None]:
        """Inside is a call of torch: tensors it makes internally are on the device of its arguments."""
        return self._having("within", given)

    def device_index(self, index: int | None) -> AbstractContextManager[None]:
        return self._having("device", self.local.device if index is None else index)

    @contextmanager
    def _having(self, name: str, value: Any) -> Iterator[None]:
        """An attribute of the calling thread's state has a value inside."""
        before = getattr(self.local, name)
        setattr(self.local, name, value)
        try:
            yield
        finally:
            setattr(self.local, name, before)

    def device_called(self) -> int | None:
        """The device of the call's arguments; None: the host."""
        tensors = (leaf for leaf in tree_leaves(self.local.within) if isinstance(leaf, torch.Tensor))
        devices = (self.home(tensor).device for tensor in tensors if not tensor.is_meta)
        return next((device for device in devices if device is not None), None)

    def synchronize(self, device: Any = None) -> None:
        index = self.chosen(device)
        streams = tuple(stream for stream, found in self.trace.devices.items() if found == index)
        self.note(issued.Synchronised, streams)

    def new_stream(self, index: int, name: str | None = None) -> Timeline:
        """The timeline of a new stream of a device; without a name it takes that of the first lane that uses it."""
        with self.lock:
            found = self.trace.timeline(name or f"stream {len(self.trace.names)} of accelerator {index}", index)
            if name is None:
                self._unnamed.add(found)
            return found


noting: list[Notes] = []  # of open machines; torch shows the last one


def _place() -> str:
    """The innermost running line of the project, or else of its caller."""
    frame: FrameType | None = _getframe(2)
    outer: FrameType | None = None
    while frame is not None:
        is_ours, is_seen, name = _file(frame.f_code.co_filename)
        if is_ours:
            return f"{name}:{frame.f_lineno}"
        if is_seen and outer is None:
            outer = frame
        frame = frame.f_back
    return f"{_file(outer.f_code.co_filename)[2]}:{outer.f_lineno}" if outer else "outside of Python"


@cache
def _file(path: str) -> tuple[bool, bool, str]:
    """Whether a file is the project's, whether it is not torch's (both without this folder), and its name."""
    is_here = path.startswith(_HERE)
    return path.startswith(_PACKAGE) and not is_here, not is_here and not path.startswith(_TORCH), Path(path).name
