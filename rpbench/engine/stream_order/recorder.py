"""Recorder: records which storages every operation of torch reads and writes, and on which stream.

An operation runs at once on the processor. On a device it would be issued to the current stream of its tensors'
device. Reading a value back waits for that stream, and so does a copy between host and device that is not
non-blocking. A copy between devices runs on the source's current stream, which first waits for the target's; afterwards
the target's waits for it (torch, `aten/src/ATen/native/cuda/Copy.cu`). Also here: the machine's streams and events.
"""

import time
from collections.abc import Iterable, Mapping
from typing import Any, Self

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rpbench.engine.host_order import pause
from rpbench.engine.stream_order import trace as issued
from rpbench.engine.stream_order.notes import Home, Notes, noting
from rpbench.engine.stream_order.trace import Call, Timeline


def now() -> Notes:
    """The notes of the open machine; raises RuntimeError if no machine is open."""
    if not noting:
        raise RuntimeError("a stream or event of a machine is used outside of it")
    return noting[-1]


class MachineStream(torch.Stream):
    """A stream of a machine, as `torch.Stream`."""

    timeline: Timeline

    def __new__(cls, device: Any = None, priority: int = 0, name: str | None = None) -> "MachineStream":
        machine = now()
        index = machine.chosen(device)
        timeline = machine.new_stream(index, name)
        made = super().__new__(cls, stream_id=timeline + 1, device_index=index, device_type=1)
        made.timeline = timeline
        return made

    def __init__(self, device: Any = None, priority: int = 0, name: str | None = None) -> None:
        self._before: list[tuple[int, torch.Stream | None]] = []

    @property
    def device(self) -> torch.device:  # type: ignore[override]  # a property here, an attribute there
        return torch.device(now().kind, self.device_index)

    def wait_event(self, event: "MachineEvent") -> None:  # type: ignore[override]  # the machine's own
        now().note(issued.Waits, self.timeline, event.number)

    def wait_stream(self, stream: "MachineStream") -> None:  # type: ignore[override]  # likewise
        now().note(issued.WaitsForStream, self.timeline, stream.timeline)

    def record_event(self, event: "MachineEvent | None" = None) -> "MachineEvent":  # type: ignore[override]
        event = MachineEvent() if event is None else event
        event.record(self)
        return event

    def synchronize(self) -> None:
        now().note(issued.Synchronised, (self.timeline,))

    def query(self) -> bool:
        return False

    def is_capturing(self) -> bool:
        return False

    def __enter__(self) -> Self:
        local = now().local
        self._before.append((local.device, local.streams.get(self.device_index)))
        set_stream(now(), self)
        return self

    def __exit__(self, *exception: object) -> None:
        local = now().local
        local.device, before = self._before.pop()
        if before is None:
            del local.streams[self.device_index]
        else:
            local.streams[self.device_index] = before

    def __hash__(self) -> int:
        return hash(self.timeline)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MachineStream) and other.timeline == self.timeline


class MachineEvent:
    """An event of a machine, as `torch.Event`; its times are the processor's."""

    def __init__(self, device: Any = None, *, enable_timing: bool = False, **_: Any) -> None:
        self.number, self._at_s = next(now().events), 0.0

    def record(self, stream: MachineStream | None = None) -> None:
        self._at_s = time.perf_counter()
        now().note(issued.Recorded, (stream or current_stream(now())).timeline, self.number)

    def wait(self, stream: MachineStream | None = None) -> None:
        (stream or current_stream(now())).wait_event(self)

    def synchronize(self) -> None:
        now().note(issued.SynchronisedEvent, self.number)

    def query(self) -> bool:
        return False

    def elapsed_time(self, end: "MachineEvent") -> float:
        now().note(issued.Timed, (self.number, end.number))
        return 1e3 * (end._at_s - self._at_s)


def current_stream(machine: Notes, device: Any = None) -> MachineStream:
    index = machine.chosen(device)
    found = machine.local.streams.get(index)
    if found is None:
        with machine.lock:
            if index not in machine.defaults:
                name = f"the default stream of accelerator {index}"
                machine.defaults[index] = MachineStream(torch.device(machine.kind, index), name=name)
            found = machine.defaults[index]
    assert isinstance(found, MachineStream)
    return found


def set_stream(machine: Notes, stream: torch.Stream) -> None:
    """Make a stream the current one of its device, and that the current device."""
    machine.local.device = stream.device_index
    machine.local.streams[stream.device_index] = stream


# Operations that read only the shape of their arguments.
_READ_NOTHING = frozenset(
    (
        *("aten::empty_like", "aten::zeros_like", "aten::ones_like", "aten::full_like", "aten::rand_like"),
        *("aten::randn_like", "aten::new_empty", "aten::new_zeros", "aten::new_ones", "aten::new_full"),
        *("aten::new_empty_strided", "aten::set_", "aten::is_same_size", "aten::_version"),
    )
)
# Operations whose result, a value or a shape, is read by the host.
_READ_BACK = frozenset(
    (
        *("aten::_local_scalar_dense", "aten::item", "aten::is_nonzero", "aten::equal"),
        *("aten::nonzero", "aten::masked_select", "aten::_unique2"),
    )
)
# Operations that do not read what they overwrite.
_OVERWRITE = frozenset(
    (
        *("aten::copy_", "aten::fill_", "aten::zero_", "aten::bernoulli_", "aten::uniform_", "aten::normal_"),
        *("aten::random_", "aten::exponential_"),
    )
)
_DRAWS = ("generator",)  # the arguments that random numbers come from
_NO_TENSORS = (int, float, str, type(None), torch.dtype, torch.device)  # most arguments are none and hold none
_TAKE_HOST_INDICES = frozenset(("aten::index", "aten::index_put_", "aten::index_put", "aten::_index_put_impl_"))


