"""Machine: devices in nodes, from `conf/machine/`; two levels of links, and domains that may span nodes."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from rpbench.cost.collective_rates import CollectiveRate
from rpbench.cost.declared import declarations
from rpbench.finite import is_finite
from rpbench.mesh.gpu import CONF, Gpu, gpu, names, read, unknown_option


@dataclass(frozen=True)
class Machine:
    """Devices of one kind in nodes.

    Args:
        devices_per_node: of one host.
        nodes: hosts.
        intra_bytes_per_s: a device to the others of its domain, one way.
        inter_bytes_per_s: a device's part of its node's network cards, one way.
        domain: devices that the fast links join; 0 for those of a node.
        intra_latency_s, inter_latency_s: of one hop.
        host_bytes_per_s: a device to its host, one way.
        reserved_memory_bytes: what contexts and libraries take of a device.
        collectives: those that were measured inside a node, by name; they come before `intra_bytes_per_s`, whose share
            that collectives reach is then 1.
        declared: for each number its origin.

    Raises:
        ValueError: for sizes below 1 and rates that are not finite and above 0.
    """

    name: str
    gpu: Gpu
    devices_per_node: int
    nodes: int
    intra_bytes_per_s: float
    inter_bytes_per_s: float
    domain: int = 0
    intra_latency_s: float = 3e-6
    inter_latency_s: float = 10e-6
    host_bytes_per_s: float = 25e9
    reserved_memory_bytes: int = 2_000_000_000
    collectives: Mapping[str, CollectiveRate] = field(default_factory=dict, hash=False)
    declared: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        for name in ("devices_per_node", "nodes"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ValueError(f"machine.{name}={value!r}: a whole number of at least 1")
        for name in ("intra_bytes_per_s", "inter_bytes_per_s", "host_bytes_per_s"):
            value = getattr(self, name)
            if not is_finite(value) or value <= 0:
                raise ValueError(
                    f"machine.{name}={value!r}: bytes a second above 0; a link of bandwidth 0 never ends a transfer"
                )
        for name in ("intra_latency_s", "inter_latency_s", "reserved_memory_bytes", "domain"):
            value = getattr(self, name)
            if not is_finite(value) or value < 0:
                raise ValueError(f"machine.{name}={value!r}: 0 or more")
        if not self.domain:
            object.__setattr__(self, "domain", self.devices_per_node)
        if self.domain % self.devices_per_node and self.nodes > 1:
            raise ValueError(
                f"machine.domain={self.domain}: whole nodes of {self.devices_per_node} devices, or 0 for one node"
            )
        declarations(self.declared)

    @property
    def num_devices(self) -> int:
        """All devices."""
        return self.devices_per_node * self.nodes

    def with_devices(self, num_devices: int) -> "Machine":
        """As many whole nodes as that many devices need, or a part of one.

        Raises:
            ValueError: if the devices do not fill nodes.
        """
        if num_devices < 1:
            raise ValueError(f"num_devices={num_devices}: at least 1")
        if num_devices <= self.devices_per_node:
            return replace(self, nodes=1, devices_per_node=num_devices, domain=0)
        nodes, rest = divmod(num_devices, self.devices_per_node)
        if rest:
            nearest = nodes * self.devices_per_node
            raise ValueError(
                f"num_devices={num_devices} do not fill nodes of {self.devices_per_node}; take {nearest} or "
                f"{nearest + self.devices_per_node}"
            )
        return replace(self, nodes=nodes)


@cache
def machine(name: str) -> Machine:
    """The machine of `conf/machine/<name>.yaml`.

    Raises:
        ValueError: for an unknown name, with the nearest.
    """
    known = names("machine")
    if name not in known:
        raise ValueError(unknown_option("machine", name, known))
    values = read(CONF / "machine" / f"{name}.yaml")
    return Machine(**{**values, "gpu": gpu(values["gpu"])})
