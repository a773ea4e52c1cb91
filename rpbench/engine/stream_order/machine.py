"""Machine: a simulated accelerator with some devices, for CPU tensors.

Every operation runs at once, on the processor, and is noted as if it were issued to a stream of a device. Inside
`with Machine(2) as machine:` torch shows two devices: `torch.accelerator`, `torch.Stream`, `torch.Event`,
`torch.Generator`, `torch.autocast`, a module of their kind, factories with `device=`, `Tensor.to`, `Tensor.device`,
pinned memory. Threads started inside see them too, and are ordered after the puts to a `queue.Queue` they get from.
Then `findings(machine.trace)` lists the races of the issued order, whatever the timing was.

Not modelled: kernels that read beyond their arguments; autograd's own thread, which on a device runs a backward on the
streams of its forward (here the caller runs it, on its stream); locks between threads.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Self
from unittest import mock

import torch

from rpbench.engine.host_order import listening
from rpbench.engine.stream_order.notes import Notes, noting
from rpbench.engine.stream_order.recorder import Recorder
from rpbench.engine.stream_order.shown import Faces, shown

KIND = "privateuseone"  # torch's name for an unknown kind of device, for which the code has no special case


class Machine(Notes):
    """Devices for CPU tensors. Use it in a `with` block; one at a time.

    Args:
        keep_calls: keep every operation for a replay in another order; nothing is freed then.
        memory_bytes: memory of a device; None: no limit.
        lost: device -> entries until it is lost; later ones raise torch's error.
        seed: of the order in which the lanes of a run take turns.

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
        self._stack.enter_context(listening(self))
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
