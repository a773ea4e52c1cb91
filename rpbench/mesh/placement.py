"""Placement: the bandwidth of a group of devices, from its size, its stride and the machine's levels.

A group lies inside a domain (a node, or all nodes that NVLink joins) iff size x stride <= devices of the domain.
Otherwise domain / stride members share a domain, and all sibling groups use the domain's network cards at once:

    bandwidth = min(intra, inter a device x min(members in a domain, size))
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from rpbench.cost.hardware.collective_rates import CollectiveRate
from rpbench.cost.hardware.machine import Machine
from rpbench.mesh.layout import Mesh
from rpbench.mesh.software import Software


class Group(NamedTuple):
    """A group of devices that communicate."""

    size: int  # members
    here: int  # members in one domain
    bytes_per_s: float  # of each member in a ring
    outside_bytes_per_s: float  # each member's part of its domain's network cards
    latency_s: float  # of one hop
    measured: Mapping[str, CollectiveRate] = {}  # collectives inside a domain whose seconds are known, by name

    @property
    def inside(self) -> bool:
        return self.here >= self.size


class Links(NamedTuple):
    """Bandwidth that collectives reach, below the machine's figures."""

    intra_bytes_per_s: float
    inter_bytes_per_s: float


def with_collectives(machine: Machine, software: Software) -> Machine:
    """The machine with the rate of a framework's collectives inside a domain, unless it was measured or is given."""
    known = machine.gpu is not None or machine.intra_bytes_per_s is not None
    if machine.ring_bytes_per_s is not None or software.kernels != "tiled" or not known:
        return machine
    return replace(machine, collective_bytes_per_s=_reached_inside(machine, software))


def _reached_inside(machine: Machine, software: Software) -> float:
    if machine.ring_bytes_per_s is not None:
        return machine.ring_bytes_per_s
    return (machine.intra_bytes_per_s or machine.device.link_bytes_per_s) * software.constants["intra"]


def reached(machine: Machine, software: Software) -> Links:
    """The rates that a framework's collectives reach on a machine's links; a measured rate is reached in full."""
    inside = _reached_inside(machine, software)
    if machine.num_nodes == 1 and machine.inter_bytes_per_s is None:
        return Links(inside, inside)
    return Links(inside, machine.known("inter_bytes_per_s") * software.constants["inter"])


def group_of(size: int, stride: int, machine: Machine, links: Links) -> Group:
    """The group of `size` members that stand `stride` apart."""
    domain = machine.domain_devices
    if size * stride <= domain:
        intra, inter = links.intra_bytes_per_s, links.inter_bytes_per_s
        return Group(size, size, intra, inter, machine.hop_latency_s, machine.rates)
    here = max(1, min(domain // stride, size))
    return Group(
        size,
        here,
        min(links.intra_bytes_per_s, links.inter_bytes_per_s * here),
        links.inter_bytes_per_s,
        machine.inter_latency_s,
    )


def hop_bytes_per_s(machine: Machine, links: Links, *, inside: bool) -> float:
    """Bandwidth of a tensor on its way to the next stage, `inside` a domain or not, alone on its links.

    Devices without a link to each other send the tensor down to their host, then up.
    """
    if not inside:
        return links.inter_bytes_per_s
    if machine.intra_bytes_per_s is None and machine.copy_bytes_per_s is not None:
        return machine.copy_bytes_per_s / 2
    return links.intra_bytes_per_s


def pipeline_inside(mesh: Mesh, machine: Machine) -> bool:
    """Whether all stages of a pipeline are in one domain."""
    return mesh.pipeline * mesh.stride("pipeline") <= machine.domain_devices
