"""Links of a rotation: what a device gets of the ways to the host while others load as well.

Devices of one root complex share its rate, and all of them the host's memory. The visits of neighbours in the rotation
begin one stage's microbatch apart and last M of them, so that their prefetches overlap by max(0, 1 - apart / M) where
the devices wait for each other (M < N), and always where they do not (M >= N). A device at one place has so many
others beside it on average, and gets a fair share of what they have together. Cross mapping puts devices of one complex
further apart. At the start of a step all load at once.

This estimate is ours; the simulator (`rpbench.sim.shared_links.links`) shares links moment by moment.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from rpbench.cost.hardware.machine import Machine
from rpbench.plan.of_mobius.rotation import TENSORS, TENSORS_IN, TENSORS_OUT, Links

Overlap = Callable[[int], float]


def share_links(cluster: Machine, devices: Sequence[int], num_microbatches: int, boundary: int, unit: int) -> Links:
    """What transfers take on a cluster.

    Args:
        devices: in the order in which stages go to them.
        boundary: bytes of a boundary tensor.
        unit: units of time in a second.
    """
    size = len(devices)
    latency = 2 * cluster.transfer_latency_s * unit

    def times(lane: str, overlap: Overlap) -> tuple[float, ...]:
        return tuple(unit * _seconds_per_byte(cluster, lane, devices, place, overlap) for place in range(size))

    def steady(apart: int) -> float:
        return overlap_of_visits(apart, size, num_microbatches)

    alone = [unit / pace for lane in ("d2h", "h2d") if (pace := cluster.link_bytes_per_s(lane))]
    load, store, host = times("h2d", steady), times("d2h", steady), cluster.shared_host_bytes_per_s
    per_byte = unit / host if host else 0.0

    def flow(place: int, way: int) -> float:
        shares = 1 + sum(steady((other - place) % size) for other in range(size) if other != place)
        over_links = max(TENSORS_IN[way] * own_load[place], TENSORS_OUT[way] * own_store[place])
        return boundary * max(over_links, shares * TENSORS * per_byte)

    narrow = replace(cluster, host_bytes_per_s=None, host_memory_bytes_per_s=None)
    own_load, own_store = (
        tuple(unit * _seconds_per_byte(narrow, lane, devices, place, steady) for place in range(size))
        for lane in ("h2d", "d2h")
    )
    return Links(
        times("h2d", lambda _: 1.0),
        alone[-1] if alone else 0.0,
        load,
        store,
        per_byte,
        boundary * sum(alone) + latency,
        tuple(boundary * each for each in load),
        tuple((flow(place, 0), flow(place, 1)) for place in range(size)),
    )


def overlap_of_visits(apart: int, num_devices: int, num_microbatches: int) -> float:
    """The fraction of a visit during which the device so many places behind in the rotation has one as well."""
    period = max(num_devices, num_microbatches)
    ahead, behind = num_microbatches - apart, num_microbatches - (period - apart)
    return min(1.0, (max(0, ahead) + max(0, behind)) / num_microbatches)


def _seconds_per_byte(cluster: Machine, lane: str, devices: Sequence[int], place: int, overlap: Overlap) -> float:
    """Of the narrowest way that a device's transfers take."""
    size, device = len(devices), devices[place]
    beside = {other: overlap((number - place) % size) for number, other in enumerate(devices) if other != device}
    found = [1 / (cluster.link_bytes_per_s(lane) or float("inf"))]
    per_complex, complex_rate = cluster.devices_per_root_complex, cluster.root_complex_bytes_per_s
    if per_complex is not None and complex_rate is not None:
        near = (amount for other, amount in beside.items() if other // per_complex == device // per_complex)
        found.append((1 + sum(near)) / complex_rate)
    if cluster.shared_host_bytes_per_s is not None:
        found.append((1 + sum(beside.values())) / cluster.shared_host_bytes_per_s)
    return max(found)
