"""Machine: a simulated accelerator with some devices, for CPU tensors.

Every operation runs at once on the processor, and is recorded as if issued to a stream of a device. Inside
`with Machine(2) as machine:` torch shows two devices: `torch.accelerator`, `torch.Stream`, `torch.Event`,
`torch.Generator`, `torch.autocast`, a module of their kind, factories with `device=`, `Tensor.to`, `Tensor.device`,
pinned memory. Threads started inside see them too, and are ordered after the puts to a `queue.Queue` they get from.
Then `findings(machine.trace)` lists the races of the issued order, whatever the timing was.

Not modelled: kernels that read beyond their arguments; autograd's own thread, which on a device runs a backward on the
streams of its forward (here the caller runs it, on its stream); locks between threads.
"""

import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any, Self
from unittest import mock

import torch
from torch.autograd.function import BackwardCFunction
from torch.overrides import TorchFunctionMode
from torch.utils import _device

from rpbench.engine.host_order import listening
from rpbench.engine.stream_order.notes import Notes, noting
from rpbench.engine.stream_order.recorder import MachineEvent, MachineStream, Recorder, current_stream, now, set_stream
from rpbench.engine.stream_order.trace import Kept, Pinned

Handler = Callable[..., Any]


class Faces(TorchFunctionMode):
    """Shows CPU tensors as tensors of a machine's devices, in one thread."""

    def __init__(self, machine: Notes) -> None:
        super().__init__()
        self._machine = machine
        tensor: Any = torch.Tensor
        self._handlers: dict[Any, Handler] = {
            tensor.device.__get__: self._device,
            tensor.is_cpu.__get__: lambda real, t: self._index(t) is None,
            tensor.is_cuda.__get__: lambda real, t: machine.kind == "cuda" and self._index(t) is not None,
            tensor.is_xpu.__get__: lambda real, t: machine.kind == "xpu" and self._index(t) is not None,
            tensor.get_device: lambda real, t: -1 if self._index(t) is None else self._index(t),
            tensor.to: self._to,
            tensor.cpu: lambda real, t, **_: self._to(real, t, "cpu"),
            tensor.cuda: lambda real, t, device=None, **rest: self._to(real, t, device or "cuda", **rest),
            tensor.pin_memory: self._pin_memory,
            tensor.is_pinned: lambda real, t, **_: machine.home(t).pinned,
            tensor.record_stream: self._record_stream,
            tensor.register_hook: self._register_hook,
            tensor.register_post_accumulate_grad_hook: self._register_hook,
            tensor.numpy: self._numpy,
            tensor.__array__: self._numpy,
        }

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        handler = self._handlers.get(func)
        if handler is not None:
            return handler(func, *args, **given)
        if _device.CURRENT_DEVICE is not None and func in _device._device_constructors():
            given.setdefault("device", _device.CURRENT_DEVICE)
        if given.get("device") is not None or given.get("pin_memory"):
            return self._make(func, args, given)
        with self._machine.calling(args, given):
            return func(*args, **given)

    def _index(self, tensor: torch.Tensor) -> int | None:
        return self._machine.home(tensor).device

    def _device(self, real: Handler, tensor: torch.Tensor) -> torch.device:
        device: torch.device = real(tensor)
        index = None if device.type != "cpu" else self._index(tensor)
        return device if index is None else torch.device(self._machine.kind, index)

    def _make(self, func: Handler, args: tuple[Any, ...], given: dict[str, Any]) -> Any:
        """Call a factory of tensors on a device, or in pinned memory."""
        machine, pins = self._machine, bool(given.pop("pin_memory", False))
        index = machine.index_of(given.get("device"))
        if index is not None:
            given["device"] = "cpu"
        with machine.making_on(index):
            made = func(*args, **given)
            if index is not None and machine.home(made).device is None:  # of Python's numbers, unseen: a copy of them
                made = torch.empty_like(made).copy_(made)
        if pins:
            self._pinned(made)
        return made

    def _to(self, real: Handler, tensor: torch.Tensor, *args: Any, **given: Any) -> torch.Tensor:
        words = list(args)
        if words and isinstance(words[0], torch.Tensor):
            words[:1] = [words[0].device, words[0].dtype]
        device = given.pop("device", None)
        if words and isinstance(words[0], str | int | torch.device):
            device = words.pop(0)
        if device is None:
            return torch.Tensor.to(tensor, *words, **given)
        if not isinstance(device, int) and torch.device(device).type not in ("cpu", self._machine.kind):
            return torch.Tensor.to(tensor, device, *words, **given)  # without memory, or refused by torch
        dtype = given.get("dtype", words[0] if words else None) or tensor.dtype
        non_blocking, copy = (
            bool(given.get(name, words[place] if len(words) > place else False))
            for place, name in ((1, "non_blocking"), (2, "copy"))
        )
        index = self._machine.index_of(device)
        if index == self._index(tensor):
            return torch.Tensor.to(tensor, dtype, non_blocking, copy)
        moved = _Moved.apply(tensor, self._machine, index, non_blocking)
        assert isinstance(moved, torch.Tensor)
        return moved if moved.dtype == dtype else moved.to(dtype)

    def _pin_memory(self, real: Handler, tensor: torch.Tensor, *_: Any) -> torch.Tensor:
        if (index := self._index(tensor)) is not None:
            here = f"{self._machine.kind}:{index}"
            raise RuntimeError(f"cannot pin a tensor of {here}: only dense CPU tensors can be pinned")
        if self._machine.home(tensor).pinned:
            return tensor
        return self._pinned(tensor.detach().clone())

    def _pinned(self, tensor: torch.Tensor) -> torch.Tensor:
        home = self._machine.home(tensor)
        home.pinned = True
        self._machine.note(Pinned, home.number)
        return tensor

    def _record_stream(self, real: Handler, tensor: torch.Tensor, stream: Any) -> None:
        self._machine.note(Kept, self._machine.home(tensor).number, stream.timeline)

    def _register_hook(self, real: Handler, tensor: torch.Tensor, hook: Handler) -> Any:
        """Run hooks within `Faces`: torch runs a graph without any function mode."""

        def hooked(*args: Any) -> Any:
            with Faces(self._machine):
                return hook(*args)

        return real(tensor, hooked)

    def _numpy(self, real: Handler, tensor: torch.Tensor, *args: Any, **given: Any) -> Any:
        if (index := self._index(tensor)) is not None:
            raise TypeError(f"a tensor of {self._machine.kind}:{index} has no numpy array; take .cpu() first")
        return real(tensor, *args, **given)


