"""Cluster: the devices of one host, their memory and links, and what an hour of them costs."""

from dataclasses import dataclass
from math import isfinite


@dataclass(frozen=True)
class Cluster:
    """A host with equal devices. None means *without limit* for memory and rates, *not known* for the price.

    Args:
        name: as in `conf/cluster/`.
        num_devices: accelerators of the host; None for as many as a run asks for.
        device_memory_bytes: memory of one device.
        matmul_flops_per_s: peak rate of one device in the precision of the workload.
        host_to_device_bytes_per_s: one way, one device alone on its link.
        price_usd_per_hour: rent of the whole host.

    Raises:
        ValueError: for a number that is not finite and above 0.
    """

    name: str
    num_devices: int | None = None
    device_memory_bytes: int | None = None
    matmul_flops_per_s: float | None = None
    host_to_device_bytes_per_s: float | None = None
    price_usd_per_hour: float | None = None

    def __post_init__(self) -> None:
        for name in ("num_devices", "device_memory_bytes"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise ValueError(f"cluster.{name}={value!r}: a whole number of at least 1, or null for no limit")
        for name in ("matmul_flops_per_s", "host_to_device_bytes_per_s", "price_usd_per_hour"):
            value = getattr(self, name)
            if value is not None and not (_is_number(value) and isfinite(value) and value > 0):
                raise ValueError(f"cluster.{name}={value!r}: a finite number above 0, or null if there is none")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
