"""Machine: torch's accelerator as it would be with some devices, for CPU tensors.

Every operation runs at once, on the processor, and is noted as if it were given to a stream of a device. Inside
`with Machine(2) as machine:` torch shows two devices: `torch.accelerator`, `torch.Stream`, `torch.Event`,
`torch.Generator`, `torch.autocast`, a module of their kind, factories with `device=`, `Tensor.to`, `Tensor.device`,
pinned memory. Threads that are started inside see them too, and come after what they take from a `queue.Queue`. Then
`findings(machine.trace)` says what may go wrong on a device: the races of the order that was issued, whatever the
timing was.

What it does not see: kernels that read beyond their arguments; the thread of autograd's engine, which on a device runs
a backward on the streams of its forward and is here the caller, on the caller's stream; locks between threads.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Self
from unittest import mock

import torch

from rpbench.engine.host_order import told
from rpbench.engine.stream_order.notes import Notes, noting
from rpbench.engine.stream_order.recorder import Recorder
from rpbench.engine.stream_order.replay import Replay
from rpbench.engine.stream_order.shown import Faces, shown

KIND = "privateuseone"  # what torch calls a device that it does not know: nothing can be in its code for it


class Machine(Notes):
    """Devices for CPU tensors. Use it in a `with` block; one at a time.

    Args:
        num_devices: how many.
        kind: what torch is to call them.
        keep_calls: keep every operation, to be run again in another order; nothing is freed then.
        memory_bytes: what a device has; None: no matter how much.
        lost: device -> how many entries it is good for; what is asked of it after that is torch's error.
        seed: of the order in which the lanes of a run go on, one at a time.

    Raises:
        ValueError: for fewer than one device, or a kind that this machine really has.
    """

    def __init__(
        self,
        num_devices: int,
        kind: str = KIND,
        *,
        keep_calls: bool = False,
        memory_bytes: int | None = None,
        lost: Mapping[int, int] | None = None,
        seed: int = 0,
    ) -> None:
        if num_devices < 1:
            raise ValueError(f"num_devices={num_devices}: a machine has at least one")
        here = torch.accelerator.current_accelerator()
        if here is not None and here.type == kind:
            raise ValueError(f"kind={kind}: this machine has real ones; leave it out to check the order alone")
        super().__init__(num_devices, kind, keeps_calls=keep_calls, memory_bytes=memory_bytes, lost=lost, seed=seed)
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        noting.append(self)
        self._stack.callback(noting.remove, self)
        for target, name, value in shown(self, self._issuing):
            self._stack.enter_context(mock.patch.object(target, name, value, create=name == self.kind))
        self._stack.enter_context(told(self))
        self._stack.enter_context(self._issuing())
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()
        self.close()

    @contextmanager
    def _issuing(self) -> Iterator[None]:
        """The calling thread sees the machine inside."""
        with Recorder(self), Faces(self):
            yield

    def replay(self) -> Replay:
        """What has been issued, to be done in other orders; the machine is closed by then."""
        return Replay(self.trace, self.calls, self.begun_with, self.storages)
