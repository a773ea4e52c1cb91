"""Mesh: the groups of devices, their order, and the states they share.

A pipeline rank is a group of data x context x tensor devices that do the same at the same time. Experts are spread over
the devices of a pipeline rank, with `expert_tensor` shards each, so `expert` is no further factor of the device count.
"""

from dataclasses import dataclass, field
from math import prod
from typing import Literal, get_args

from rpbench.ir.partition import divisors
from rpbench.ir.schedule import Shape
from rpbench.workload.architecture import Architecture

AXES = ("data", "pipeline", "tensor", "context")
Axis = Literal["data", "pipeline", "tensor", "context"]
MEGATRON: tuple[Axis, ...] = ("tensor", "context", "data", "pipeline")  # innermost first
Sharded = Literal["none", "optimizer", "gradients", "parameters"]
SHARDED: tuple[Sharded, ...] = get_args(Sharded)


@dataclass(frozen=True)
class Sharing:
    """The states that replicas share."""

    what: Sharded = "optimizer"  # none (replicas), optimizer (ZeRO-1), gradients (ZeRO-2), parameters (ZeRO-3, FSDP)
    group: int = 0  # devices that share; 0 for all of data x context, fewer for hybrid sharding
    reshard: bool = True  # drop gathered parameters between forward and backward (FULL_SHARD), or not (SHARD_GRAD_OP)

    def __post_init__(self) -> None:
        if self.what not in SHARDED:
            raise ValueError(f"mesh.shard={self.what!r}: one of {', '.join(SHARDED)}")
        if type(self.group) is not int or self.group < 0:
            raise ValueError(f"mesh.shard_group={self.group!r}: devices that share, 0 for all replicas")


@dataclass(frozen=True)
class Mesh:
    """How devices are divided; ValueError for a size below 1, or sizes or options that contradict each other."""

    # data, pipeline, tensor, context: sizes; their product is the number of devices
    data: int = 1
    pipeline: int = 1
    tensor: int = 1
    context: int = 1
    expert: int = 1  # devices that the experts of a layer are spread over
    expert_tensor: int = 0  # shards of one expert; 0 for 1
    sequence_parallel: bool = False  # element-wise work between tensor-parallel products is cut as well
    sharing: Sharing = field(default_factory=Sharing)
    order: tuple[Axis, ...] = MEGATRON  # axes, innermost first

    def __post_init__(self) -> None:
        if not self.expert_tensor:
            object.__setattr__(self, "expert_tensor", 1)
        object.__setattr__(self, "order", tuple(self.order))
        for name in (*AXES, "expert", "expert_tensor"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ValueError(f"mesh.{name}={value!r}: a size is a whole number of at least 1")
        twice = sorted({axis for axis in self.order if self.order.count(axis) > 1})
        if twice:
            raise ValueError(f"mesh.order={list(self.order)} names {twice[0]} twice: each of {', '.join(AXES)} once")
        if sorted(self.order) != sorted(AXES):
            raise ValueError(f"mesh.order={list(self.order)}: each of {', '.join(AXES)} once, innermost first")
        if self.sequence_parallel and self.tensor == 1:
            raise ValueError(
                "mesh.sequence_parallel=true with mesh.tensor=1: it cuts what tensor parallelism leaves whole; "
                "take sequence_parallel=false or tensor > 1"
            )
        members = self.data * self.context * self.tensor
        if members % (self.expert * self.expert_tensor):
            raise ValueError(
                f"mesh.expert={self.expert} x expert_tensor={self.expert_tensor} does not divide the {members} devices "
                f"of a pipeline rank (data x context x tensor); expert may be one of "
                f"{_divisors(max(1, members // self.expert_tensor))}"
            )
        group = self.sharing.group
        if group and self.replicas % group:
            raise ValueError(
                f"mesh.shard_group={group} does not divide the {self.replicas} replicas (data x context); "
                f"take one of {_divisors(self.replicas)}"
            )

    @property
    def num_devices(self) -> int:
        return prod(getattr(self, axis) for axis in AXES)

    @property
    def replicas(self) -> int:
        """Devices with the same dense parameters if nothing is sharded."""
        return self.data * self.context

    @property
    def expert_replicas(self) -> int:
        """Devices with the same expert parameters if nothing is sharded."""
        return self.replicas * self.tensor // (self.expert * self.expert_tensor)

    @property
    def shard_group(self) -> int:
        """Devices that share dense states."""
        return 1 if self.sharing.what == "none" else (self.sharing.group or self.replicas)

    @property
    def expert_shard_group(self) -> int:
        """Devices that share expert states."""
        return 1 if self.sharing.what == "none" else max(1, min(self.shard_group, self.expert_replicas))

    def stride(self, axis: Axis) -> int:
        """Distance of neighbours along an axis, in devices."""
        return prod(getattr(self, other) for other in self.order[: self.order.index(axis)])

    def check_devices(self, num_devices: int) -> None:
        """Raise ValueError unless the mesh has that many devices."""
        if self.num_devices != num_devices:
            sizes = " x ".join(f"{axis} {getattr(self, axis)}" for axis in AXES)
            rest = num_devices * self.data // self.num_devices if num_devices * self.data % self.num_devices == 0 else 0
            way_out = f"take data={rest}" if rest else f"change the sizes to multiply to {num_devices}"
            raise ValueError(f"mesh {sizes} = {self.num_devices} devices, the cluster has {num_devices}; {way_out}")

    def check_model(self, heads: int, key_value_heads: int, experts: int, num_layers: int) -> None:
        """Raise ValueError, with the possible sizes, if a model cannot be cut like this."""
        _check_heads(f"mesh.tensor={self.tensor}", self.tensor, heads, key_value_heads)
        if experts % self.expert:
            raise ValueError(
                f"mesh.expert={self.expert} does not divide {experts} experts; take one of {_divisors(experts)}"
            )
        if self.pipeline > num_layers:
            raise ValueError(f"mesh.pipeline={self.pipeline}: {num_layers} layers make at most {num_layers} stages")


def check_shards(shape: Shape, model: Architecture) -> None:
    """Raise ValueError, with a way out, if a schedule cuts heads or sequences that do not divide, or 4-bit weights."""
    if shape.tensor_parallel:
        where = f"tensor shards on num_devices={shape.num_ranks}"
        if model.training_mode == "qlora" and shape.num_ranks > 1:
            raise ValueError(f"{where} with training_mode=qlora: blocks of 4 bits are not cut; take training_mode=lora")
        _check_heads(where, shape.num_ranks, model.heads, model.key_value_heads)
        shape.check_length(model.seq_len)


def _check_heads(where: str, tensor: int, heads: int, key_value_heads: int) -> None:
    if heads % tensor:
        rule = "more tensor shards than heads" if tensor > heads else "heads that do not divide"
        raise ValueError(f"{where} of {heads} heads: {rule}; take one of {_divisors(heads)}")
    if max(key_value_heads, tensor) % min(key_value_heads, tensor):
        raise ValueError(
            f"{where}: {key_value_heads} heads of keys can be neither cut nor copied evenly; "
            f"take one of {_divisors(key_value_heads)}"
        )


def _divisors(number: int) -> str:
    return ", ".join(map(str, divisors(number)[:16]))
