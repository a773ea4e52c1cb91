"""Paced copies: transfers of the cpu backend that take as long as on the modelled links."""

import threading
from typing import Self

import torch

from rpbench.cost.hardware.machine import Machine
from rpbench.engine.transfers.link import Link


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
