"""FSDP2: fully_shard with parameters, gradients and optimizer state on the host (CPUOffloadPolicy), over gloo.

Data parallel: rank r trains the microbatches r, r + p, ... of every step; FSDP averages gradients over the ranks, so
a loss divided by the microbatches of one rank gives the mean over the step.

Source: torch 2.13, torch.distributed.fsdp.fully_shard; Zhao et al., "PyTorch FSDP", VLDB'23.
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from baselines.systems.case import Case
from rpbench.engine.gradients import Tensors


class Fsdp2:
    """One rank of it.

    Raises:
        ValueError: if the microbatches cannot be dealt evenly.
    """

    def __init__(self, case: Case) -> None:
        self.case = case
        self.rank, self.num_ranks = dist.get_rank(), dist.get_world_size()
        if case.recompute not in ("all", "none"):
            raise ValueError(f"recompute={case.recompute!r}: all or none, because there are no stages")
        if case.num_microbatches % self.num_ranks:
            raise ValueError(
                f"num_microbatches={case.num_microbatches}: {self.num_ranks} ranks take an equal number each"
            )
        self.workload = case.workload()
        self.modules = set(range(len(self.workload.modules)))
        self.actions: list[tuple[str, int, int, float]] = []
        mesh = init_device_mesh("cpu", (self.num_ranks,))
        for module in self.workload.modules:
            fully_shard(module, mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))
        self._parameters = {
            (number, name): parameter
            for number, module in enumerate(self.workload.modules)
            for name, parameter in module.named_parameters()
        }
        self.optimizer = None
        if case.optimizer is not None:
            settings = case.settings()
            self.optimizer = torch.optim.AdamW(
                self._parameters.values(), lr=settings.learning_rate, weight_decay=settings.weight_decay
            )

    def prepare(self) -> None:
        """Nothing is laid out beforehand."""

    def train(self) -> None:
        """All steps."""
        for step in range(self.case.num_steps):
            for parameter in self._parameters.values():
                parameter.grad = None
            first = step * self.case.num_microbatches
            own = range(first, first + self.case.num_microbatches)[self.rank :: self.num_ranks]
            for microbatch in own:
                self._sync(microbatch == own[-1])
                (self._loss(microbatch) / len(own)).backward()
            if self.optimizer is not None:
                self.optimizer.step()

    def gradients(self) -> Tensors:
        """Those of the last step, gathered."""
        return {place: _whole(p.grad) for place, p in self._parameters.items() if p.grad is not None}

    def weights(self) -> Tensors:
        """As they are now, gathered."""
        return {place: _whole(parameter.detach()) for place, parameter in self._parameters.items()}

    def _loss(self, microbatch: int) -> torch.Tensor:
        x, labels = self.workload.batch(microbatch)
        *layers, head = self.workload.modules
        for layer in layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.case.recompute == "all" else layer(x)
        loss: torch.Tensor = head(x, labels)
        return loss

    def _sync(self, last: bool) -> None:
        """Reduce gradients after a step's last microbatch alone."""
        for module in self.workload.modules:
            assert isinstance(module, FSDPModule)
            module.set_requires_gradient_sync(last)


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
