"""Cluster: the devices of one host, their memory and links, and what an hour of them costs."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from rpbench.cost.collective_rates import collective_rates
from rpbench.cost.measured import MEASURED
from rpbench.finite import is_finite
from rpbench.registry import unknown_name

_COUNTS = (
    "num_devices",
    "device_memory_bytes",
    "reserved_memory_bytes",
    "host_memory_bytes",
    "devices_per_root_complex",
)
_NO_NUMBERS = ("name", "published_name", "device_speeds", "transfer_latency_s")
_SHARES = ("matmul_efficiency", "wide_matmul_efficiency", "attention_efficiency", "memory_efficiency")


@dataclass(frozen=True)
class Cluster:
    """A host and its devices. None means *without limit* for memory and rates, *not known* for all others.

    Args:
        name: as in `conf/cluster/`.
        num_devices: accelerators of the host; None for as many as a run asks for.
        device_memory_bytes: memory of one device.
        matmul_flops_per_s: peak rate of one device in the precision of the workload.
        host_to_device_bytes_per_s: one way, one device alone on its link; nominal where `copy_bytes_per_s` is known.
        device_to_host_bytes_per_s: the other way; None: as fast.
        device_to_device_bytes_per_s: between two devices, one way; None: only through the host, as fast as to it.
        transfer_latency_s: from the start of a transfer to its first byte.
        devices_per_root_complex: neighbours that share one; None: each has its own.
        root_complex_bytes_per_s: what those get together, one way; None: without limit.
        host_memory_bytes_per_s: what all devices get together, both ways; None: `host_bytes_per_s`.
        price_usd_per_hour: rent of the whole host.
        device_speeds: of devices that differ, as multiples of the device that costs were measured on; None where all
            are equal. They divide the time of work, not that of transfers.
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
        measured: constants of `cost=analytic` on this machine, which come before the general ones; see
            `rpbench.cost.measured`. Empty where the machine was not calibrated (`python -m rpbench calibrate`).
        collectives: of several ranks of this host, as measured by `python -m rpbench calibrate ranks=N`; see
            `rpbench.cost.collective_rates`. Predictions of meshes take them.
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
    device_speeds: tuple[float, ...] | None = None
    device_to_host_bytes_per_s: float | None = None
    device_to_device_bytes_per_s: float | None = None
    transfer_latency_s: float = 0.0
    devices_per_root_complex: int | None = None
    root_complex_bytes_per_s: float | None = None
    host_memory_bytes_per_s: float | None = None
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
    measured: Mapping[str, float] = field(default_factory=dict, hash=False)
    collectives: Mapping[str, Mapping[str, Any]] = field(default_factory=dict, hash=False)
    declared: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        for name in _COUNTS:
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise ValueError(f"cluster.{name}={value!r}: a whole number of at least 1, or null for no limit")
        for name in NUMBERS:
            value = getattr(self, name)
            if name not in _COUNTS and value is not None and not (is_finite(value) and value > 0):
                raise ValueError(f"cluster.{name}={value!r}: a finite number above 0, or null if there is none")
        for name in ("measured", "collectives", "declared"):
            if not isinstance(getattr(self, name), Mapping):
                raise ValueError(
                    f"cluster.{name}={getattr(self, name)!r:.80}: keys with values, or {{}} if there are none"
                )
        for name, value in self.measured.items():
            if name not in MEASURED:
                raise ValueError(f"cluster.measured: {unknown_name('constant', name, list(MEASURED))}")
            if not (is_finite(value) and value >= 0):
                raise ValueError(f"cluster.measured.{name}={value!r}: a finite number of at least 0")
        collective_rates(self.collectives)
        for name in _SHARES:
            if (getattr(self, name) or 0) > 1:
                raise ValueError(f"cluster.{name}={getattr(self, name)!r}: a share of the peak, at most 1")
        if self.device_speeds is not None:
            object.__setattr__(self, "device_speeds", _checked_speeds(self.device_speeds))
        if not (is_finite(self.transfer_latency_s) and self.transfer_latency_s >= 0):
            raise ValueError(f"cluster.transfer_latency_s={self.transfer_latency_s!r}: seconds, 0 or more")

    @property
    def usable_memory_bytes(self) -> int | None:
        """What a plan may fill of one device: its memory less what contexts and libraries take; None without limit.

        Below 0 where a device has less than these take: then nothing fits.
        """
        if self.device_memory_bytes is None:
            return None
        return self.device_memory_bytes - (self.reserved_memory_bytes or 0)

    def link_bytes_per_s(self, lane: str) -> float | None:
        """The pace of one device's link alone, by lane (h2d, d2h or net); None without limit."""
        other = {"d2h": self.device_to_host_bytes_per_s, "net": self.device_to_device_bytes_per_s}
        return other.get(lane) or self.copy_bytes_per_s or self.host_to_device_bytes_per_s

    @property
    def shared_host_bytes_per_s(self) -> float | None:
        """What all devices and the host's optimizer get of the host's memory together; None without limit."""
        return self.host_memory_bytes_per_s or self.host_bytes_per_s

    @property
    def shares_links(self) -> bool:
        """Whether transfers of different devices slow each other down."""
        complexes = self.devices_per_root_complex is not None and self.root_complex_bytes_per_s is not None
        return complexes or self.shared_host_bytes_per_s is not None

    def speeds_of(self, num_devices: int) -> tuple[float, ...]:
        """The speed of each device of a run; empty where all are equal.

        Raises:
            ValueError: if there are not as many as devices.
        """
        if self.device_speeds is None:
            return ()
        if len(self.device_speeds) != num_devices:
            raise ValueError(
                f"cluster.device_speeds has {len(self.device_speeds)} numbers, the run {num_devices} devices: give one "
                "for each, or null if all are equal"
            )
        return () if set(self.device_speeds) == {1} else self.device_speeds


# Fields that hold one number above 0.
NUMBERS = tuple(
    each.name for each in fields(Cluster) if each.name not in (*_NO_NUMBERS, "measured", "collectives", "declared")
)


def _checked_speeds(speeds: object) -> tuple[float, ...]:
    if isinstance(speeds, list | tuple) and speeds and all(is_finite(v) and v > 0 for v in speeds):
        return tuple(speeds)
    raise ValueError(f"cluster.device_speeds={speeds!r}: a list of finite numbers above 0, such as [1,1,0.5]; or null")