class Recorder(TorchDispatchMode):
    """Notes the operations of one thread."""

    def __init__(self, machine: Notes) -> None:
        super().__init__()
        self._machine = machine

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given, machine = dict(kwargs or {}), self._machine
        pause()
        with machine.lock, torch._C.DisableTorchFunction():  # tensors as they are, without their faces
            if machine.keeps_calls:
                for tensor in _tensors_in((args, given)):
                    machine.keep_beginning(tensor)
            again = given | {key: value.clone_state() for key, value in given.items() if key in _DRAWS and value}
            out = func(*args, **given)
            noted = _Call(machine, func, args, given, out, again)
            if noted.is_copy:
                noted.note_copy(bool(given.get("non_blocking", args[2] if len(args) > 2 else False)))
            else:
                noted.note()
            return out


class _Call:
    """One operation that has run; `again`: its keyword arguments for a replay, generators as they were before it."""

    def __init__(
        self,
        machine: Notes,
        func: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        out: Any,
        again: dict[str, Any],
    ) -> None:
        self._machine = machine
        self._again: Call = func, args, again, out
        self.name = func._schema.name
        self.is_copy = self.name == "aten::copy_"
        self._tensors: list[torch.Tensor] = []
        self._reads: dict[int, Home] = {}
        self._writes: dict[int, Home] = {}
        self._is_view = False
        self._take_arguments(func._schema.arguments, args, kwargs)
        self._outputs = _tensors_in(out)

    def _take_arguments(self, schema: Iterable[Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        for number, argument in enumerate(schema):
            value = args[number] if number < len(args) else kwargs.get(argument.name)
            for tensor in _tensors_in(value):
                self._tensors.append(tensor)
                home = self._machine.home(tensor)
                if self.name in _READ_NOTHING:
                    continue
                alias = argument.alias_info
                if alias is None:
                    self._reads[home.number] = home
                elif alias.is_write:
                    self._writes[home.number] = home
                    if self.name not in _OVERWRITE and argument.name != "out":
                        self._reads[home.number] = home
                else:
                    self._is_view = True

    def note(self) -> None:
        machine = self._machine
        if self._is_view and not self._writes:  # a view has the storage of its tensor; nothing is read
            return
        own = {machine.home(tensor).number for tensor in self._tensors}
        asked = machine.local.makes_on
        if asked is None and not self._tensors:
            asked = machine.device_called()
        device = asked if asked is not None and self.name in _READ_NOTHING else self._device()
        fresh = {}
        for tensor in self._outputs:
            home = machine.home(tensor)
            if home.number not in own and home.number not in fresh:
                fresh[home.number] = home
        device = asked if device is None else device
        stream = None if device is None else current_stream(machine, device).timeline
        if device is not None and stream is not None:
            for home in fresh.values():
                machine.is_born(home, device, stream)
        self._writes |= fresh
        self._work(stream)
        if stream is not None and self.name in _READ_BACK:
            machine.note(issued.Synchronised, (stream,))

    def note_copy(self, non_blocking: bool) -> None:
        machine = self._machine
        target, source = (machine.home(tensor) for tensor in self._tensors[:2])
        devices = {home.device for home in (target, source)} - {None}
        if not devices:
            self._work(None)
        elif len(devices) == 2:
            there, here = (current_stream(machine, home.device).timeline for home in (target, source))
            machine.note(issued.WaitsForStream, here, there)
            self._work(here)
            machine.note(issued.WaitsForStream, there, here)
        else:
            (device,) = devices
            assert device is not None
            stream = current_stream(machine, device).timeline
            hosts = frozenset(home.number for home in (target, source) if home.device is None)
            self._work(stream, hosts if non_blocking else frozenset())
            if hosts and not non_blocking:
                machine.note(issued.Synchronised, (stream,))

    def _work(self, stream: int | None, hosts: frozenset[int] = frozenset()) -> None:
        name = self.name.removeprefix("aten::")
        entry = self._machine.note(issued.Work, stream, name, frozenset(self._reads), frozenset(self._writes), hosts)
        if self._machine.keeps_calls:
            for tensor in self._outputs:
                self._machine.keep_storage(tensor)
            self._machine.calls[id(entry)] = self._again

    def _device(self) -> int | None:
        """The device whose stream runs the operation; None: the processor."""
        homes = [(tensor, self._machine.home(tensor)) for tensor in self._tensors]
        devices = sorted({home.device for _, home in homes if home.device is not None})
        if not devices:
            return None
        if len(devices) > 1:
            self._misplaced(f"tensors on devices {devices}")
        hosts = [tensor for tensor, home in homes if home.device is None and tensor.dim() and tensor.numel()]
        if hosts and self.name not in _TAKE_HOST_INDICES:
            shapes = [tuple(tensor.shape) for tensor in hosts]
            self._misplaced(f"tensors of device {devices[0]} and of the host, shaped {shapes}")
        return devices[0]

    def _misplaced(self, what: str) -> None:
        self._machine.note(issued.Misplaced, f"{self.name.removeprefix('aten::')} of {what}")


def _tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors in a value, except those on the meta device."""
    if isinstance(value, torch.Tensor):
        return [] if value.is_meta else [value]
    if isinstance(value, _NO_TENSORS):
        return []
    leaves = tree_leaves(value)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and not leaf.is_meta]
