"""Keys of a model's, a cluster's or a device's file (`keys.yaml`), and refusals of wrong ones."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from rpbench.config.choices import ConfigError
from rpbench.cost.hardware.basis import counted_numbers
from rpbench.cost.hardware.machine import Machine
from rpbench.registry import unknown_name
from rpbench.workload.architecture import unknown_key
from rpbench.yaml_file import read_keys

T = TypeVar("T")


@dataclass(frozen=True)
class Key:
    says: str  # its meaning and unit
    range: str
    example: str  # a value as it is typed


_FILE = read_keys(Path(__file__).with_suffix(".yaml"))
MODEL, CLUSTER, GPU = ({name: Key(*row) for name, row in _FILE[group].items()} for group in ("model", "cluster", "gpu"))
KEYS: Mapping[str, Mapping[str, Key]] = {"model": MODEL, "cluster": CLUSTER}


# Figures of a machine that times need: those of layers, and those of transfers and the optimizer.
LAYERS = (
    *("matmul_flops_per_s", "wide_matmul_flops_per_s", "matmul_efficiency"),
    *("attention_efficiency", "memory_bytes_per_s", "memory_efficiency"),
)
MOVES = ("memory_bytes_per_s", "memory_efficiency", "host_bytes_per_s")


def check_figures(cluster: Machine, needed: Sequence[str], why: str) -> None:
    """Raise ConfigError for figures that a cluster lacks, a line each; `why` needs them, such as `cost=analytic`."""
    missing = [name for name in dict.fromkeys(needed) if getattr(cluster, name) is None]
    if missing:
        others = ", take cluster=8x_rtx4090"
        if not cluster.measured:  # what cores have not, such as a memory of their own, cannot be measured
            others += ", or measure this machine: rpbench calibrate"
        raise ConfigError(f"{why}: {_missing_text('cluster', cluster.name, missing)}{others}")


def check_constants(given: Collection[str], of_software: Collection[str]) -> None:
    """Refuse constants of a cost that nothing reads: neither the shipped software nor the chosen one has them."""
    known = sorted({*counted_numbers()[0], *of_software})
    if unknown := [name for name in given if name not in known]:
        raise ConfigError(unknown_name("constant of cost", unknown[0], known))


def _missing_text(group: str, name: str, missing: Sequence[str]) -> str:
    """All keys that a file lacks, a line each, and how to write them."""
    known = {each: KEYS[group][each] for each in missing}
    lines = [f"  {each}: {key.example}   # {key.says}; {key.range}" for each, key in known.items()]
    way_out = f"write such lines into a file of yours, or give {group}.{missing[0]}={known[missing[0]].example}"
    return "\n".join([f"{group}={name} has no {', '.join(missing)}", *lines, way_out])


def built(kind: type[T], group: str, values: Mapping[str, Any]) -> T:
    """The dataclass `kind` with a group's keys; ConfigError for unknown and missing keys."""
    each = fields(kind)  # type: ignore[arg-type]  # a dataclass
    known = {f.name for f in each}
    for key in values:
        if key not in known:
            raise ConfigError(unknown_key(str(key), sorted(known), f"key of {group}"))
    check_name(group, values)
    if missing := [f.name for f in each if f.default is f.default_factory is MISSING and f.name not in values]:
        raise ConfigError(_missing_text(group, str(values["name"]), missing))
    return kind(**values)


_ONE_OF = {"model": "qwen3_1p7b", "software": "megatron_core"}


LONGEST_NAME = 100  # names become part of file names


def check_name(group: str, values: Mapping[str, Any]) -> None:
    if "name" not in values:
        raise ConfigError(f"{group} has no name: choose one, as in {group}={_ONE_OF.get(group, 'local')}")
    if not isinstance(values["name"], str):
        raise ConfigError(f"{group}.name={values['name']!r:.80}: a name is text; put it in quotes")
    name = values["name"]
    if not name.isprintable() or not 0 < len(name) <= LONGEST_NAME or name.startswith(".") or set(name) & set("/\\"):
        raise ConfigError(f"{group}.name={name!r:.80}: a name is no path, and has at most {LONGEST_NAME} characters")
