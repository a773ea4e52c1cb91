"""Collectives: seconds of ring and tree collectives over a group.

Ring over n members with bus bandwidth B and hop latency l: a gather or a scatter of X bytes (the whole tensor) takes
X (n - 1) / n / B and a latency between log2(n) and n - 1 hops; an all-reduce takes twice that.

Collectives inside a node take their measured times, if a machine has any (`rpbench calibrate ranks=N`).

Source: NCCL tests, PERFORMANCE.md, for the volumes.
"""

from functools import partial
from math import log2

from rpbench.cost.rings import ring_hops
from rpbench.mesh.placement import Group


def _ring_s(name: str, total_bytes: float, group: Group) -> float:
    """Seconds of an all-gather or a reduce-scatter; `total_bytes` is the whole tensor."""
    if group.size == 1:
        return 0.0
    if name in group.measured:
        return group.measured[name].seconds(total_bytes, group.size)
    return total_bytes * (group.size - 1) / group.size / group.bytes_per_s + hops(group) * group.latency_s


gather_s, scatter_s = partial(_ring_s, "all_gather"), partial(_ring_s, "reduce_scatter")


def reduce_s(total_bytes: float, group: Group) -> float:
    """Seconds of an all-reduce."""
    if "all_reduce" in group.measured:
        return group.measured["all_reduce"].seconds(total_bytes, group.size)
    return 2 * gather_s(total_bytes, group)


def hops(group: Group) -> float:
    """Hops whose latency counts: a ring inside a domain, trees of domains beyond."""
    outside = max(1, group.size // max(1, group.here))
    return ring_hops(min(group.size, group.here)) + 2 * log2(outside) if group.size > 1 else 0.0


def exchange_s(bytes_each: float, group: Group, *, copies_outside: float = 1.0) -> float:
    """Seconds of an all-to-all in which every member sends `bytes_each` in all.

    For each expert that a token visits, `copies_outside` copies leave the domain; below 1 if it is sent once to each.
    """
    if group.size == 1:
        return 0.0
    here = min(group.here, group.size)
    if "all_to_all" in group.measured:
        return group.measured["all_to_all"].seconds(bytes_each, group.size)
    if group.inside:
        return bytes_each * (group.size - 1) / group.size / group.bytes_per_s + group.latency_s
    outside = bytes_each * (group.size - here) / group.size * copies_outside / group.outside_bytes_per_s
    return outside + group.latency_s * (group.size / here)


def ring_pass_s(bytes_each: float, group: Group) -> float:
    """Seconds in which every member's block of keys and values passes the whole ring once (context parallelism)."""
    if group.size == 1:
        return 0.0
    pace = group.bytes_per_s if group.inside else min(group.bytes_per_s, group.outside_bytes_per_s * group.here)
    return (group.size - 1) * (bytes_each / pace + group.latency_s)
