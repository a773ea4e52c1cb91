"""Bytes that a collective sends around a ring of devices, and hops whose latency counts; read in a browser too."""

from math import log2


def volume(name: str, size: int) -> float:
    """Bytes that each member of a ring sends, as a multiple of the tensor's bytes."""
    return (2 if name == "all_reduce" else 1) * (size - 1) / size


def ring_hops(size: int) -> float:
    """Hops of a ring whose latency counts, inside a node."""
    return min(size - 1, 2 * log2(size) + 1)
