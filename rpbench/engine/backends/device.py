"""The device backend: a lane of a device is a stream of an accelerator; what crosses lanes waits for an event.

It runs on any accelerator that torch knows - CUDA, ROCm, XPU, Ascend - with `torch.accelerator`, `torch.Stream` and
`torch.Event`; `accelerator.py` has what is special to one kind. Threads issue work, one for each lane as on the cpu
backend, and the accelerators do it in the order of the streams:

    h2d       uploads of weights and activations, in the order of the lane: pieces of weights between activations
    compute   forward and backward; autograd is called in the lane's own thread
    d2h       downloads to pinned memory; their thread waits until each is complete
    net       what replicas fetch of each other: shards of weights, and gradients to be added up
    host      the optimizer, on the processor; where stages stay on accelerators it is on lane compute

Tensors on another accelerator are fetched by two streams of the thread that needs them (`rpbench.engine.peers`).

Memory is reused safely in two ways. Tensors loaded by lane h2d belong to the pool of its stream, which waits at a FREE
for the last reader before it loads more; the same holds for net and RESHARD. Every other tensor that a second stream
reads is recorded on that stream. Several devices of a schedule may share an accelerator: of n accelerators, device d
runs on number d mod n.

The order is checked on CPU tensors (`rpbench.engine.stream_order`); `docs/howto/gpu.md` says what has run on real
accelerators.
"""

import copy
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from rpbench.engine.backends.accelerator import is_its_error, place
from rpbench.engine.backends.threads import ThreadBackend, use_one_core
from rpbench.engine.executor import Gate, Perform
from rpbench.engine.peers import at, begin_action, copied_here, wait_for
from rpbench.engine.program import Edge, Program
from rpbench.engine.workload import Workload
from rpbench.ir.timeline import Timeline
from rpbench.models.data import Batch, Data

ON_DEVICE = ("h2d", "compute", "d2h", "net")  # lanes with a stream; the others work on the processor


class DeviceFailed(RuntimeError):
    """An accelerator has no memory, is lost, or its driver has an error; the cause is what torch said."""


@contextmanager
def failing(when: str = "") -> Iterator[None]:
    """Turn an accelerator's errors into DeviceFailed, with the bytes that each accelerator holds.

    They are those of `is_its_error`, also of work issued earlier, because accelerators report errors late.
    """
    try:
        yield
    except RuntimeError as error:
        if not is_its_error(error):
            raise
        held = [torch.accelerator.memory_allocated(number) for number in range(torch.accelerator.device_count())]
        what = f"{when}{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        raise DeviceFailed(f"{what}; bytes held by accelerator: {', '.join(map(str, held))}") from error


class DeviceBackend(ThreadBackend):
    """Real work on accelerators, timed by their own events."""

    def __init__(self) -> None:
        super().__init__(use_one_core)
        self._num_accelerators = torch.accelerator.device_count()
        for number in range(self._num_accelerators):
            torch.empty(0, device=place(number))  # before its first tensor, an allocator refuses to count
        self._streams: dict[tuple[int, str], torch.Stream] = {}

    def accelerator_of(self, device: int) -> torch.device:
        """The accelerator that a device of the schedule runs on."""
        return place(device % self._num_accelerators)

    def stream_of(self, device: int, lane: str) -> torch.Stream:
        if (device, lane) not in self._streams:
            self._streams[device, lane] = torch.Stream(device=self.accelerator_of(device))
        return self._streams[device, lane]

    def copy(self, tensor: torch.Tensor, device: int, lane: str, peer: int | None = None) -> torch.Tensor:
        """A copy of the tensor at the other end of a lane; to be called by the thread of that lane."""
        reader = device if peer is None else peer
        if lane != "d2h" or peer is not None:
            with at(self.accelerator_of(reader)):
                made = copied_here(tensor)
            made.record_stream(self.stream_of(reader, "compute"))
            return made
        home = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
        home.copy_(tensor.detach(), non_blocking=True)
        self.stream_of(device, lane).synchronize()  # the processor may read it next
        return home

    def run(self, program: Program, perform: Perform) -> Timeline:
        """When each action ran on its accelerator, in seconds; actions of host lanes by the clock of the processor.

        Raises as `rpbench.engine.executor.Backend` does, the cause a DeviceFailed where an accelerator failed, and
        DeviceFailed if one failed later.
        """
        issue = _Issue(self, program, perform)
        self._synchronize()
        issue.begin()
        super().run(program, issue.perform)
        with failing("when every action had been issued: "):
            self._synchronize()
        return issue.timeline()

    def _synchronize(self) -> None:
        for number in range(self._num_accelerators):
            torch.accelerator.synchronize(number)


