"""Collectives: their seconds on the ranks of a run, by size; gloo between cores, an accelerator's own
library between accelerators.

All ranks begin a collective together (a barrier), and it has taken as long as it took the slowest of them.
"""

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist

from rpbench.cost.hardware.collective_rates import COLLECTIVES
from rpbench.torch_runtime.processes.board import Phase, Place

SIZES = tuple(2**power for power in range(12, 25, 2))  # bytes: 4 KiB to 16 MiB
REPEATS = 9
WARM_UPS = 3
STALL_S = 25.0  # no collective of these sizes takes so long; starting and ending come on top
MARK = '{"collectives"'


@dataclass(frozen=True)
class CollectiveRequest:
    """Collectives to be timed.

    Args:
        num_ranks: processes that take part.
        sizes: bytes of the tensors, rounded down to whole values for every rank.
        device: cpu, or what torch calls this machine's accelerators: cuda, xpu, ...
    """

    num_ranks: int
    sizes: tuple[int, ...] = SIZES
    repeats: int = REPEATS
    device: str = "cpu"

    def check(self) -> None:
        """Refuse what cannot be.

        Raises:
            ValueError: value, rule and way out.
        """
        if self.num_ranks < 2:
            raise ValueError(f"ranks={self.num_ranks}: a collective needs at least 2")
        num = torch.accelerator.device_count()
        if self.device != "cpu" and num < self.num_ranks:
            raise ValueError(f"ranks={self.num_ranks}: torch finds {num} accelerators, and each rank needs one")
        if self.repeats < 1 or len(self.sizes) < 2 or min(self.sizes) < 4 * self.num_ranks:
            raise ValueError(f"sizes={self.sizes}: at least two, each of a value of 4 bytes for every rank")

    def to_json(self) -> str:
        """One line."""
        return json.dumps({"collectives": asdict(self)}, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> "CollectiveRequest":
        """The request `to_json` wrote."""
        values = json.loads(text)["collectives"]
        return cls(**{**values, "sizes": tuple(values["sizes"])})


def run_collectives(request: CollectiveRequest, place: Place) -> dict[str, Any] | None:
    """Seconds of every collective and size, repeat by repeat: rank 0's answer, None on the others."""
    device = torch.device(request.device, 0 if request.device == "cpu" else torch.accelerator.current_device_index())
    seconds: dict[str, dict[str, list[float]]] = {name: {} for name in COLLECTIVES}
    position = 0
    for name in COLLECTIVES:
        for size in request.sizes:
            place.write(Phase.COMPUTING, position, 0)
            sent, found = timed(name, size, request.repeats, device)
            seconds[name][str(sent)] = found
            position += 1
    place.write(Phase.BETWEEN)
    return {"backend": dist.get_backend(), "seconds": seconds} if dist.get_rank() == 0 else None


def timed(name: str, size: int, repeats: int, device: torch.device) -> tuple[int, list[float]]:
    """Bytes of the tensor, and the seconds of each repeat on the slowest rank."""
    ranks = dist.get_world_size()
    whole = torch.zeros(size // 4 // ranks * ranks, device=device)
    call = _call(name, whole, ranks)
    own = []
    for number in range(WARM_UPS + repeats):
        dist.barrier()
        _settle(device)
        began = time.perf_counter()
        call()
        _settle(device)
        if number >= WARM_UPS:
            own.append(time.perf_counter() - began)
    slowest = torch.tensor(own, dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return whole.numel() * 4, slowest.tolist()


def _call(name: str, whole: torch.Tensor, ranks: int) -> Callable[[], object]:
    part = torch.zeros(whole.numel() // ranks, device=whole.device)
    if name == "all_reduce":
        return lambda: dist.all_reduce(whole)
    if name == "all_gather":
        return lambda: dist.all_gather_into_tensor(whole, part)
    if name == "reduce_scatter":
        return lambda: dist.reduce_scatter_tensor(part, whole)
    received = torch.zeros_like(whole)
    return lambda: dist.all_to_all_single(received, whole)


def _settle(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
