"""The mesh of a request, its machine, model and framework, and choices that do not go with one."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import prod
from typing import Any, get_args

from rpbench.config.choices import ConfigError
from rpbench.config.configuration import MeshConfig, OverlapConfig, RunConfig
from rpbench.config.errors import config_errors
from rpbench.cost.hardware.machine import Machine
from rpbench.mesh.layers.layer_seconds import Precision
from rpbench.mesh.layout import Mesh, Sharing
from rpbench.mesh.software import DEFAULT, Software, software
from rpbench.registry import entry, unknown_name
from rpbench.workload.architecture import Architecture

PRECISION = "bf16"
INNER = ("data", "tensor", "context")  # axes whose sizes make the group behind one rank of the schedule


@dataclass(frozen=True)
class MeshChoice:
    mesh: Mesh
    # with as many devices as the mesh; None for a pipeline on one host, which is no mesh unless `mesh.shard` is
    # given: then it is timed as in a search over meshes, with the sum of a tied matrix
    machine: Machine | None
    architecture: Architecture | None  # None without a shape
    software: Software
    precision: Precision
    counts_layers: bool  # whether seconds of layers are counted for this machine, instead of scaling those of `cost=`

    def plain(self) -> dict[str, Any]:
        found = asdict(self.mesh)
        sharing = found.pop("sharing")
        found |= {"shard": sharing["what"], "shard_group": sharing["group"], "reshard": sharing["reshard"]}
        found["order"] = list(found["order"])
        return found | {"framework": self.software.name, "precision": self.precision}


def mesh_of(config: MeshConfig, num_devices: int | None) -> Mesh:
    """The mesh of a configuration; its pipeline takes the devices that the other axes leave.

    `num_devices` are those of the whole mesh, None where sizes decide. Raises ConfigError for sizes whose product is
    another number, naming sizes that fit.
    """
    sizes = config.given("data", "tensor", "context", "expert", "expert_tensor")
    pipeline = config.pipeline
    if pipeline is None:
        inner = {name: sizes.get(name, 1) for name in INNER}
        group = prod(max(1, size) for size in inner.values())
        pipeline = _left(group, num_devices, " x ".join(f"{name} {size}" for name, size in inner.items()))
    given = {"what": config.shard, "group": config.shard_group, "reshard": config.reshard}
    with config_errors(""):
        sharing = Sharing(**{name: value for name, value in given.items() if value is not None})  # type: ignore[arg-type]
        more = config.given("sequence_parallel", "order")
        found = Mesh(pipeline=pipeline, sharing=sharing, **sizes, **more)
        if num_devices is not None:
            found.check_devices(num_devices)
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


def mesh_choice(config: RunConfig, cluster: Machine, model: Architecture | None, named: Software | None) -> MeshChoice:
    """The mesh of a run with machine, model and software, `named` or the default.

    Raises ValueError for an impossible mesh, or unknown links.
    """
    asked, num_devices = config.mesh, config.num_devices
    mesh = mesh_of(asked, cluster.num_devices if num_devices is None and asked.pipeline is None else num_devices)
    framework = _overlapping(named or software(DEFAULT), asked.overlap)
    precision = asked.precision or PRECISION
    if precision not in get_args(Precision):
        raise ConfigError(unknown_name("mesh.precision", precision, list(get_args(Precision))))
    counts = cluster.gpu is not None and config.cost.get("name") == "analytic"
    if precision != PRECISION and not counts:
        raise ConfigError(
            f"mesh.precision={precision} with cost={config.cost.get('name')} on cluster={cluster.name}: given times "
            "are of one precision; leave it out, or take cost=analytic and a cluster that names its devices"
        )
    if cluster.num_devices is not None and mesh.num_devices > cluster.num_devices:
        raise ConfigError(
            f"num_devices={mesh.num_devices}: cluster {cluster.name} has {cluster.num_devices}; ask for fewer, or give "
            "cluster.num_devices= and cluster.devices_per_node="
        )
    of_one_host = cluster.num_devices is None or mesh.num_devices <= cluster.node_devices
    is_pipeline = prod((mesh.data, mesh.tensor, mesh.context, mesh.expert)) == 1
    needs_no_mesh = is_pipeline and of_one_host and asked.shard is None and precision == PRECISION
    if not needs_no_mesh and cluster.gpu is None and cluster.ring_bytes_per_s is None:
        raise ConfigError(
            f"cluster={cluster.name} has no measured collectives, and a mesh is made of them: run python -m rpbench "
            "calibrate ranks=2 on it, or name its devices, as in cluster=8x_h100 or cluster.gpu=l40s"
        )
    machine = None if needs_no_mesh else cluster.with_devices(mesh.num_devices)
    refuse_frozen(model)
    if machine is not None:
        refuse_uneven(machine)
    if machine is not None and model is None:
        raise ConfigError("mesh: what collectives move follows from a model's shape; choose one, as in model=llama3_8b")
    return MeshChoice(mesh, machine, model, framework, precision, counts)  # type: ignore[arg-type]


def refuse_frozen(model: Architecture | None) -> None:
    """Refuse frozen layers, which are not modelled under a mesh."""
    if model is not None and model.frozen_layers:
        raise ConfigError(
            f"model {model.name}: frozen layers under a mesh are not modelled; take one host, or model.frozen_layers=0"
        )


def refuse_uneven(
    machine: Machine, where: str = "under a mesh", way_out: str = "one host and leave the mesh out"
) -> None:
    """Refuse devices of unequal speed, which are modelled for one pipeline alone."""
    if len(set(machine.device_speeds or ())) > 1:
        raise ConfigError(
            f"cluster.device_speeds={list(machine.device_speeds or ())} {where}, whose devices are alike: take null, "
            f"or {way_out}"
        )


def _overlapping(found: Software, asked: OverlapConfig) -> Software:
    traits = {
        "gradients_beside": asked.gradients,
        "parameters_beside": asked.parameters,
        "hidden_tensor": asked.tensor,
        "hidden_expert": asked.expert,
    }
    return replace(found, **{name: value for name, value in traits.items() if value is not None})  # type: ignore[arg-type]


RECOMPUTED = {"all": "full", "none": "none", "fitting": "fitting"}  # recompute= of a run -> recompute of a mesh


def counted_cost(given: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """The default cost of a run under a mesh, with the other keys `given`; ConfigError if `cost=unit` was chosen."""
    if "cost=unit" in overrides:
        raise ConfigError(
            "cost=unit under a mesh: its slots are no seconds, and the links of a machine take seconds; leave it out, "
            "or take cost=analytic or cost=constant"
        )
    return {**given, "name": "analytic"}


def check_meshed(config: RunConfig, chosen: MeshChoice) -> None:
    """Refuse choices that are not modelled under a mesh."""
    if chosen.machine is None:  # a pipeline on one host
        return
    _check_pipeline(config.schedule.get("name"))
    none, penalty = (None,), config.cost.get("split_penalty", 1.0)
    halves = "the framework's file in conf/software/ says what two halves of a backward cost; leave it out, or choose "
    for key, value, allowed, way_out in (
        ("schedule_file", config.schedule_file, none, "a registered schedule is built for its pipeline; use schedule="),
        ("tuning_budget", config.tuning_budget, none, "plans are searched by rpbench plan mesh=search"),
        ("recompute", config.recompute, RECOMPUTED, f"one of {', '.join(RECOMPUTED)}"),
        ("charge", config.charge, (None, "hops"), "its links say what boundary tensors take; leave charge out"),
        ("offload", config.offload, (None, "none"), "nothing is moved to hosts there; leave it out, or take one host"),
        ("cost.split_penalty", penalty, (1.0,), f"{halves}another software"),
    ):
        if value not in allowed:
            raise ConfigError(f"{key}={value} under a mesh: {way_out}")
    if config.cost.get("name") == "unit":
        raise ConfigError(
            "cost=unit under a mesh: its slots are no seconds, and links take seconds; take cost=analytic, or "
            "cost=constant"
        )


def _check_pipeline(name: str | None) -> None:
    """Refuse schedules whose ranks are replicas or shards of all layers: a mesh has no place for their exchanges."""
    if name is None:
        return
    own = entry(str(name))
    if own.whole_microbatches or own.tensor_parallel:
        what = "tensor shards" if own.tensor_parallel else "replicas"
        raise ConfigError(
            f"schedule={name} under a mesh: its ranks are {what} of all layers, and a mesh takes a pipeline's order; "
            "leave schedule= to such an order, 1f1b for one, with mesh.data, mesh.tensor and mesh.shard for the rest, "
            "or leave the mesh out, on one host"
        )
