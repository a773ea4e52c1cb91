"""FSDP2: fully_shard, on accelerators or over gloo, in three ways that some of our methods have too.

    reshard      weights are gathered for every forward and backward and dropped after it: ZeRO-3
    no_reshard   they stay gathered from a forward to its backward: ZeRO-2
    offload      as reshard, with parameters, gradients and optimizer state on the host (CPUOffloadPolicy)

Data parallel: rank r trains the microbatches r, r + p, ... of every step. FSDP averages gradients over the ranks, so a
loss divided by the number of microbatches of one rank gives the mean over the step. Gradients are scattered after every
backward; with offload, which adds them up on the device, once a step. With a 16-bit type, shards of weights and
gradients are float32 and gathered weights 16-bit.

Source: torch 2.13, torch.distributed.fsdp.fully_shard; Zhao et al., "PyTorch FSDP", VLDB'23.
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from baselines.systems.case import Case, Method, System
from rpbench.engine.state.gradients import Tensors

# `schedule` of a case -> our method with the same transfers.
METHODS = {
    "reshard": Method("zero_3", {}),
    "no_reshard": Method("zero_2", {}),
    "offload": Method("zero_3", {"offload": True, "reduce_each_microbatch": False}),
}


class Fsdp2(System):
    """One rank; ValueError for an unknown way, or microbatches that cannot be dealt evenly."""

    def __init__(self, case: Case) -> None:
        self.rank, self.num_ranks = dist.get_rank(), dist.get_world_size()
        case.check_replicas("FSDP2", METHODS, self.num_ranks)
        super().__init__(case)
        self.ours = METHODS[case.schedule]
        self._offloads = case.schedule == "offload"
        mesh = init_device_mesh(case.device, (self.num_ranks,))
        policy = CPUOffloadPolicy(pin_memory=case.device != "cpu") if self._offloads else OffloadPolicy()
        dtype, precision = getattr(torch, case.dtype), MixedPrecisionPolicy()
        if dtype.itemsize == 2:
            precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        for module in self.workload.modules:
            fully_shard(
                module.float() if dtype.itemsize == 2 else module,
                mesh=mesh,
                reshard_after_forward=case.schedule != "no_reshard",
                mp_policy=precision,
                offload_policy=policy,
            )
        self.optimizer = None if case.optimizer is None else case.make_adamw(self.parameters.values())

    def train(self) -> None:
        for step in range(self.case.num_steps):
            for parameter in self.parameters.values():
                parameter.grad = None
            own = self.case.microbatches(step)[self.rank :: self.num_ranks]
            self.losses.append(0.0)
            for microbatch in own:
                self._sync(not self._offloads or microbatch == own[-1])
                loss = self._loss(microbatch) / len(own)
                loss.backward()
                self.losses[-1] += float(loss.detach())
            if self.optimizer is not None:
                self.optimizer.step()

    def gradients(self) -> Tensors:
        return {place: _whole(p.grad) for place, p in self.parameters.items() if p.grad is not None}

    def weights(self) -> Tensors:
        return {place: _whole(parameter.detach()) for place, parameter in self.parameters.items()}

    def _loss(self, microbatch: int) -> torch.Tensor:
        x, labels = (each.to(self.case.device) for each in self.workload.batch(microbatch))
        *layers, head = self.workload.modules
        for layer in layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.case.recompute == "all" else layer(x)
        loss: torch.Tensor = head(x, labels)
        return loss

    def _sync(self, reduces: bool) -> None:
        """Say whether the next backward scatters gradients."""
        for module in self.workload.modules:
            assert isinstance(module, FSDPModule)
            module.set_requires_gradient_sync(reduces)


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
