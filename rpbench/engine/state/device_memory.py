"""Device memory: counts the bytes that a run's devices hold, and ends a run that exceeds their cap.

CPU threads and virtual devices have no memory of their own, so a cap is kept by counting. A device holds

* the weights of its stages and a gradient of the same size for those that train; where weights are streamed, only
  those of the stage it is running;
* where replicas share a stage, its shard of both, what it has gathered from UNSHARD to RESHARD and loaded from LOAD:P
  to FREE:P, and the gradients it has made until every replica has fetched its part of them;
* activations: what autograd saves, from the action that saves it until its graph is gone; where they move
  (`rpbench.engine.state.saved_activations`), while they are there, and those of a partner while it has them;
* where weights are bound, the inputs it keeps to recompute from; streamed ones are at home on the host.

A storage counts once a device. What an operation needs for a moment only is not seen, nor is the optimizer, which
is at home on the host.
"""

import threading
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from rpbench.engine.executor import Gate, Handler
from rpbench.engine.layout import Layout
from rpbench.engine.state.ownership import Sharing
from rpbench.engine.workload import Workload
from rpbench.ir.action import COMPUTE, Action, Kind, parts_of
from rpbench.ir.schedule import Schedule, Weights
from rpbench.models.shards import held_parameters


class OutOfDeviceMemory(MemoryError):
    """A device holds more than its cap."""


class DeviceMemory:
    """The ledger of all devices, each with a cap and `resident` bytes of weights and gradients that stay there.

    OutOfDeviceMemory if these do not fit; the counting methods raise it as well.
    """

    def __init__(self, limit_bytes: int, resident: Sequence[Counter[str]]) -> None:
        self._limit = limit_bytes
        self._held = [Counter(classes) for classes in resident]
        self.peak_bytes = [0] * len(resident)  # device -> the most it held
        self._holders: Counter[tuple[int, int]] = Counter()  # (device, storage) -> who has it
        self._lock = threading.RLock()  # a tensor may die, and be freed, while the ledger is written
        self._device = threading.local()
        for device in range(len(resident)):
            self._check(device)

    @contextmanager
    def visit(self, device: int, stage_bytes: Counter[str]) -> Iterator[None]:
        """The calling thread runs an action on a device, to which a stage has come for that time."""
        self._device.number = device
        with self._lock:
            self._held[device].update(stage_bytes)
        try:
            self._check(device)
            with torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack):
                yield
        finally:
            with self._lock:
                self._held[device].subtract(stage_bytes)

    def hold(self, tensor: torch.Tensor, what: str, device: int | None = None, owner: object = None) -> None:
        """Count a tensor until its owner (None: the tensor) is freed, on a device (None: of the running action)."""
        storage = tensor.untyped_storage()
        device = self._device.number if device is None else device
        key, size = (device, storage.data_ptr()), storage.nbytes()
        with self._lock:
            self._holders[key] += 1
            if self._holders[key] == 1:
                self._held[device][what] += size
        weakref.finalize(tensor if owner is None else owner, self._free, key, size, what).atexit = False
        self._check(device)

    def change(self, device: int, what: str, num_bytes: int) -> None:
        """Count bytes that come to a device; negative: that leave it."""
        with self._lock:
            self._held[device][what] += num_bytes
        self._check(device)

    def _pack(self, tensor: torch.Tensor) -> "Held | torch.Tensor":
        if tensor.is_leaf and tensor.requires_grad:
            return tensor  # a weight: counted with its stage
        saved = Held(tensor.detach())
        self.hold(saved.tensor, "activations", owner=saved)
        return saved

    def _free(self, key: tuple[int, int], size: int, what: str) -> None:
        with self._lock:
            self._holders[key] -= 1
            if not self._holders[key]:
                del self._holders[key]
                self._held[key[0]][what] -= size

    def _check(self, device: int) -> None:
        with self._lock:
            classes = self._held[device]
            held = sum(classes.values())
            self.peak_bytes[device] = max(self.peak_bytes[device], held)
        if held > self._limit:
            largest, size = max(classes.items(), key=lambda item: item[1])
            raise OutOfDeviceMemory(
                f"device {device} holds {held} bytes and has {self._limit}; {size} of them are {largest}"
            )


class Held:
    """A tensor that is counted as long as this object lives: with the graph that has saved it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def _unpack(saved: Held | torch.Tensor) -> torch.Tensor:
    return saved.tensor if isinstance(saved, Held) else saved


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error, or its cause, is a lack of memory: of a cap's, Python's or torch's."""
    while error is not None:
        if isinstance(error, MemoryError | torch.OutOfMemoryError):
            return True
        if isinstance(error, RuntimeError) and "can't allocate memory" in str(error):  # torch's allocator on the host
            return True
        error = error.__cause__
    return False


@dataclass(frozen=True)
class StageBytes:
    """Bytes of the stages' weights and gradients on each device; of a stage that replicas share, the device's shard."""

    schedule: Schedule
    workload: Workload
    layout: Layout
    sharing: Mapping[int, Sharing]
    homes: Mapping[int, int]  # stage -> device that keeps it, where it goes from device to device

    def staying(self) -> list[Counter[str]]:
        """Device -> bytes of the weights and gradients that stay there."""
        found: list[Counter[str]] = [Counter() for _ in range(self.schedule.shape.num_ranks)]
        if self._is_streamed:
            return found
        visits = {
            (device, what, module)
            for device, _, row in self.schedule.items()
            for action in row
            for part in parts_of(action)
            if part.kind in COMPUTE
            for what in (("weights",) if part.kind is Kind.F else ("weights", "gradients"))
            for module in self.layout.modules_of(part)
        }
        for device, what, module in visits:
            found[device][what] += self._staying(device, module)[what]
        return found

    def counted(self, handler: Handler, memory: DeviceMemory) -> Handler:
        """A handler whose device's memory is counted."""
        devices = [device for device, _, row in self.schedule.items() for _ in row]
        streamed = self._is_streamed

        def run(action: Action, number: int, gate: Gate) -> None:
            comes: Counter[str] = Counter()
            if streamed:
                modules = self.layout.modules_of(action)
                comes = sum((self._of(module, devices[number]) for module in modules), comes)
                if action.kind in (Kind.F, Kind.R):
                    del comes["gradients"]
            with memory.visit(devices[number], comes):
                handler(action, number, gate)

        return run

    @property
    def _is_streamed(self) -> bool:
        return self.schedule.weights is Weights.STREAMED

    def _staying(self, device: int, module: int) -> Counter[str]:
        """The bytes of a module's weights and gradients that stay on a device that runs it."""
        stage = self.layout.stage_of(module)
        sharing = self.sharing.get(stage)
        if self.homes.get(stage, device) != device:
            return Counter()
        if sharing is None:
            return self._of(module, device)
        size = next((parameter.itemsize for parameter in self.workload.modules[module].parameters()), 0)
        weights, gradients = sharing.kept_elements(module, device)
        return Counter(weights=weights * size, gradients=gradients * size)

    def _of(self, module: int, device: int) -> Counter[str]:
        parameters = held_parameters(self.workload.modules[module], device)
        trained = sum(parameter.nbytes for parameter in parameters if parameter.requires_grad)
        return Counter(weights=sum(parameter.nbytes for parameter in parameters), gradients=trained)
