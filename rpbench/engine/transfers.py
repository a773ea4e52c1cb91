"""Transfers: the handlers of LOAD, STORE, FREE, SEND, RECV and of the collectives of a stage's replicas.

SEND and RECV on lane compute or net do nothing: the host has boundary tensors, and all devices share it. On lanes d2h
and h2d they are copies to the host and from it. UNSHARD, RESHARD and REDUCE_GRAD are collectives
(`rpbench.engine.shards`).
"""

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from itertools import groupby

import torch

from rpbench.cost.hardware.machine import Machine
from rpbench.engine.compute.forward_backward import Passes
from rpbench.engine.executor import Gate, Handler
from rpbench.engine.shards.reduced_gradients import ReducedWindow
from rpbench.engine.shards.replica_weights import ReplicaWeights
from rpbench.engine.state.accumulation import microbatches_of
from rpbench.engine.state.device_weights import Copy, DeviceWeights
from rpbench.engine.state.gradients import Gradients, Move
from rpbench.engine.state.saved_activations import SavedActivations
from rpbench.engine.state.weights import Weights
from rpbench.ir.action import RECV, SEND, Action, Kind
from rpbench.ir.analysis import Analysis


class PacedCopies:
    """A `Copy` over links that keep the pace of a cluster, one for each lane of each device, one tensor at a time.

    Pace is kept against deadlines: after a sleep that lasts too long, the next is shorter.
    """

    def __init__(self, cluster: Machine) -> None:
        self._cluster = cluster
        self._links: defaultdict[tuple[int, str], threading.Lock] = defaultdict(threading.Lock)
        self._free_s: defaultdict[tuple[int, str], float] = defaultdict(float)  # when a link has sent what it was given

    def __call__(self, tensor: torch.Tensor, device: int, lane: str, peer: int | None = None) -> torch.Tensor:
        """The tensor at the other end of a lane, once its last byte is there."""
        pace = self._cluster.link_bytes_per_s(lane)
        assert pace is not None
        link = device, lane
        with self._links[link]:
            self._free_s[link] = max(self._free_s[link], time.perf_counter()) + tensor.nbytes / pace
            target = tensor.detach().clone(memory_format=torch.contiguous_format)
            time.sleep(max(0.0, self._free_s[link] - time.perf_counter()))
        return target


class Traffic:
    """A `Copy` that counts."""

    def __init__(self, copy: Copy) -> None:
        # (device, lane) -> bytes that the device's own actions have copied over a lane, whichever way
        self.moved_bytes: Counter[tuple[int, str]] = Counter()
        self._copy, self._lock = copy, threading.Lock()

    def __call__(self, tensor: torch.Tensor, device: int, lane: str, peer: int | None = None) -> torch.Tensor:
        copied = self._copy(tensor, device, lane, peer)
        with self._lock:
            self.moved_bytes[device, lane] += tensor.nbytes
        return copied


class Transfers:
    """The handlers of all actions that move tensors."""

    def __init__(
        self,
        analysis: Analysis,
        weights: Weights,
        gradients: Gradients,
        passes: Passes,
        copy: Copy,  # makes a tensor at the other end of a lane
        # (backward stage, version) -> the gradient that replicas reduce
        reduced: Mapping[tuple[int, int], ReducedWindow],
        # what kept graphs have saved, where that moves; None where only a stage's input does
        saved: SavedActivations | None = None,
    ) -> None:
        self._weights, self._gradients, self._passes, self._copy = weights, gradients, passes, copy
        self._reduced, self._index, self._saved = reduced, analysis.index, saved
        moved = analysis.moves.transfers
        self._stores = {transfer.pieces[0]: transfer for transfer in moved.get((Kind.STORE, "G"), ())}
        self._sums = {transfer.pieces[0]: transfer for transfer in moved.get((Kind.REDUCE_GRAD, None), ())}

    @property
    def handlers(self) -> Mapping[Kind, Handler]:
        return dict.fromkeys(SEND | RECV, self._hop) | {
            Kind.LOAD: self._load,
            Kind.STORE: self._store,
            Kind.FREE: self._free,
            Kind.UNSHARD: self._gather,
            Kind.RESHARD: self._free,
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
                self._gradients.store(action.stage, version, own, self._over_link(number))

    def _free(self, action: Action, number: int, gate: Gate) -> None:
        """Free weights, gathered ones too; gradients and activations are freed by the action that takes them."""
        if isinstance(self._weights, DeviceWeights) and action.object in ("P", None):
            self._weights.free(number)

    def _gather(self, action: Action, number: int, gate: Gate) -> None:
        assert isinstance(self._weights, ReplicaWeights)
        self._weights.gather(number)

    def _reduce(self, action: Action, number: int, gate: Gate) -> None:
        transfer = self._sums[number]
        microbatches = microbatches_of(self._index, transfer)
        window = self._reduced[action.stage, transfer.visits[0].step + 1]
        device = self._index.device(number)
        window.reduce(device, microbatches[0], lambda tensor, to: self._copy(tensor, device, "net", to))

    def _hop(self, action: Action, number: int, gate: Gate) -> None:
        if self._lane(number) in ("h2d", "d2h"):
            self._passes.copy_boundary(action, self._over_link(number))

    def _over_link(self, number: int) -> Move:
        device, lane, action = self._index.device(number), self._lane(number), self._index.actions[number]
        peer = action.peer if isinstance(action.peer, int) and action.kind is Kind.STORE else None
        if peer is not None and action.object == "G":  # a sum goes from device to device
            return lambda tensor: tensor if peer == device else self._copy(tensor, device, "net", peer)
        return lambda tensor: self._copy(tensor, device, lane, peer)  # a SEND goes by the host all the same

    def _lane(self, number: int) -> str:
        return self._index.lanes[self._index.lane_of[number]].name
