"""Shards: a stage's module under FSDP2, replicate or tensor parallelism, and the process groups that they need.

Processes are numbered by pipeline rank: with two data-parallel ranks, processes 0 and 1 are pipeline rank 0.

FSDP2 keeps its weights gathered for a whole step: where backward comes as I and W, resharding in between loses weight
gradients without an error. Tensor parallelism cuts queries, keys, values and the first matrices of the MLP by outputs,
the others by inputs, so that tensors between stages are whole.

Source: torch 2.13, `fully_shard`, `replicate_with_fsdp`, `parallelize_module`; Shoeybi et al., "Megatron-LM",
arXiv 1909.08053, section 3.

Collectives are timed from a barrier on, on the slowest rank.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from rpbench.cost.hardware.collective_rates import COLLECTIVES
from rpbench.engine.state.gradients import Tensors
from rpbench.models.layers import DecoderLayer, Mlp
from rpbench.models.linear import Linear
from rpbench.torch_runtime.processes.diagnosis import Phase, Place
from rpbench.torch_runtime.request import TorchRequest
from rpbench.torch_runtime.stages import StageModule

SIZES = tuple(2**power for power in range(12, 25, 2))  # bytes: 4 KiB to 16 MiB
REPEATS = 9
WARM_UPS = 3
STALL_S = 25.0  # no collective of these sizes takes so long; starting and ending come on top


@dataclass(frozen=True)
class CollectiveRequest:
    """Collectives to be timed: their sizes in bytes, on "cpu" or torch's device type."""

    num_ranks: int
    sizes: tuple[int, ...] = SIZES
    repeats: int = REPEATS
    device: str = "cpu"

    def check(self) -> None:
        """Raise ValueError for a request that cannot run."""
        if self.num_ranks < 2:
            raise ValueError(f"ranks={self.num_ranks}: a collective needs at least 2")
        num = torch.accelerator.device_count()
        if self.device != "cpu" and num < self.num_ranks:
            raise ValueError(f"ranks={self.num_ranks}: torch finds {num} accelerators, and each rank needs one")
        if self.repeats < 1 or len(self.sizes) < 2 or min(self.sizes) < 4 * self.num_ranks:
            raise ValueError(f"sizes={self.sizes}: at least two, each of a value of 4 bytes for every rank")


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


# --- groups of processes --------------------------------------------------------------------------------------------

_meshes: dict[tuple[str, int, str, int], DeviceMesh] = {}
_pairs: dict[int, list[Any]] = {}


