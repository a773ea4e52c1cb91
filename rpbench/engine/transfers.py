"""Transfers: LOAD, STORE, FREE, SEND and RECV move the tensors of a training run, over a link that keeps a pace.

SEND and RECV on lane compute or net need do nothing: all devices share the host, and a boundary tensor is where its
reader looks for it. On lanes d2h and h2d they are copies to the host and from it. UNSHARD, RESHARD and REDUCE_GRAD are
collectives of the replicas of a stage (`rpbench.engine.shards`).

On a paced link, urgent transfers come first, and bulky ones are cut in chunks so that they can be overtaken: an
activation that a device waits for must not stand behind a stage's weights. A link therefore sends a chunk at a time and
looks before each one what is most urgent; a transfer waits for one chunk of a less urgent one at most. Pace is kept
against deadlines, so that a sleep that lasts too long is made up for by the next.
"""

import heapq
import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from typing import Self

import torch

from rpbench.cost.hardware.machine import Machine
from rpbench.engine.compute.forward_backward import Passes
from rpbench.engine.executor import Gate, Handler
from rpbench.engine.shards.reduced_gradients import ReducedWindow
from rpbench.engine.shards.replica_weights import ReplicaWeights
from rpbench.engine.state.accumulation import microbatches_of
from rpbench.engine.state.device_weights import Copy, DeviceWeights
from rpbench.engine.state.gradients import Gradients
from rpbench.engine.state.saved_activations import SavedActivations
from rpbench.engine.state.weights import Weights
from rpbench.ir.action import RECV, SEND, Action, Kind
from rpbench.ir.analysis import Analysis

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


class Transfers:
    """The handlers of everything that moves.

    Args:
        copy: makes a tensor at the other end of a lane.
        reduced: (backward stage, version) -> the gradient that replicas reduce.
        saved: what kept graphs have saved, where that moves; None where only a stage's input does.
    """

    def __init__(
        self,
        analysis: Analysis,
        weights: Weights,
        gradients: Gradients,
        passes: Passes,
        copy: Copy,
        reduced: Mapping[tuple[int, int], ReducedWindow],
        saved: SavedActivations | None = None,
    ) -> None:
        self._weights, self._gradients, self._passes, self._copy = weights, gradients, passes, copy
        self._reduced, self._index, self._saved = reduced, analysis.index, saved
        moved = analysis.moves.transfers
        self._stores = {transfer.pieces[0]: transfer for transfer in moved.get((Kind.STORE, "G"), ())}
        self._sums = {transfer.pieces[0]: transfer for transfer in moved.get((Kind.REDUCE_GRAD, None), ())}

    @property
    def handlers(self) -> Mapping[Kind, Handler]:
        """One for each kind that moves something."""
        return dict.fromkeys(SEND | RECV, self._hop) | {
            Kind.LOAD: self._load,
            Kind.STORE: self._store,
            Kind.FREE: self._free,
            Kind.UNSHARD: self._gather,
            Kind.RESHARD: self._leave,
            Kind.REDUCE_GRAD: self._reduce,
        }

    def _load(self, action: Action, number: int, gate: Gate) -> None:
        if action.object == "A" and self._saved is not None:
            self._saved.load(action, self._index.device(number), self._over_link(number))
        elif action.object == "A":
            self._passes.load_kept(action, self._over_link(number))
        elif isinstance(self._weights, DeviceWeights) and action.object == "P":
            self._weights.load(action, number)

    def _store(self, action: Action, number: int, gate: Gate) -> None:
        if action.object == "A" and self._saved is not None:
            self._saved.store(action, self._over_link(number))
        elif action.object == "A":
            self._passes.store_kept(action, self._over_link(number))
        elif action.object == "G":
            window = self._index.shape.num_microbatches
            microbatches = sorted(microbatches_of(self._index, self._stores[number]))
            for version, own in groupby(microbatches, key=lambda microbatch: microbatch // window + 1):
                self._gradients.store(
                    action.stage, version, own, self._to_peer(action, number) or self._over_link(number)
                )

    def _free(self, action: Action, number: int, gate: Gate) -> None:
        """Weights go; gradients and activations have gone with the action that took them."""
        if isinstance(self._weights, DeviceWeights) and action.object == "P":
            self._weights.free(number)

    def _gather(self, action: Action, number: int, gate: Gate) -> None:
        assert isinstance(self._weights, ReplicaWeights)
        self._weights.gather(number)

    def _leave(self, action: Action, number: int, gate: Gate) -> None:
        assert isinstance(self._weights, ReplicaWeights)
        self._weights.free(number)

    def _reduce(self, action: Action, number: int, gate: Gate) -> None:
        transfer = self._sums[number]
        microbatches = microbatches_of(self._index, transfer)
        window = self._reduced[action.stage, transfer.visits[0].step + 1]
        window.reduce(self._index.device(number), microbatches[0], self._between)

    def _between(self, tensor: torch.Tensor, device: int) -> torch.Tensor:
        return self._copy(tensor, device, "net")

    def _hop(self, action: Action, number: int, gate: Gate) -> None:
        if self._lane(number) in ("h2d", "d2h"):
            self._passes.copy_boundary(action, self._over_link(number))

    def _over_link(self, number: int) -> Callable[[torch.Tensor], torch.Tensor]:
        device, lane, action = self._index.device(number), self._lane(number), self._index.actions[number]
        to_peer = action.kind is Kind.STORE and isinstance(action.peer, int)  # a SEND goes by the host all the same
        peer = action.peer if to_peer else None
        return lambda tensor: self._copy(tensor, device, lane, peer)  # type: ignore[arg-type]  # a number by now

    def _to_peer(self, action: Action, number: int) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """The copy to the device that an action names; None if it names none."""
        peer = action.peer
        if not isinstance(peer, int):
            return None
        if peer == self._index.device(number):
            return lambda tensor: tensor
        return lambda tensor: self._copy(tensor, peer, "net")

    def _lane(self, number: int) -> str:
        return self._index.lanes[self._index.lane_of[number]].name
