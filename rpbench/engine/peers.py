"""Peers: how a lane reads tensors that other lanes have made, on its own accelerator or on another one.

A lane's stream waits for the events of the producers of its action. Then it may read tensors on its own accelerator,
which are recorded on it. A tensor on another accelerator is copied by two streams that the thread has for copies alone,
one at each end. They wait for the same events and for nothing else, so a copy may overtake earlier work of the lane:

    there    waits for the makers' events, copies
    here     has the memory of the copy; the lane's own stream waits for it

Tensors in host memory are used as they are, at the cost of one check.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch


class _Calling(threading.local):
    """Of the calling thread: the events that its action waits for, its lane's stream, and its streams for copies."""

    def __init__(self) -> None:
        self.events: list[torch.Event] = []
        self.stream: torch.Stream | None = None
        self._streams: dict[torch.device, torch.Stream] = {}
        self._num_known: dict[torch.device, int] = {}

    def begin(self, stream: torch.Stream) -> None:
        """The calling thread begins an action on a lane's stream."""
        self.stream = stream
        self.events.clear()
        self._num_known.clear()

    def stream_at(self, place: torch.device) -> torch.Stream:
        """This thread's stream for copies at an accelerator, behind everything that the action waits for."""
        if place not in self._streams:
            self._streams[place] = torch.Stream(device=place)
        stream, known = self._streams[place], self._num_known.get(place, 0)
        for event in self.events[known:]:
            stream.wait_event(event)
        self._num_known[place] = len(self.events)
        return stream


_calling = _Calling()
begin_action = _calling.begin


def wait_for(events: Sequence[torch.Event]) -> None:
    """Make the lane's stream wait for events, and the thread's other streams when they are next used."""
    assert _calling.stream is not None
    for event in events:
        _calling.stream.wait_event(event)
    _calling.events += events


def is_host(place: torch.device) -> bool:
    """Whether it is memory of the processor, which has no streams."""
    return place.type in ("cpu", "meta")


def here(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor where the calling lane computes: itself, or a copy of it, without its graph."""
    if is_host(tensor.device):
        return tensor
    return brought(tensor, torch.accelerator.current_stream())


def copied_here(tensor: torch.Tensor) -> torch.Tensor:
    """A copy where the calling lane computes; of pinned memory without waiting for it."""
    reader = torch.accelerator.current_stream()
    if is_host(tensor.device):
        return tensor.detach().to(reader.device, non_blocking=True, copy=True)
    made = brought(tensor, reader)
    return made.detach().clone() if made is tensor else made


def brought(tensor: torch.Tensor, reader: torch.Stream) -> torch.Tensor:
    """The tensor on a stream's accelerator; the stream waits for the copy."""
    if tensor.device == reader.device:
        tensor.record_stream(reader)
        return tensor
    if _calling.stream is None:  # a thread without a lane, before the run or after it
        return tensor.detach().to(reader.device)
    there, own = _calling.stream_at(tensor.device), _calling.stream_at(reader.device)
    if reader != _calling.stream:  # it has waited for more than the lane
        there.wait_stream(reader)
    with own, there:
        made = torch.empty_like(tensor, device=reader.device)
        made.copy_(tensor.detach(), non_blocking=True)
    tensor.record_stream(there)
    if reader != own:
        reader.wait_stream(own)
        made.record_stream(reader)
    return made


@contextmanager
def at(place: torch.device) -> Iterator[None]:
    """Inside, the calling thread works on this accelerator, after its lane's work so far and before the later work."""
    if is_host(place):
        yield
        return
    outer = torch.accelerator.current_stream()
    if outer.device == place or _calling.stream is None:
        yield
        return
    inner = _calling.stream_at(place)
    inner.wait_stream(outer)
    with inner:
        yield
    outer.wait_stream(inner)


def finish(place: torch.device) -> None:
    """Wait for the calling thread's work on an accelerator inside `at`: others read its results without an event."""
    if not is_host(place):
        torch.accelerator.current_stream(place).synchronize()


def empty_like(tensor: torch.Tensor) -> torch.Tensor:
    """`torch.empty_like` on the tensor's device."""
    with at(tensor.device):
        return torch.empty_like(tensor)


def fill(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy into a tensor on any device."""
    with at(target.device):
        target.copy_(here(source))
