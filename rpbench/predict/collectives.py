"""Time of ring collectives and of copies that share a link.

A ring sends (p - 1) / p of a tensor over each device's link to gather or to scatter it, twice that to reduce it on
all of them; `collective_bytes_per_s` is the rate of that link while all send. One device sends nothing.
"""

from rpbench.cost.basis import Basis


def gather_s(num_bytes: float, num_devices: int, basis: Basis) -> float:
    """Seconds to gather on every device, or reduce and scatter, a tensor of `num_bytes` in whole."""
    if num_devices == 1:
        return 0.0
    return num_bytes * (num_devices - 1) / num_devices / basis["collective_bytes_per_s"]


def reduce_s(num_bytes: float, num_devices: int, basis: Basis) -> float:
    """Seconds to reduce a tensor and leave the sum on every device."""
    return 2 * gather_s(num_bytes, num_devices, basis)


def send_s(num_bytes: float, basis: Basis) -> float:
    """Seconds from one device to another: directly, or down to the host and up again, whichever is faster."""
    return num_bytes / max(basis["collective_bytes_per_s"], basis["copy_bytes_per_s"] / 2)


def host_copy_s(bytes_each: float, num_devices: int, basis: Basis) -> float:
    """Seconds for every device to copy as much at once: the link or the host's memory, whichever is slower.

    Of equal copies that begin together nothing is left to simulate: each has its fair share until all end.
    """
    return max(
        bytes_each / basis["copy_bytes_per_s"],
        bytes_each * num_devices / basis["host_bytes_per_s"],
    )
