"""Transfers over a paced link: urgent ones first, bulky ones cut in chunks so that they can be overtaken.

An activation that a device waits for must not stand behind a stage's weights. A link therefore sends a chunk at a
time and looks before each one what is most urgent; a transfer waits for one chunk of a less urgent one at most.
Pace is kept against deadlines, so that a sleep that lasts too long is made up for by the next.
"""

import heapq
import itertools
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Self

import torch

from rpbench.cost.hardware.machine import Machine
from rpbench.engine.state.device_weights import Copy

CHUNK_BYTES = 1 << 20


@dataclass
class Transfer:
    """Bytes on their way.

    Args:
        num_bytes: how many.
        source, target: what is copied, if anything; flat tensors of bytes.
        done: set when the last byte is there.
        end_s: when that was, by `time.perf_counter`.
    """

    num_bytes: int
    source: torch.Tensor | None = None
    target: torch.Tensor | None = None
    done: threading.Event = field(default_factory=threading.Event)
    end_s: float = 0.0
    sent: int = 0


class Link:
    """One direction of a link, with a thread that sends. Use it in a `with` block, or close it.

    Args:
        bytes_per_s: its pace.
        chunk_bytes: what is sent before looking again for something more urgent.

    Raises:
        ValueError: if the pace or the chunk is not above 0.
    """

    def __init__(self, bytes_per_s: float, chunk_bytes: int = CHUNK_BYTES) -> None:
        if not bytes_per_s > 0 or chunk_bytes < 1:
            raise ValueError(
                f"bytes_per_s={bytes_per_s}, chunk_bytes={chunk_bytes}: a link has a pace above 0 and chunks of a byte "
                "or more; try 16e9 and 1048576"
            )
        self._bytes_per_s, self._chunk_bytes = bytes_per_s, chunk_bytes
        self._queue: list[tuple[int, int, Transfer]] = []  # (priority, sequence, transfer), a heap
        self._sequence = itertools.count()
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._send, name="link", daemon=True)
        self._thread.start()

    def send(self, num_bytes: int, priority: int = 0) -> Transfer:
        """Send bytes that are not there: only time passes. Lower priorities go first, equal ones in order."""
        return self._submit(Transfer(num_bytes), priority)

    def copy(self, source: torch.Tensor, target: torch.Tensor, priority: int = 0) -> Transfer:
        """Copy a contiguous tensor; the target holds it when the transfer is done."""
        flat_source, flat_target = (tensor.detach().view(-1).view(torch.uint8) for tensor in (source, target))
        return self._submit(Transfer(flat_source.numel(), flat_source, flat_target), priority)

    def close(self) -> None:
        """Stop after the chunk that is being sent."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _submit(self, transfer: Transfer, priority: int) -> Transfer:
        with self._changed:
            if self._closed:
                raise RuntimeError("the link is closed")
            heapq.heappush(self._queue, (priority, next(self._sequence), transfer))
            self._changed.notify()
        return transfer

    def _send(self) -> None:
        free_s = 0.0  # when the link has sent what it was given
        while True:
            with self._changed:
                while not self._queue and not self._closed:
                    self._changed.wait()
                if self._closed:
                    return
                _, _, transfer = self._queue[0]
            size = min(self._chunk_bytes, transfer.num_bytes - transfer.sent)
            free_s = max(free_s, time.perf_counter()) + size / self._bytes_per_s
            self._copy(transfer, size)
            left = free_s - time.perf_counter()
            if left > 0:
                time.sleep(left)
            transfer.sent += size
            if transfer.sent == transfer.num_bytes:
                self._finish(transfer)

    def _copy(self, transfer: Transfer, size: int) -> None:
        if transfer.source is not None and transfer.target is not None:
            part = slice(transfer.sent, transfer.sent + size)
            transfer.target[part].copy_(transfer.source[part])

    def _finish(self, transfer: Transfer) -> None:
        with self._changed:
            self._queue = [entry for entry in self._queue if entry[2] is not transfer]
            heapq.heapify(self._queue)
        transfer.end_s = time.perf_counter()
        transfer.done.set()


class PacedCopies:
    """A link for every lane of every device, at the pace of a cluster. Use it in a `with` block, or close it.

    Args:
        cluster: one whose links have a pace.
    """

    def __init__(self, cluster: Machine) -> None:
        self._cluster = cluster
        self._links: dict[tuple[int, str], Link] = {}
        self._lock = threading.Lock()

    def copy(self, tensor: torch.Tensor, device: int, lane: str, peer: int | None = None) -> torch.Tensor:
        """The tensor at the other end of a lane, once its last byte is there."""
        source = tensor.detach().contiguous()
        target = torch.empty_like(source)
        if source.numel():
            self._link(device, lane).copy(source, target).done.wait()
        return target

    def close(self) -> None:
        """End the links' threads."""
        for link in self._links.values():
            link.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _link(self, device: int, lane: str) -> Link:
        with self._lock:
            place = device, lane
            if place not in self._links:
                pace = self._cluster.link_bytes_per_s(lane)
                assert pace is not None
                self._links[place] = Link(pace)
            return self._links[place]


class Traffic:
    """A `Copy` that counts.

    Attributes:
        moved_bytes: (device, lane) -> bytes copied to it over lanes h2d and net, and from it over d2h.
    """

    def __init__(self, copy: Copy) -> None:
        self.moved_bytes: Counter[tuple[int, str]] = Counter()
        self._copy, self._lock = copy, threading.Lock()

    def __call__(self, tensor: torch.Tensor, device: int, lane: str, peer: int | None = None) -> torch.Tensor:
        copied = self._copy(tensor, device, lane, peer)
        with self._lock:
            self.moved_bytes[device, lane] += tensor.nbytes
        return copied
