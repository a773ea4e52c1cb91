"""The cuda backend: a lane of a device is a stream of its GPU; what crosses lanes is an event that is waited for.

Threads issue work, as on the cpu backend one for each lane, and the GPUs do it in the order of the streams:

    h2d       uploads of weights and activations, in the order of the lane: pieces of weights between activations
    compute   forward and backward; autograd is called in the lane's own thread
    d2h       downloads to pinned memory; their thread waits until each is complete
    net       what replicas fetch of each other: shards of weights, and gradients to be added up
    host      the optimizer, on the processor

Memory is reused safely in two ways. What the lane h2d has brought belongs to that stream's pool, and a FREE makes the
stream wait for the last reader before anything is brought again; the same holds for net and RESHARD. Every other
tensor that a second stream reads is recorded on that stream. Several devices may share a GPU: device d runs on GPU d
mod their number.

Not run by us: no GPU was at hand. What can be tested without one is tested with a stand-in for `torch.cuda`.
"""

import os
import time
from dataclasses import dataclass
from typing import Any

import torch

from rpbench.engine.backends.threads import ThreadBackend
from rpbench.engine.executor import Gate, Perform
from rpbench.engine.program import Edge, Program
from rpbench.ir.timeline import Timeline
from rpbench.models.data import Batch, Data

ON_GPU = ("h2d", "compute", "d2h", "net")  # lanes with a stream; the others work on the processor


class CudaBackend(ThreadBackend):
    """Real work on GPUs, timed by their own events.

    Args:
        runtime: `torch.cuda`, or what stands in for it.
    """

    def __init__(self, runtime: Any = torch.cuda) -> None:
        super().__init__(_prepare)
        self._cuda = runtime
        self._num_gpus = runtime.device_count()
        self._streams: dict[tuple[int, str], Any] = {}

    def gpu_of(self, device: int) -> int:
        """The GPU that a device of the schedule runs on."""
        return device % self._num_gpus

    def stream_of(self, device: int, lane: str) -> Any:
        """The stream of a lane."""
        place = device, lane
        if place not in self._streams:
            self._streams[place] = self._cuda.Stream(device=self.gpu_of(device))
        return self._streams[place]

    def copy(self, tensor: torch.Tensor, device: int, lane: str) -> torch.Tensor:
        """The tensor at the other end of a lane; to be called by the thread of that lane."""
        if lane in ("h2d", "net"):
            brought = tensor.detach().to(f"cuda:{self.gpu_of(device)}", non_blocking=True, copy=True)
            brought.record_stream(self.stream_of(device, "compute"))
            return brought
        home = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
        home.copy_(tensor.detach(), non_blocking=True)
        self.stream_of(device, lane).synchronize()  # whoever reads it next may be the processor
        return home

    def run(self, program: Program, perform: Perform) -> Timeline:
        """When each action ran on its GPU, in seconds; actions of host lanes by the clock of the processor.

        Raises:
            ActionFailed: if one raised.
            ScheduleError: if no lane can move.
        """
        issue = _Issue(self, program, perform)
        self._synchronize()
        issue.begin()
        super().run(program, issue.perform)
        self._synchronize()
        return issue.timeline()

    def _synchronize(self) -> None:
        for gpu in range(self._num_gpus):
            self._cuda.synchronize(gpu)

    @property
    def runtime(self) -> Any:
        """`torch.cuda`."""
        return self._cuda


class _Issue:
    """One run: what is issued to the streams, with the events around each action."""

    def __init__(self, backend: CudaBackend, program: Program, perform: Perform) -> None:
        self._backend, self._program, self._perform = backend, program, perform
        num, cuda = len(program.waits), backend.runtime
        self._on_gpu = [program.lanes[place].name in ON_GPU for place in program.index.lane_of]
        self._start: list[Any]
        self._main: list[Any]
        self._end: list[Any]
        self._start, self._main, self._end = (
            [cuda.Event(enable_timing=True) if on_gpu else None for on_gpu in self._on_gpu] for _ in range(3)
        )
        self._host = [[0.0] * num for _ in range(3)]
        self._origins: dict[int, Any] = {}
        self._began = 0.0

    def begin(self) -> None:
        """Set all clocks to zero; nothing runs on any GPU at this moment."""
        self._began = time.perf_counter()
        cuda = self._backend.runtime
        for lane in self._program.lanes:
            gpu = self._backend.gpu_of(lane.device)
            if gpu not in self._origins:
                self._origins[gpu] = cuda.Event(enable_timing=True)
                with cuda.device(gpu):
                    self._origins[gpu].record(cuda.current_stream(gpu))

    def perform(self, number: int, gate: Gate) -> None:
        """Issue an action behind the events of what it waits for."""
        lane = self._program.lanes[self._program.index.lane_of[number]]
        edges = self._program.waits[number]
        if not self._on_gpu[number]:
            self._perform_on_host(number, gate, edges)
            return
        cuda, stream = self._backend.runtime, self._backend.stream_of(lane.device, lane.name)
        start, main, end = self._start[number], self._main[number], self._end[number]
        with cuda.device(self._backend.gpu_of(lane.device)), cuda.stream(stream):
            self._wait(stream, [edge for edge in edges if not edge.late])
            start.record(stream)
            passed = False

            def pass_gate() -> None:
                nonlocal passed
                gate()
                self._wait(stream, [edge for edge in edges if edge.late])
                main.record(stream)
                passed = True

            self._perform(number, pass_gate)
            if not passed:
                pass_gate()
            end.record(stream)

    def timeline(self) -> Timeline:
        """The times of all actions, when every GPU is done."""
        start, main, end = (
            [
                self._origins[self._gpu(number)].elapsed_time(event) / 1e3 if event is not None else host[number]
                for number, event in enumerate(events)
            ]
            for events, host in zip((self._start, self._main, self._end), self._host, strict=True)
        )
        return Timeline(self._program.schedule, start, main, end, [0.0] * len(start), 0.0)

    def _gpu(self, number: int) -> int:
        return self._backend.gpu_of(self._program.lanes[self._program.index.lane_of[number]].device)

    def _wait(self, stream: Any, edges: list[Edge]) -> None:
        for edge in edges:
            event = self._end[edge.producer]
            if event is not None:
                stream.wait_event(event)

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
class OnCurrentGpu:
    """Microbatches of another source, on the GPU and in the stream of whoever asks."""

    data: Data

    def microbatch(self, step: int, microbatch: int) -> Batch:
        tokens, labels = self.data.microbatch(step, microbatch)
        return Batch(tokens.cuda(), labels.cuda())


def _prepare() -> None:
    torch.set_num_threads(1)


def make_repeatable() -> None:
    """Ask cuBLAS and torch for kernels that give the same bits every time, and for full float32 products."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when the first handle is made
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