class _Moved(torch.autograd.Function):
    """A copy on another device; its gradient goes back to the source's device."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, machine: Notes, index: int | None, non_blocking: bool) -> torch.Tensor:
        ctx.machine, ctx.back = machine, machine.home(tensor).device
        return moved(tensor, machine, index, non_blocking)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return moved(gradients[0], ctx.machine, ctx.back, False), None, None, None


def moved(tensor: torch.Tensor, machine: Notes, index: int | None, non_blocking: bool) -> torch.Tensor:
    with machine.making_on(index):
        made = torch.empty(tensor.shape, dtype=tensor.dtype)
    return made.copy_(tensor.detach(), non_blocking)


Issuing = Callable[[], AbstractContextManager[None]]  # inside, the calling thread sees the machine


class _Generator(torch.Generator):
    """The processor's generator, which reports a device of the machine as its own."""

    def __new__(cls, device: Any = "cpu") -> "_Generator":
        return super().__new__(cls, "cpu")  # type: ignore[call-arg]  # the device, in C

    def __init__(self, device: Any = "cpu") -> None:
        self._face = torch.device(device)

    @property
    def device(self) -> torch.device:  # type: ignore[override]  # a property here, an attribute there
        return self._face


class _Autocast(torch.autocast):
    """Autocast of the processor, whose kernels run, for a machine's devices."""

    def __init__(self, device_type: str, *args: Any, **given: Any) -> None:
        super().__init__("cpu" if device_type == now().kind else device_type, *args, **given)


def shown(machine: Notes, issuing: Issuing) -> Iterator[tuple[Any, str, Any]]:
    """The patches for a machine: object, attribute and new value."""
    yield torch, "Stream", MachineStream
    yield torch, "Event", MachineEvent
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
    # Tensors that autograd's formulas make are on the device of the outputs; it runs a graph without any function mode.
    yield torch.autograd, "_engine_run_backward", _within(machine.calling, torch.autograd._engine_run_backward)
    yield BackwardCFunction, "apply", _within(lambda context: Faces(machine), BackwardCFunction.apply)
    yield threading.Thread, "start", _started(machine, issuing, threading.Thread.start)
    yield threading.Thread, "join", _with_orders(threading.Thread.join, after=partial(_wait_for_end, machine))
    yield queue.Queue, "put", _with_orders(queue.Queue.put, before=lambda q: machine.signal(("queue", id(q))))
    yield queue.Queue, "get", _with_orders(queue.Queue.get, after=lambda q: machine.wait(("queue", id(q))))


def _of_kind(faces: Mapping[str, Any]) -> dict[str, Any]:
    """Further names of a device kind's own torch module; checkpointing and forked generators use them."""
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


def _within(enter: Callable[[Any], AbstractContextManager[Any]], call: Handler) -> Handler:
    """A call inside the context that `enter` makes of its first argument."""

    def within(first: Any, *args: Any, **given: Any) -> Any:
        with enter(first):
            return call(first, *args, **given)

    return within


def _started(
    machine: Notes, issuing: Issuing, start: Callable[[threading.Thread], None]
) -> Callable[[threading.Thread], None]:
    """`Thread.start` for threads that use the machine; their work is ordered after their starter's."""

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


def _wait_for_end(machine: Notes, thread: threading.Thread) -> None:
    if not thread.is_alive():
        machine.wait(("over", id(thread)))


def _with_orders(
    method: Handler, before: Handler = lambda subject: None, after: Handler = lambda subject: None
) -> Handler:
    """A method that also reports its order to a machine."""

    def reporting(subject: Any, *args: Any, **given: Any) -> Any:
        before(subject)
        found = method(subject, *args, **given)
        after(subject)
        return found

    return reporting


class Machine(Notes):
    """Devices for CPU tensors, as `Notes` describes them. Use it in a `with` block; one at a time."""

    def __enter__(self) -> Self:
        noting.append(self)
        self._stack = ExitStack()
        self._stack.callback(noting.remove, self)
        for target, name, value in shown(self, self._issuing):
            self._stack.enter_context(mock.patch.object(target, name, value, create=name == self.kind))
        self._stack.enter_context(listening(self))
        self._stack.enter_context(self._issuing())
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    @contextmanager
    def _issuing(self) -> Iterator[None]:
        """The calling thread sees the machine inside."""
        with Recorder(self), Faces(self):
            yield
