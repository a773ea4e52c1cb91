"""Peers: how a lane reads tensors that other lanes have made, on its own accelerator or on another one.

A lane's stream waits for the events of what its action waits for. What lies on its accelerator it may then read, and
its memory is kept for it. What lies on another one is copied by two streams that this thread has for nothing else, one
at each end, behind the same events alone: the copy passes what the lane has been given before and not done yet.

    there    waits for the makers' events, copies
    here     has the memory of the copy; the lane's own stream waits for it

Tensors in host memory are used as they are, at the cost of one check.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch


class _Calling(threading.local):
    """The events that the calling thread's action waits for, its lane's stream, and streams of this thread's own."""

    def __init__(self) -> None:
        self.events: list[torch.Event] = []
        self.stream: torch.Stream | None = None
        self._streams: dict[torch.device, torch.Stream] = {}
        self._num_known: dict[torch.device, int] = {}

    def begin(self, stream: torch.Stream) -> None:
        self.stream = stream
        self.events.clear()
        self._num_known.clear()

    def stream_at(self, place: torch.device) -> torch.Stream:
        """This thread's own stream of an accelerator, behind everything that the action waits for."""
        if place not in self._streams:
            self._streams[place] = torch.Stream(device=place)
        stream, known = self._streams[place], self._num_known.get(place, 0)
        for event in self.events[known:]:
            stream.wait_event(event)
        self._num_known[place] = len(self.events)
        return stream


_calling = _Calling()


def begin_action(stream: torch.Stream) -> None:
    """The calling thread begins an action on a lane's stream."""
    _calling.begin(stream)


def wait_for(events: Sequence[torch.Event]) -> None:
    """The action waits for these: its lane's stream at once, others of this thread when they are used."""
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
    if reader != _calling.stream:  # it has been told more than the lane
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
    """Inside, an accelerator gets the calling thread's work, between what its lane has done and what it will do."""
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
    """Wait for what the calling thread has given an accelerator inside `at`: others will look without an event."""
    if not is_host(place):
        torch.accelerator.current_stream(place).synchronize()


def empty_like(tensor: torch.Tensor) -> torch.Tensor:
    """Memory beside a tensor, wherever that is."""
    with at(tensor.device):
        return torch.empty_like(tensor)


def fill(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy into a tensor, wherever that is."""
    with at(target.device):
        target.copy_(here(source))
