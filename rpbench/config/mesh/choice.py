"""Mesh choice: the mesh a run is asked for, with the machine, the architecture and the framework it stands on."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from math import prod
from typing import Any, get_args

from rpbench.config.choices import ConfigError
from rpbench.config.configuration import as_plain
from rpbench.config.mesh.overrides import SEQ_LEN, MeshConfig, OverlapConfig, is_architecture, is_machine
from rpbench.cost.hardware import Cluster
from rpbench.cost.model import Model
from rpbench.mesh.architecture import Architecture, from_mapping, from_model
from rpbench.mesh.gpu import gpu
from rpbench.mesh.layer_seconds import Precision
from rpbench.mesh.layout import Mesh, Sharing
from rpbench.mesh.machine import Machine
from rpbench.mesh.measured_machine import measured_machine
from rpbench.mesh.software import Software, software
from rpbench.registry import unknown_name

FRAMEWORK = "megatron_core"  # whose kernels and overlap stand for a run that names none
PRECISION = "bf16"
INNER = ("data", "tensor", "context")  # axes whose sizes make the group behind one rank of the schedule


@dataclass(frozen=True)
class MeshChoice:
    """A mesh as it was chosen.

    Args:
        machine: as many devices as the mesh has; None for a mesh of ones on a cluster without levels, which is today's
            run.
        architecture: of the model; None for a model without a shape.
        seq_len: tokens of a sequence.
        counts_layers: whether the seconds of layers are counted for this machine, and not those of `cost=` scaled.
    """

    mesh: Mesh
    machine: Machine | None
    architecture: Architecture | None
    software: Software
    precision: Precision
    seq_len: int
    counts_layers: bool

    def figures(self) -> dict[str, Any]:
        """What the names of the device and the framework stand for, as a part of what is measured."""
        found: dict[str, Any] = {"framework": as_plain(self.software)}
        return found | ({"gpu": as_plain(self.machine.gpu)} if self.machine else {})

    def plain(self) -> dict[str, Any]:
        """Sizes and choices of the mesh, JSON-ready."""
        found = asdict(self.mesh)
        sharing = found.pop("sharing")
        found |= {"shard": sharing["what"], "shard_group": sharing["group"], "reshard": sharing["reshard"]}
        found["order"] = list(found["order"])
        return found | {"framework": self.software.name, "precision": self.precision}


def mesh_of(config: MeshConfig, num_devices: int | None) -> Mesh:
    """The mesh of a configuration; its pipeline takes the devices that the other axes leave.

    Args:
        num_devices: of the whole mesh; None where only its sizes say.

    Raises:
        ConfigError: for sizes that do not multiply to the devices, with those that do.
    """
    sizes = config.given("data", "tensor", "context", "expert", "expert_tensor")
    pipeline = config.pipeline
    if pipeline is None:
        inner = {name: sizes.get(name, 1) for name in INNER}
        group = prod(max(1, size) for size in inner.values())
        pipeline = _left(group, num_devices, " x ".join(f"{name} {size}" for name, size in inner.items()))
    given = {"what": config.shard, "group": config.shard_group, "reshard": config.reshard}
    try:
        sharing = Sharing(**{name: value for name, value in given.items() if value is not None})  # type: ignore[arg-type]
        more = config.given("sequence_parallel", "order")
        found = Mesh(pipeline=pipeline, sharing=sharing, **sizes, **more)
        if num_devices is not None:
            found.check_devices(num_devices)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return found


def _left(group: int, num_devices: int | None, said: str) -> int:
    if num_devices is None:
        raise ConfigError(
            f"mesh: {said} say nothing of the pipeline; give mesh.pipeline=, or num_devices= of the whole mesh, a "
            f"multiple of {group}"
        )
    found, rest = divmod(num_devices, group)
    if rest or not found:
        near = f"are {found * group} and {(found + 1) * group}" if found else f"is {group}"
        raise ConfigError(f"num_devices={num_devices}: mesh {said} takes multiples of {group}; the nearest {near}")
    return found


def machine_of(cluster: Mapping[str, Any], num_devices: int) -> Machine:
    """The machine of a cluster's keys, with as many devices as a mesh has.

    Raises:
        ValueError: for an unknown key or device, a rate of 0, or devices that do not fill nodes.
    """
    known = {each.name for each in fields(Machine)}
    for key in cluster:
        if key not in known:
            raise ConfigError(unknown_name("key of a machine", str(key), sorted(known)))
    return Machine(**{**cluster, "gpu": gpu(str(cluster["gpu"]))}).with_devices(num_devices)


def mesh_choice(
    config: MeshConfig,
    num_devices: int | None,
    cluster: Cluster,
    values: Mapping[str, Mapping[str, Any]],
    model: Model | None,
    cost: str,
) -> MeshChoice:
    """What a run under a mesh stands on.

    Args:
        num_devices: as asked for.
        cluster: the host, where it is one without levels.
        values: the keys of groups `cluster` and `model` as composed.
        cost: the chosen source of seconds.

    Raises:
        ValueError: for whatever in the mesh cannot be, or a cluster whose links nobody knows.
    """
    mesh = mesh_of(config, cluster.num_devices if num_devices is None and config.pipeline is None else num_devices)
    framework = _overlapping(software(config.framework or FRAMEWORK), config.overlap)
    precision = config.precision or PRECISION
    if precision not in get_args(Precision):
        raise ConfigError(unknown_name("mesh.precision", precision, list(get_args(Precision))))
    levels = is_machine(values["cluster"])
    machine = machine_of(values["cluster"], mesh.num_devices) if levels else None
    if machine is None and prod((mesh.data, mesh.tensor, mesh.context, mesh.expert)) > 1:
        machine = measured_machine(cluster).with_devices(mesh.num_devices)
    architecture, seq_len = _architecture(values["model"], model)
    if machine is not None and architecture is None:
        raise ConfigError("mesh: what collectives move follows from a model's shape; choose one, as in model=llama3_8b")
    counts = levels and cost == "analytic"
    return MeshChoice(mesh, machine, architecture, framework, precision, seq_len, counts)  # type: ignore[arg-type]


def _architecture(values: Mapping[str, Any], model: Model | None) -> tuple[Architecture | None, int]:
    if is_architecture(values):
        sizes = {key: value for key, value in values.items() if key != "seq_len"}
        return from_mapping(sizes), int(values.get("seq_len", SEQ_LEN))
    return (None, 0) if model is None else (from_model(model), model.seq_len)


def _overlapping(found: Software, asked: OverlapConfig) -> Software:
    """The framework with what is said of overlap."""
    traits = {
        "gradients_beside": asked.gradients,
        "parameters_beside": asked.parameters,
        "hidden_tensor": asked.tensor,
        "hidden_expert": asked.expert,
    }
    return replace(found, **{name: value for name, value in traits.items() if value is not None})  # type: ignore[arg-type]
