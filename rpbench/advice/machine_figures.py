"""Machine figures: a cluster, or nodes of one, described by the type of its devices and a few numbers.

What is not given is assumed; `Described.assumed` names it, and its uncertainty enters the intervals.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import isfinite
from typing import Any

from rpbench.cost.hardware import Cluster
from rpbench.mesh.gpu import Gpu, gpu
from rpbench.mesh.machine import Machine
from rpbench.registry import unknown_name

COUNTS = ("num_devices", "devices_per_node", "device_memory_bytes", "host_memory_bytes")
RATES = ("intra_bytes_per_s", "inter_bytes_per_s", "host_link_bytes_per_s", "host_bytes_per_s")
FIGURES = (*COUNTS, *RATES)
OF_HOSTS = ("host_memory_bytes", "host_bytes_per_s")  # figures that only searches on one host read

# One way, bytes a second; one standard deviation beside each.
HOST_LINK = 32.0e9, 0.3, "PCIe 4.0 x16, nominal"
HOST_MEMORY = 150.0e9, 0.5, "two sockets with eight channels of DDR4 each, under copies"
NODE_LINK = 25.0e9, 0.5, "one 200 Gb/s card for each device"
# Of nominal rates, what transfers reach: as measured on the shipped machines.
COPIED, COLLECTIVE = 0.66, 0.8
RESERVED_BYTES = 1_000_000_000


@dataclass(frozen=True)
class Described:
    """A machine as it was described.

    Args:
        cluster: one node of it.
        nodes: the whole, for searches over several nodes; None where one node is all.
        assumed: what was not given, with the value that stands for it.
        unused: what was given and has no effect, with the reason.
    """

    cluster: Cluster
    nodes: Machine | None
    assumed: Mapping[str, str]
    unused: Mapping[str, str] = field(default_factory=dict)


def described(gpu_name: str, given: Mapping[str, str]) -> Described:
    """A machine of devices of a type.

    Args:
        gpu_name: an option of `conf/gpu/`.
        given: figures by name, as typed; `num_devices` at least.

    Raises:
        ValueError: for an unknown type or figure, all that is missing, or a number that cannot be.
    """
    device, figures = gpu(gpu_name), _figures(given)
    if "num_devices" not in figures:
        raise ValueError("num_devices= is missing: how many devices of this type there are, such as num_devices=8")
    count = int(figures["num_devices"])
    each = int(figures.get("devices_per_node", min(count, 8)))
    assumed: dict[str, str] = {}
    cluster = _node(device, figures, min(each, count), assumed)
    if count <= each:
        one = {"inter_bytes_per_s": f"one node has all {count} devices"}
        return Described(cluster, None, assumed, _of(one, figures))
    several = dict.fromkeys(OF_HOSTS, "a mesh keeps nothing in its hosts")
    nodes = _nodes(device, figures, count, each, assumed)
    left = {name: value for name, value in assumed.items() if name not in OF_HOSTS}
    return Described(cluster, nodes, left, _of(several, figures))


def _of(reasons: Mapping[str, str], figures: Mapping[str, float]) -> dict[str, str]:
    return {name: reason for name, reason in reasons.items() if name in figures}


def _figures(given: Mapping[str, str]) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, text in given.items():
        if name not in FIGURES:
            raise ValueError(unknown_name("figure", name, list(FIGURES)))
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


def _node(device: Gpu, figures: Mapping[str, float], count: int, assumed: dict[str, str]) -> Cluster:
    link = _or_assumed("host_link_bytes_per_s", figures, HOST_LINK, assumed)
    memory = _or_assumed("host_bytes_per_s", figures, HOST_MEMORY, assumed)
    direct = figures.get("intra_bytes_per_s", device.link_bytes_per_s)
    if "intra_bytes_per_s" not in figures:
        assumed["intra_bytes_per_s"] = f"{direct:.4g}: as of the device, conf/gpu/{device.name}.yaml"
    if "host_memory_bytes" not in figures:
        assumed["host_memory_bytes"] = "no limit"
    bytes_of_device = int(figures.get("device_memory_bytes", device.memory_bytes))
    host = figures.get("host_memory_bytes")
    return Cluster(
        name=f"{count}x_{device.name}",
        num_devices=count,
        device_memory_bytes=bytes_of_device,
        reserved_memory_bytes=RESERVED_BYTES,
        matmul_flops_per_s=device.flops_16,
        wide_matmul_flops_per_s=device.flops_16,
        matmul_efficiency=device.sustained_16,
        wide_matmul_efficiency=device.sustained_16,
        attention_efficiency=min(1.0, device.attention_rate("flash2") / device.flops_16),
        memory_bytes_per_s=device.memory_bytes_per_s,
        memory_efficiency=device.sustained_memory,
        host_to_device_bytes_per_s=link,
        copy_bytes_per_s=COPIED * link,
        device_to_device_bytes_per_s=direct,
        collective_bytes_per_s=COLLECTIVE * direct,
        host_bytes_per_s=memory,
        host_memory_bytes=None if host is None else int(host),
        declared=_origins(device, figures),
    )


def _or_assumed(
    name: str, figures: Mapping[str, float], usual: tuple[float, float, str], assumed: dict[str, str]
) -> float:
    if name in figures:
        return figures[name]
    assumed[name] = f"{usual[0]:.4g}: {usual[2]}"
    return usual[0]


def _origins(device: Gpu, figures: Mapping[str, float]) -> dict[str, Any]:
    """Where each number of a described node is from."""
    known, chosen = device.declared, {"origin": "chosen", "source": "as described"}
    matrix, attention = known["sustained_16"], known["attention_flops_per_s"]
    found = {
        "matmul_flops_per_s": known["flops_16"],
        "wide_matmul_flops_per_s": known["flops_16"],
        "matmul_efficiency": matrix,
        "wide_matmul_efficiency": matrix,
        "attention_efficiency": attention,
        "memory_bytes_per_s": known["memory_bytes_per_s"],
        "memory_efficiency": known["sustained_memory"],
    }
    copied = 0.15 if "host_link_bytes_per_s" in figures else HOST_LINK[1]
    shared = {"origin": "assumed", "within": HOST_MEMORY[1], "source": HOST_MEMORY[2]}
    return found | {
        "copy_bytes_per_s": {"origin": "assumed", "within": copied, "source": f"{COPIED} of the nominal link"},
        "collective_bytes_per_s": {"origin": "assumed", "within": 0.2, "source": f"{COLLECTIVE} of the direct link"},
        "host_bytes_per_s": chosen if "host_bytes_per_s" in figures else shared,
    }


def _nodes(device: Gpu, figures: Mapping[str, float], count: int, each: int, assumed: dict[str, str]) -> Machine:
    if count % each:
        raise ValueError(
            f"num_devices={count} do not fill nodes of devices_per_node={each}; take {count - count % each} or "
            f"{count - count % each + each}"
        )
    memory = int(figures.get("device_memory_bytes", device.memory_bytes))
    return Machine(
        name=f"{count}x_{device.name}",
        gpu=replace(device, memory_bytes=memory),
        devices_per_node=each,
        nodes=count // each,
        intra_bytes_per_s=figures.get("intra_bytes_per_s", device.link_bytes_per_s),
        inter_bytes_per_s=_or_assumed("inter_bytes_per_s", figures, NODE_LINK, assumed),
        host_bytes_per_s=COPIED * figures.get("host_link_bytes_per_s", HOST_LINK[0]),
    )
