"""Mesh configuration: the keys under `mesh`, and what Hydra is offered for runs that have one."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rpbench.config.choices import ConfigError
from rpbench.cost.hardware.machine import devices_named
from rpbench.places import file_of


@dataclass
class OverlapConfig:
    """What hides behind computation; None: as the framework's file in `conf/software/` says."""

    gradients: bool | None = None  # sums over replicas run beside backwards
    parameters: bool | None = None  # gathers over replicas run beside forwards
    tensor: float | None = None  # share of tensor-parallel collectives that is hidden
    expert: float | None = None  # share of the exchange between experts that is hidden

    def __post_init__(self) -> None:
        for name in ("tensor", "expert"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 1:
                raise ConfigError(f"mesh.overlap.{name}={value}: a share, from 0 (nothing is hidden) to 1 (all is)")


@dataclass
class MeshConfig:
    """The keys under `mesh`; `conf/config.yaml` explains them. All None: the run has no mesh."""

    data: int | None = None
    pipeline: int | None = None
    tensor: int | None = None
    context: int | None = None
    expert: int | None = None
    expert_tensor: int | None = None
    sequence_parallel: bool | None = None
    shard: str | None = None
    shard_group: int | None = None
    reshard: bool | None = None
    order: list[str] | None = None
    overlap: OverlapConfig = field(default_factory=OverlapConfig)
    framework: str | None = None
    precision: str | None = None

    @property
    def is_given(self) -> bool:
        """Whether a run has a mesh: one of the keys is set."""
        return self != MeshConfig()

    def given(self, *names: str) -> dict[str, Any]:
        """Those of these keys that are set."""
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}


def machines_named(overrides: Sequence[str]) -> list[tuple[str, dict[str, Any]]]:
    """(name, keys) of the machines that overrides describe; an option of group `cluster` comes first."""
    found = []
    for item in overrides:
        group, _, value = item.partition("=")
        if group == "cluster":
            others = (name for name in value.split(",") if file_of(group, name) is None)
            found += [(name, keys) for name in others if (keys := devices_named(name)) is not None]
    return found
