"""What torch shows of a machine: the names that are replaced while it is open."""

import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction

from rpbench.engine.stream_order.faces import Faces
from rpbench.engine.stream_order.notes import Notes
from rpbench.engine.stream_order.streams import MachineEvent, MachineStream, current_stream, now, set_stream

Issuing = Callable[[], AbstractContextManager[None]]
"""Inside, the calling thread sees the machine."""


class _Generator(torch.Generator):
    """A generator of the processor that says it is a device's."""

    def __new__(cls, device: Any = "cpu") -> "_Generator":
        return super().__new__(cls, "cpu")  # type: ignore[call-arg]  # the device, in C

    def __init__(self, device: Any = "cpu") -> None:
        self._face = torch.device(device)

    @property
    def device(self) -> torch.device:  # type: ignore[override]  # a property here, an attribute there
        return self._face


class _Autocast(torch.autocast):
    """Autocast on a machine's devices is that of the processor, whose kernels run."""

    def __init__(self, device_type: str, *args: Any, **given: Any) -> None:
        super().__init__("cpu" if device_type == now().kind else device_type, *args, **given)


def shown(machine: Notes, issuing: Issuing) -> Iterator[tuple[Any, str, Any]]:
    """What torch shows of a machine: where, under which name, what."""
    yield from ((torch, name, value) for name, value in (("Stream", MachineStream), ("Event", MachineEvent)))
    yield torch, "Generator", _Generator
    yield from ((module, "autocast", _Autocast) for module in (torch, torch.amp))
    faces = {
        "is_available": lambda: True,
        "device_count": lambda: machine.num_devices,
        "current_accelerator": lambda check_available=False: torch.device(machine.kind),
        "current_stream": partial(current_stream, machine),
        "set_stream": partial(set_stream, machine),
        "synchronize": machine.synchronize,
        "device_index": machine.device_index,
        "current_device_index": lambda: machine.local.device,
        "set_device_index": lambda device: setattr(machine.local, "device", machine.index_of(device)),
        "empty_cache": lambda: None,
        "memory_allocated": lambda device=None: machine.held[machine.chosen(device)],
        "max_memory_allocated": lambda device=None: machine.peak[machine.chosen(device)],
        "reset_peak_memory_stats": machine.reset_peak,
        "get_memory_info": machine.memory_info,
    }
    yield from ((torch.accelerator, name, value) for name, value in faces.items())
    if not hasattr(torch, machine.kind):
        yield torch, machine.kind, SimpleNamespace(**faces, **_of_kind(faces))
    yield torch.autograd, "_engine_run_backward", _run_backward(machine, torch.autograd._engine_run_backward)
    yield BackwardCFunction, "apply", _called_back(machine, BackwardCFunction.apply)
    yield threading.Thread, "start", _started(machine, issuing, threading.Thread.start)
    yield threading.Thread, "join", _joined(machine, threading.Thread.join)
    yield queue.Queue, "put", _put(machine, queue.Queue.put)
    yield queue.Queue, "get", _got(machine, queue.Queue.get)


def _of_kind(faces: Mapping[str, Any]) -> dict[str, Any]:
    """What a kind's own module of torch has beside `torch.accelerator`; checkpointing and forked generators ask it."""
    return {
        "Stream": MachineStream,
        "Event": MachineEvent,
        "stream": lambda stream: stream,
        "device": faces["device_index"],
        "current_device": faces["current_device_index"],
        "set_device": faces["set_device_index"],
        "get_rng_state": lambda device=None: torch.get_rng_state(),  # that of the processor, which draws
        "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
        "manual_seed_all": lambda seed: None,  # whoever asks seeds the processor as well
        "_is_in_bad_fork": lambda: False,
    }


def _run_backward(machine: Notes, run: Callable[..., Any]) -> Callable[..., Any]:
    """What runs a graph backward; its formulas make what they need beside the tensors they start from."""

    def run_backward(outputs: Any, *args: Any, **given: Any) -> Any:
        with machine.calling(outputs):
            return run(outputs, *args, **given)

    return run_backward


def _called_back(machine: Notes, apply: Callable[..., Any]) -> Callable[..., Any]:
    """A function's own backward, which sees faces: torch runs a graph without any mode of this kind."""

    def called_back(context: Any, *gradients: Any) -> Any:
        with Faces(machine):
            return apply(context, *gradients)

    return called_back


def _started(
    machine: Notes, issuing: Issuing, start: Callable[[threading.Thread], None]
) -> Callable[[threading.Thread], None]:
    """`Thread.start` of threads that see the machine, and come after who starts them."""

    def started(thread: threading.Thread) -> None:
        body = thread.run

        def run() -> None:
            machine.starts_thread()
            with issuing():
                machine.wait(("begun", id(thread)))
                try:
                    body()
                finally:
                    machine.signal(("over", id(thread)))

        thread.run = run  # type: ignore[method-assign]
        machine.signal(("begun", id(thread)))
        start(thread)

    return started


def _joined(machine: Notes, join: Callable[..., None]) -> Callable[..., None]:
    def joined(thread: threading.Thread, timeout: float | None = None) -> None:
        join(thread, timeout)
        if not thread.is_alive():
            machine.wait(("over", id(thread)))

    return joined


def _put(machine: Notes, put: Callable[..., None]) -> Callable[..., None]:
    def putting(items: Any, *args: Any, **given: Any) -> None:
        machine.signal(("queue", id(items)))
        put(items, *args, **given)

    return putting


def _got(machine: Notes, get: Callable[..., Any]) -> Callable[..., Any]:
    """`Queue.get`, which comes after what has been put by then."""

    def getting(items: Any, *args: Any, **given: Any) -> Any:
        found = get(items, *args, **given)
        machine.wait(("queue", id(items)))
        return found

    return getting
