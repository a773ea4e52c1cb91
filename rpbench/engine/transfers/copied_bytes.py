"""Traffic: the bytes that a run's transfers have really copied, by the device they were for and the link."""

from collections import Counter
from threading import Lock

import torch

from rpbench.engine.state.device_weights import Copy


class Traffic:
    """A `Copy` that counts.

    Attributes:
        moved_bytes: (device, lane) -> bytes copied to it over lanes h2d and net, and from it over d2h.
    """

    def __init__(self, copy: Copy) -> None:
        self.moved_bytes: Counter[tuple[int, str]] = Counter()
        self._copy, self._lock = copy, Lock()

    def __call__(self, tensor: torch.Tensor, device: int, lane: str, peer: int | None = None) -> torch.Tensor:
        copied = self._copy(tensor, device, lane, peer)
        with self._lock:
            self.moved_bytes[device, lane] += tensor.nbytes
        return copied
