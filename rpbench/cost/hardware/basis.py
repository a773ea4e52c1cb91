"""Basis: the numbers behind a prediction, a cluster's figures and the constants in `conf/software/`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from math import inf
from typing import Any

from rpbench.cost.hardware.declared import Declared, declarations
from rpbench.cost.hardware.device import CONF, read
from rpbench.cost.hardware.machine import COLLECTIVE_SHARE, NUMBERS, Machine
from rpbench.cost.hardware.measured import MEASURED
from rpbench.untrusted import is_finite

COUNTED = ("roundpipe", "deepspeed", "fsdp", "megatron_counted", "mobius")  # files of conf/software/ with numbers


@dataclass(frozen=True)
class Basis:
    """Named constants with their origins, and a record of those that were read."""

    cluster_name: str
    values: Mapping[str, float]  # numbers by name; a cluster's figures under their field names
    declared: Mapping[str, Declared]  # origin of each
    read: set[str] = field(default_factory=set, compare=False)  # names of the constants read so far

    def __getitem__(self, name: str) -> float:
        """The value of a constant; ValueError if there is none, as a prediction has no silent defaults."""
        if name not in self.values:
            field_name = f"measured.{name}" if name in MEASURED else name
            way_out = "take cluster=8x_rtx4090, or measure this machine: python -m rpbench calibrate"
            raise ValueError(
                f"cluster={self.cluster_name} has no {field_name}, which cost=analytic needs; give "
                f"cluster.{field_name}=NUMBER, {way_out}"
            )
        self.read.add(name)
        return self.values[name]

    def get(self, name: str, default: float) -> float:
        """The value of a constant, or `default`, which means *without limit*."""
        return self[name] if name in self.values else default

    @property
    def memory_rate(self) -> float:
        """Bytes per second of a device's memory under element-wise kernels."""
        return self["memory_bytes_per_s"] * self["memory_efficiency"]

    @property
    def usable_memory_bytes(self) -> float:
        """Memory of one device less the reserved bytes."""
        return self.get("device_memory_bytes", inf) - self.get("reserved_memory_bytes", 0.0)

    def scaled(self, name: str, factor: float) -> "Basis":
        return Basis(self.cluster_name, {**self.values, name: self.values[name] * factor}, self.declared)

    def uncertain(self) -> list[str]:
        """Constants read so far that may be off."""
        return sorted(name for name in self.read if name in self.declared and self.declared[name].within > 0)


@cache
def counted_numbers() -> tuple[Mapping[str, float], Mapping[str, Mapping[str, Any]]]:
    """Numbers of the frameworks in `COUNTED`, and their origins; ValueError for a name in two files."""
    numbers: dict[str, float] = {}
    declared: dict[str, Mapping[str, Any]] = {}
    for name in COUNTED:
        found = read(CONF / "software" / f"{name}.yaml")
        if twice := sorted(numbers.keys() & found["numbers"].keys()):
            raise ValueError(f"conf/software/{name}.yaml: {twice[0]} stands in another file, too; give it another name")
        numbers |= found["numbers"]
        declared |= found["declared"]
    return numbers, declared


def make_basis(cluster: Machine, constants: Mapping[str, float], declared: Mapping[str, Mapping[str, Any]]) -> Basis:
    """A cluster's figures together with the numbers of the frameworks in `COUNTED`.

    Raises ValueError for a constant that is no finite number of at least 0, or a wrong declaration. `constants` and
    `declared`: replace numbers of frameworks and their origins.
    """
    for name, value in constants.items():
        if not is_finite(value) or value < 0:
            raise ValueError(f"cost.constants.{name}={value!r}: a finite number of at least 0")
    figures = {name: float(getattr(cluster, name)) for name in NUMBERS if getattr(cluster, name) is not None}
    figures |= {name: float(value) for name, value in cluster.measured.items()}
    numbers, known = counted_numbers()
    origins = declarations({**known, **declared}) | declarations(cluster.declared)
    if cluster.collective_bytes_per_s is None and cluster.intra_bytes_per_s is not None:
        figures["collective_bytes_per_s"] = COLLECTIVE_SHARE * cluster.intra_bytes_per_s
        source = f"{COLLECTIVE_SHARE} of the direct link"
        origins["collective_bytes_per_s"] = Declared("assumed", source, 0.2)
    return Basis(cluster.name, {**numbers, **constants, **figures}, origins)
