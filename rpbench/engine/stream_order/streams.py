"""Streams and events of a machine, as torch's own are asked for them."""

import time
from typing import Any, Self

import torch

from rpbench.engine.stream_order.notes import Notes, noting
from rpbench.engine.stream_order.trace import (
    Recorded,
    Synchronised,
    SynchronisedEvent,
    Timed,
    Timeline,
    Waits,
    WaitsForStream,
)


def now() -> Notes:
    """The notes of the machine that torch shows.

    Raises:
        RuntimeError: outside of one.
    """
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
        now().note(Waits, self.timeline, event.number)

    def wait_stream(self, stream: "MachineStream") -> None:  # type: ignore[override]  # likewise
        now().note(WaitsForStream, self.timeline, stream.timeline)

    def record_event(self, event: "MachineEvent | None" = None) -> "MachineEvent":  # type: ignore[override]
        event = MachineEvent() if event is None else event
        event.record(self)
        return event

    def synchronize(self) -> None:
        now().note(Synchronised, (self.timeline,))

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
        self.number, self._at_s = now().new_event(), 0.0

    def record(self, stream: MachineStream | None = None) -> None:
        self._at_s = time.perf_counter()
        now().note(Recorded, (stream or current_stream(now())).timeline, self.number)

    def wait(self, stream: MachineStream | None = None) -> None:
        (stream or current_stream(now())).wait_event(self)

    def synchronize(self) -> None:
        now().note(SynchronisedEvent, self.number)

    def query(self) -> bool:
        return False

    def elapsed_time(self, end: "MachineEvent") -> float:
        now().note(Timed, (self.number, end.number))
        return 1e3 * (end._at_s - self._at_s)


def current_stream(machine: Notes, device: Any = None) -> MachineStream:
    """The stream that the calling thread gives a device its work on."""
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
