"""Rings: what a collective over devices in a ring sends, and how many hops of latency are seen."""

from math import log2


def volume(name: str, size: int) -> float:
    """Bytes that each member sends in a ring, over those of the tensor."""
    return (2 if name == "all_reduce" else 1) * (size - 1) / size


def ring_hops(size: int) -> float:
    """Hops whose latency is seen inside a node."""
    return min(size - 1, 2 * log2(size) + 1)
