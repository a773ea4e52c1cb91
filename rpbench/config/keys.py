"""Keys of a model's or a cluster's file, each with unit, range and an example."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Any, TypeVar

from rpbench.config.choices import ConfigError
from rpbench.cost.hardware.basis import counted_numbers
from rpbench.cost.hardware.machine import Machine
from rpbench.registry import unknown_name
from rpbench.workload.architecture import unknown_key

T = TypeVar("T")


@dataclass(frozen=True)
class Key:
    says: str  # its meaning and unit
    range: str
    example: str  # a value as it is typed


_SIZE, _ABOVE, _SHARE = "a whole number of at least 1", "a number above 0", "above 0, at most 1"

MODEL: Mapping[str, Key] = {
    "num_layers": Key("decoder layers", _SIZE, "28"),
    "hidden": Key("width of the residual stream", _SIZE, "3072"),
    "heads": Key("attention heads of a layer", _SIZE + " that divides hidden, or give head_dim", "24"),
    "vocab": Key("rows of embedding and head, tokens", _SIZE, "128_256"),
    "key_value_heads": Key("heads of keys and values", "a divisor of heads; null: as many", "8"),
    "head_dim": Key("width of one head", _SIZE + "; null: hidden / heads", "128"),
    "inner": Key("inner width of the MLP", _SIZE + "; null: 4 * hidden", "8192"),
    "seq_len": Key("tokens of one sequence", _SIZE, "2048"),
}
CLUSTER: Mapping[str, Key] = {
    "num_devices": Key("accelerators of the host", _SIZE, "4"),
    "device_memory_bytes": Key("memory of one device, bytes", _SIZE, "48_000_000_000"),
    "host_memory_bytes": Key("memory of the host, bytes", _SIZE, "512_000_000_000"),
    "matmul_flops_per_s": Key("matrix peak of a device in 16 bits, dense, FLOP/s", _ABOVE, "362.0e+12"),
    "wide_matmul_flops_per_s": Key("the same where sums are in fp32, FLOP/s", _ABOVE, "362.0e+12"),
    "matmul_efficiency": Key("fraction of that peak large products reach", _SHARE, "0.7"),
    "wide_matmul_efficiency": Key("the same where sums are in fp32", _SHARE, "0.7"),
    "attention_efficiency": Key("fraction of that peak fused attention reaches", _SHARE, "0.5"),
    "memory_bytes_per_s": Key("a device's own memory, read and write together, bytes/s", _ABOVE, "864.0e+9"),
    "memory_efficiency": Key("fraction of it element-wise kernels reach", _SHARE, "0.85"),
    "host_to_device_bytes_per_s": Key("link of a device to the host, one way, nominal, bytes/s", _ABOVE, "32.0e+9"),
    "copy_bytes_per_s": Key("the same as achieved from pinned memory, bytes/s", _ABOVE, "21.0e+9"),
    "intra_bytes_per_s": Key("direct link, one way, bytes/s; null: over the host", _ABOVE, "null"),
    "collective_bytes_per_s": Key("what a device sends in a ring over all devices, bytes/s", _ABOVE, "15.0e+9"),
    "host_bytes_per_s": Key("the host's memory under an optimizer, all devices together, bytes/s", _ABOVE, "150.0e+9"),
}
GPU: Mapping[str, Key] = {
    "flops_16": Key("matrix peak in 16 bits, dense, summed in fp32, FLOP/s", _ABOVE, "362.0e+12"),
    "sustained_16": Key("fraction of that peak large products reach", _SHARE, "0.55"),
    "memory_bytes": Key("its memory as the driver shows it, bytes", _SIZE, "48_305_799_168"),
    "memory_bytes_per_s": Key("read and write together, bytes/s", _ABOVE, "864.0e+9"),
    "sustained_memory": Key("fraction of it element-wise kernels reach", _SHARE, "0.85"),
    "link_bytes_per_s": Key("to other devices, one way, bytes/s", _ABOVE, "32.0e+9"),
    "host_link_bytes_per_s": Key("to its host, one way, nominal, bytes/s", _ABOVE, "32.0e+9"),
    "multiprocessors": Key("units among which a product is dealt", _SIZE, "142"),
}
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
        others = ", take cluster=8x_rtx4090, or measure this machine: rpbench calibrate"
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