class _Issue:
    """One run: issues actions to the streams, with events around each."""

    def __init__(self, backend: DeviceBackend, program: Program, perform: Perform) -> None:
        self._backend, self._program, self._perform = backend, program, perform
        self._on_device = [program.lanes[place].name in ON_DEVICE for place in program.index.lane_of]
        self._events: list[list[Any]] = [
            [
                torch.Event(self._accelerator(number), enable_timing=True) if on_device else None
                for number, on_device in enumerate(self._on_device)
            ]
            for _ in ("start", "main", "end")
        ]
        self._end = self._events[2]
        self._host = [[0.0] * len(program.waits) for _ in self._events]
        self._origins: dict[torch.device, Any] = {}
        self._began = 0.0

    def begin(self) -> None:
        """Set all clocks to zero; nothing runs on any accelerator at this moment."""
        self._began = time.perf_counter()
        for lane in self._program.lanes:
            found = self._backend.accelerator_of(lane.device)
            if found not in self._origins:
                self._origins[found] = torch.Event(found, enable_timing=True)
                self._origins[found].record(torch.accelerator.current_stream(found))

    @failing()
    def perform(self, number: int, gate: Gate) -> None:
        """Issue an action behind the events of what it waits for; raises DeviceFailed if an accelerator fails."""
        lane = self._program.lanes[self._program.index.lane_of[number]]
        edges = self._program.waits[number]
        if not self._on_device[number]:
            self._perform_on_host(number, gate, edges)
            return
        stream = self._backend.stream_of(lane.device, lane.name)
        start, main, end = (events[number] for events in self._events)
        begin_action(stream)
        with stream:
            self._wait([edge for edge in edges if not edge.late])
            start.record(stream)
            passed = False

            def pass_gate() -> None:
                nonlocal passed
                gate()
                self._wait([edge for edge in edges if edge.late])
                main.record(stream)
                passed = True

            self._perform(number, pass_gate)
            if not passed:
                pass_gate()
            end.record(stream)

    def timeline(self) -> Timeline:
        """The times of all actions, when every accelerator is done."""
        start, main, end = (
            [
                self._origins[self._accelerator(number)].elapsed_time(event) / 1e3
                if event is not None
                else host[number]
                for number, event in enumerate(events)
            ]
            for events, host in zip(self._events, self._host, strict=True)
        )
        return Timeline(self._program.schedule, start, main, end, [0.0] * len(start), 0.0)

    def _accelerator(self, number: int) -> torch.device:
        return self._backend.accelerator_of(self._program.lanes[self._program.index.lane_of[number]].device)

    def _wait(self, edges: list[Edge]) -> None:
        events = (self._end[edge.producer] for edge in edges)
        wait_for([event for event in events if event is not None])

    def _perform_on_host(self, number: int, gate: Gate, edges: list[Edge]) -> None:
        for edge in edges:
            event = self._end[edge.producer]
            if event is not None:
                event.synchronize()
        start, main, end = self._host
        start[number] = main[number] = time.perf_counter() - self._began
        self._perform(number, gate)
        end[number] = time.perf_counter() - self._began


@dataclass(frozen=True)
class OnCurrentDevice:
    """Another source's microbatches, copied to the current accelerator on the current stream."""

    data: Data

    def microbatch(self, step: int, microbatch: int) -> Batch:
        here = place(torch.accelerator.current_device_index())
        found = self.data.microbatch(step, microbatch)
        return Batch(*(each.pin_memory().to(here, non_blocking=True) for each in found))


def brought_here(workload: Workload) -> Workload:
    """A workload with its modules and microbatches copied to the current accelerator."""
    here = place(torch.accelerator.current_device_index())
    layers = copy.deepcopy(nn.ModuleList(workload.modules)).to(here)
    return replace(workload, modules=list(layers), data=OnCurrentDevice(workload.data))
