"""Machine figures: a machine described by the type of its devices and a few numbers.

A figure that is not given is that of the machine where such devices are usually found, or assumed; `Described.assumed`
names it, and its uncertainty enters the intervals.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite

from rpbench.cost.hardware.machine import Machine, devices_named, machine_of
from rpbench.registry import check_known

COUNTS = ("num_devices", "devices_per_node", "device_memory_bytes", "host_memory_bytes")
# Rates as a user names them -> fields of a machine; one way, bytes a second.
RATES = {
    "intra_bytes_per_s": "intra_bytes_per_s",
    "inter_bytes_per_s": "inter_bytes_per_s",
    "host_link_bytes_per_s": "host_to_device_bytes_per_s",
    "host_bytes_per_s": "host_bytes_per_s",
}
FIGURES = (*COUNTS, *RATES)
OF_HOSTS = ("host_memory_bytes", "host_bytes_per_s")  # figures that only searches on one host use
_CHOSEN = {"origin": "chosen", "source": "as described"}


@dataclass(frozen=True)
class Described:
    """A machine as it was described."""

    machine: Machine
    # figures that were not given, with the value and source taken instead
    assumed: Mapping[str, str] = field(default_factory=dict)
    # figures that were given and have no effect, with the reason
    unused: Mapping[str, str] = field(default_factory=dict)


def described(gpu_name: str, given: Mapping[str, str]) -> Described:
    """A machine of devices of a type.

    Raises ValueError for an unknown type or figure, a missing `num_devices`, or an impossible number.

    Args:
        gpu_name: an option of `conf/gpu/`, or the usual name: `RTX 4090`.
        given: figures by name, as typed; `num_devices` at least.
    """
    figures = _figures(given)
    if "num_devices" not in figures:
        raise ValueError("num_devices= is missing: how many devices of this type there are, such as num_devices=8")
    keys = devices_named(f"{int(figures['num_devices'])}x_{gpu_name}")
    assert keys is not None  # a count and a kind
    usual = machine_of(keys)
    if usual.gpu is not None:
        keys |= {"name": f"{usual.size}x_{usual.gpu.name}"}
    if "host_link_bytes_per_s" in figures:
        keys["copy_bytes_per_s"] = None  # measured on another link; a fraction of this one is assumed
    if "intra_bytes_per_s" in figures:
        keys["collective_bytes_per_s"] = None
    keys |= {RATES.get(name, name): int(value) if name in COUNTS else value for name, value in figures.items()}
    if "devices_per_node" in figures or not keys["devices_per_node"]:
        each = int(figures.get("devices_per_node", 8))
        keys |= {"devices_per_node": each, "domain": 0}
    keys["declared"] = {**keys["declared"], **{RATES.get(name, name): _CHOSEN for name in figures}}
    found = machine_of(keys)
    unread = OF_HOSTS if found.num_nodes > 1 else ("inter_bytes_per_s",)
    reason = "a mesh keeps nothing in its hosts" if found.num_nodes > 1 else f"one node has all {found.size} devices"
    unused = {name: reason for name in unread if name in figures}
    return Described(found, _assumed(found, figures, unread), unused)


def _assumed(found: Machine, figures: Mapping[str, float], unread: tuple[str, ...]) -> dict[str, str]:
    """The values taken for rates and sizes that were not given."""
    said: dict[str, str] = {}
    for name, own in {**RATES, "host_memory_bytes": "host_memory_bytes"}.items():
        if name in figures or name in unread:
            continue
        value, row = getattr(found, own), found.declared.get(own, {})
        if value is not None:
            said[name] = f"{value:.4g}: {row.get('source', 'as the machine where such devices usually stand')}"
        elif name == "host_memory_bytes":
            said[name] = "no limit"
    return said


def _figures(given: Mapping[str, str]) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, text in given.items():
        check_known("figure", name, FIGURES)
        try:
            value = float(text.replace("_", ""))
        except ValueError:
            value = float("nan")
        if not isfinite(value) or value <= 0:
            unit = "bytes a second above 0, such as 64e9" if name in RATES else "a whole number of at least 1"
            raise ValueError(f"{name}={text}: {unit}")
        if name in COUNTS and value != int(value):
            raise ValueError(f"{name}={text}: a whole number of at least 1")
        found[name] = value
    return found
