"""Cluster: the devices of one host, their memory and links, and what an hour of them costs."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from math import isfinite
from typing import Any

_COUNTS = ("num_devices", "device_memory_bytes", "reserved_memory_bytes", "host_memory_bytes")
_SHARES = ("matmul_efficiency", "wide_matmul_efficiency", "attention_efficiency", "memory_efficiency")


@dataclass(frozen=True)
class Cluster:
    """A host with equal devices. None means *without limit* for memory and rates, *not known* for all others.

    Args:
        name: as in `conf/cluster/`.
        num_devices: accelerators of the host; None for as many as a run asks for.
        device_memory_bytes: memory of one device.
        matmul_flops_per_s: peak rate of one device in the precision of the workload.
        host_to_device_bytes_per_s: one way, one device alone on its link; the figure of the link's standard.
        price_usd_per_hour: rent of the whole host.
        published_name: the machine's name in `analysis/published/`, None for one without published numbers.
        reserved_memory_bytes: what contexts and libraries of a process take of a device's memory.
        wide_matmul_flops_per_s: peak where products are summed in fp32; lower than the other on consumer devices.
        matmul_efficiency, wide_matmul_efficiency, attention_efficiency, memory_efficiency: shares of the peaks that
            large products (of either kind), fused attention and element-wise kernels reach.
        memory_bytes_per_s: of a device's own memory, read and write together.
        copy_bytes_per_s: one way between a device and pinned host memory, as achieved by one device.
        collective_bytes_per_s: what each device sends in a ring collective over all devices ("bus bandwidth").
        host_bytes_per_s: traffic of the host's memory under an optimizer or many copies, all devices together.
        host_memory_bytes: memory of the host.
        launch_s: what a layer costs its device beside its operators: interpreter and launches.
        corrections: measured over counted time of a probe's `forward`, `backward`, `head_forward`, `head_backward`
            on this machine (`python -m rpbench calibrate`); empty where none were measured.
        declared: for each number its origin; see `rpbench.cost.declared`.

    Raises:
        ValueError: for a number that is not finite and above 0, or a share above 1.
    """

    name: str
    num_devices: int | None = None
    device_memory_bytes: int | None = None
    matmul_flops_per_s: float | None = None
    host_to_device_bytes_per_s: float | None = None
    price_usd_per_hour: float | None = None
    published_name: str | None = None
    reserved_memory_bytes: int | None = None
    wide_matmul_flops_per_s: float | None = None
    matmul_efficiency: float | None = None
    wide_matmul_efficiency: float | None = None
    attention_efficiency: float | None = None
    memory_bytes_per_s: float | None = None
    memory_efficiency: float | None = None
    copy_bytes_per_s: float | None = None
    collective_bytes_per_s: float | None = None
    host_bytes_per_s: float | None = None
    host_memory_bytes: int | None = None
    launch_s: float | None = None
    corrections: Mapping[str, float] = field(default_factory=dict, hash=False)
    declared: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        for name in _COUNTS:
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise ValueError(f"cluster.{name}={value!r}: a whole number of at least 1, or null for no limit")
        for name in NUMBERS:
            value = getattr(self, name)
            if name not in _COUNTS and value is not None and not (_is_number(value) and isfinite(value) and value > 0):
                raise ValueError(f"cluster.{name}={value!r}: a finite number above 0, or null if there is none")
        for name in _SHARES:
            if (getattr(self, name) or 0) > 1:
                raise ValueError(f"cluster.{name}={getattr(self, name)!r}: a share of the peak, at most 1")


NUMBERS = tuple(
    each.name for each in fields(Cluster) if each.name not in ("name", "published_name", "corrections", "declared")
)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
