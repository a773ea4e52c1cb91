"""Cluster: the devices of one host, their memory and links, and what an hour of them costs."""

from dataclasses import dataclass
from math import isfinite


@dataclass(frozen=True)
class Cluster:
    """A host and its devices. None means *without limit* for memory and rates, *not known* for the price.

    Args:
        name: as in `conf/cluster/`.
        num_devices: accelerators of the host; None for as many as a run asks for.
        device_memory_bytes: memory of one device.
        matmul_flops_per_s: peak rate of one device in the precision of the workload.
        host_to_device_bytes_per_s: one way, one device alone on its link.
        price_usd_per_hour: rent of the whole host.
        device_speeds: of devices that differ, as multiples of the device that costs were measured on; None where all
            are equal. They divide the time of work, not that of transfers.

    Raises:
        ValueError: for a number that is not finite and above 0.
    """

    name: str
    num_devices: int | None = None
    device_memory_bytes: int | None = None
    matmul_flops_per_s: float | None = None
    host_to_device_bytes_per_s: float | None = None
    price_usd_per_hour: float | None = None
    device_speeds: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        for name in ("num_devices", "device_memory_bytes"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise ValueError(f"cluster.{name}={value!r}: a whole number of at least 1, or null for no limit")
        for name in ("matmul_flops_per_s", "host_to_device_bytes_per_s", "price_usd_per_hour"):
            value = getattr(self, name)
            if value is not None and not (_is_number(value) and isfinite(value) and value > 0):
                raise ValueError(f"cluster.{name}={value!r}: a finite number above 0, or null if there is none")
        if self.device_speeds is not None:
            object.__setattr__(self, "device_speeds", _checked_speeds(self.device_speeds))

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


def _checked_speeds(speeds: object) -> tuple[float, ...]:
    if isinstance(speeds, list | tuple) and speeds and all(_is_number(v) and isfinite(v) and v > 0 for v in speeds):
        return tuple(speeds)
    raise ValueError(f"cluster.device_speeds={speeds!r}: a list of finite numbers above 0, such as [1,1,0.5]; or null")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
