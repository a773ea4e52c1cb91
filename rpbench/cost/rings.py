"""Rings: bytes that a collective sends around a ring of devices, and hops whose latency counts."""

from math import log2


def volume(name: str, size: int) -> float:
    """Bytes that each member sends in a ring, as a multiple of the tensor's bytes."""
    return (2 if name == "all_reduce" else 1) * (size - 1) / size


def ring_hops(size: int) -> float:
    """Hops whose latency counts inside a node."""
    return min(size - 1, 2 * log2(size) + 1)
