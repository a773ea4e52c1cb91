"""Groups: which processes talk to each other: along the pipeline, across copies of a stage, and all of them.

Ranks are numbered pipeline rank first: with two data-parallel ranks, processes 0 and 1 are pipeline rank 0.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from rpbench.engine.state.gradients import Tensors
from rpbench.torch_runtime.request import TorchRequest

_meshes: dict[tuple[str, int, str, int], DeviceMesh] = {}
_pairs: dict[int, list[Any]] = {}


class Groups:
    """The groups of a request on the processes there are.

    Raises:
        ValueError: if there are not as many processes as the request has ranks, or they have different requests.
    """

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
        """The group of the ranks that hold the same stages, if there are two of each."""
        if self.request.data_parallel > 1:
            return self.inner.get_group() if self.request.data_mode == "plain" else None
        if len(self.request.lowered.chains.routes) == 1:
            return None
        if self.world not in _pairs:  # made by all ranks together, once
            last = self.world - 1
            _pairs[self.world] = [dist.new_group([rank, last - rank]) for rank in range(self.world // 2)]
        return _pairs[self.world][min(self.pipeline_rank, self.world - 1 - self.pipeline_rank)]

    def add_up(self, parameters: Tensors) -> None:
        """Sum gradients over copies of the stages, where nothing else has; a parameter without one counts as zeros."""
        if self._pair is None:
            return
        for parameter in parameters.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad = parameter.grad.contiguous()
            dist.all_reduce(parameter.grad, group=self._pair)

    def barrier(self) -> None:
        """All processes meet."""
        dist.barrier()

    def check_same(self, digest: str) -> None:
        """All ranks have one table and one request, or none of them starts.

        Raises:
            ValueError: naming the ranks that differ; every rank raises it.
        """
        digests: list[Any] = [None] * self.world
        dist.all_gather_object(digests, digest)
        other = [rank for rank, found in enumerate(digests) if found != digests[0]]
        if other:
            raise ValueError(
                f"rank {other[0]} has another table or request than rank 0 ({str(digests[other[0]])[:8]} and "
                f"{str(digests[0])[:8]}): start all ranks with the same command and the same version"
            )