class Groups:
    """The process groups of a request; ValueError if the number of processes is wrong, or one has another request."""

    def __init__(self, request: TorchRequest) -> None:
        self.request, self.world = request, dist.get_world_size()
        self.check_same(request.digest)
        if self.world != request.num_ranks:
            sizes = f"{request.num_pipeline_ranks} pipeline ranks"
            for name in ("data_parallel", "tensor_parallel"):
                sizes += f" x {name}={getattr(request, name)}" if getattr(request, name) > 1 else ""
            raise ValueError(
                f"{self.world} processes for {sizes}: start {request.num_ranks} of them, as torchrun's nnodes times "
                "nproc-per-node, or take a schedule of as many ranks"
            )
        inner = request.ranks_each
        self.pipeline_rank, self.inner_rank = divmod(dist.get_rank(), inner)
        self.data_rank = self.inner_rank if request.data_parallel > 1 else 0
        self.mesh = self._mesh(inner) if inner > 1 else None
        self.pipeline = self.mesh["pp"].get_group() if self.mesh is not None else None
        self._pair = self._copies()

    @property
    def inner(self) -> DeviceMesh:
        """The data- or tensor-parallel ranks of this pipeline rank."""
        assert self.mesh is not None
        return self.mesh["dp" if self.request.data_parallel > 1 else "tp"]

    def _mesh(self, inner: int) -> DeviceMesh:
        name = "dp" if self.request.data_parallel > 1 else "tp"
        key = (self.request.device, self.request.num_pipeline_ranks, name, inner)
        if key not in _meshes:
            sizes = (self.request.num_pipeline_ranks, inner)
            _meshes[key] = init_device_mesh(self.request.device, sizes, mesh_dim_names=("pp", name))
        return _meshes[key]

    def _copies(self) -> Any:
        """The group of the ranks that hold copies of the same stages; None without copies."""
        if self.request.data_parallel > 1:
            return self.inner.get_group() if self.request.data_mode == "plain" else None
        if len(self.request.lowered.chains.routes) == 1:
            return None
        if self.world not in _pairs:  # made by all ranks together, once
            last = self.world - 1
            _pairs[self.world] = [dist.new_group([rank, last - rank]) for rank in range(self.world // 2)]
        return _pairs[self.world][min(self.pipeline_rank, self.world - 1 - self.pipeline_rank)]

    def add_up(self, parameters: Tensors) -> None:
        """Sum gradients over copies of the stages, unless FSDP does; a missing gradient counts as zeros."""
        if self._pair is None:
            return
        for parameter in parameters.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad = parameter.grad.contiguous()
            dist.all_reduce(parameter.grad, group=self._pair)

    def check_same(self, digest: str) -> None:
        """Raise ValueError on all ranks if one has another table or request."""
        digests: list[Any] = [None] * self.world
        dist.all_gather_object(digests, digest)
        other = [rank for rank, found in enumerate(digests) if found != digests[0]]
        if other:
            raise ValueError(
                f"rank {other[0]} has another table or request than rank 0 ({str(digests[other[0]])[:8]} and "
                f"{str(digests[0])[:8]}): start all ranks with the same command and the same version"
            )


# --- shards of stages -----------------------------------------------------------------------------------------------

BY_OUTPUTS = ("attention.q", "attention.k", "attention.v", "mlp.gate", "mlp.up")
BY_INPUTS = ("attention.o", "mlp.down")


def wrapper(request: TorchRequest, groups: Groups) -> Callable[[nn.Module], nn.Module] | None:
    """The function that shards a stage's module; None where modules stay whole."""
    by_mode = {"fsdp2": shard_weights, "replicate": replicate_weights} if request.data_parallel > 1 else {}
    shard = shard_matrices if request.tensor_parallel > 1 else by_mode.get(request.data_mode)
    return None if shard is None else partial(shard, mesh=groups.inner)


def shard_weights(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """FSDP2 on every layer and on the stage, gathered until the step is over."""
    from torch.distributed.fsdp import fully_shard  # a second to import, and most runs have no shards

    assert isinstance(module, StageModule)
    for layer in module.layers.values():
        fully_shard(layer, mesh=mesh, reshard_after_forward=False)
    return fully_shard(module, mesh=mesh, reshard_after_forward=False)  # type: ignore[return-value]


def replicate_weights(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """torch's data parallelism on FSDP's machinery, reduced at REDUCE_GRAD; ValueError if torch lacks it."""
    try:
        from torch.distributed._composable.replicate_with_fsdp import replicate
    except ImportError as error:
        raise ValueError(f"data_mode=replicate: this torch lacks it ({error}); use data_mode=fsdp2 or plain") from None
    return replicate(module, mesh=mesh)  # type: ignore[return-value]


def shard_matrices(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Tensor parallelism on every decoder layer; embedding, norms and head stay whole on each rank.

    ValueError for layers that torch's styles cannot cut, or heads that do not divide evenly.
    """
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    assert isinstance(module, StageModule)
    for layer in module.layers.values():
        if isinstance(layer, DecoderLayer):
            _check_layer(layer, mesh.size())
            names = replace_matrices(layer, lambda name, ours: _as_torch_linear(ours))
            style = {name: ColwiseParallel() if name in BY_OUTPUTS else RowwiseParallel() for name in names}
            parallelize_module(layer, mesh, dict[str, Any](style))
    return module


def replace_matrices(layer: nn.Module, make: Callable[[str, Linear], nn.Module]) -> list[str]:
    """Replace every matrix of a decoder layer by what `make` returns for its name and itself; the names."""
    found = []
    for name in (*BY_OUTPUTS, *BY_INPUTS):
        parent, _, child = name.rpartition(".")
        holder = layer.get_submodule(parent)
        if (ours := getattr(holder, child)) is not None:
            setattr(holder, child, make(name, ours))
            found.append(name)
    return found


def _check_layer(layer: DecoderLayer, num_ranks: int) -> None:
    attention = layer.attention
    if not isinstance(layer.mlp, Mlp) or attention.sinks is not None or attention.q_norm is not None:
        raise ValueError(
            "tensor_parallel cuts dense layers; experts, attention sinks and norms of queries have no style in torch: "
            "set tensor_parallel=1 or take another model"
        )
    heads = [linear.weight.shape[0] // attention.head_dim for linear in (attention.q, attention.k)]
    if any(count % num_ranks for count in heads):
        raise ValueError(
            f"tensor_parallel={num_ranks}: {heads[0]} heads and {heads[1]} key heads cannot be dealt evenly; take a "
            "number that divides both"
        )
    if any(isinstance(part, Linear) and part.adapter is not None for part in layer.modules()):
        raise ValueError("tensor_parallel: adapters have no style in torch; use model.training_mode=full")


def _as_torch_linear(ours: Linear) -> nn.Linear:
    """An `nn.Linear` with the same parameters: torch's styles take no other."""
    outputs, inputs = ours.weight.shape
    theirs = nn.Linear(inputs, outputs, bias=ours.bias is not None, device="meta")
    theirs.weight = ours.weight
    if ours.bias is not None:
        theirs.bias = ours.bias
    return theirs


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a DTensor, found without importing that class."""
    return hasattr(tensor, "full_tensor")


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The full tensor of a sharded one, a collective; other tensors as they are."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]
