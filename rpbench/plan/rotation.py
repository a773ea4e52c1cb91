"""Rotation: the modelled step of a pipeline whose stages stream through the devices in turn.

Stage j runs on the j-th device of the rotation, counted round and round, for all M microbatches of the step, first
forward and later back. With N devices, f and b the times of one microbatch, h of a hop, u of the weights' upload:

    start(j)  = max(start(j-1) + f(j-1) + h,  ready(j))          the first microbatch is there, and the weights are
    end(j)    = max(start(j) + f(j) + (M-1) max(f(j), g),        the stage itself, its tensors' way to and from the
                    end(j-1) + h + f(j))                         host (g) or the stage before it is slowest
    ready(j)  = max(end(j-N),  start(j-N) + a(j-N) + u(j))       with prefetch: uploads hide behind the running stage
              = end(j-N) + u(j)                                  without

and the same from stage S-1 to 0 with b, where the first N stages back follow the forward of the same stage. `a` is the
time of the running visit's own tensors on the same link: boundary tensors and kept inputs. Microbatches are alike, so
the arrivals at a stage are convex in their number and the first and the last one decide: `end` is exact, not a bound.
After the backward of stage j its gradients go to the host, whose optimizer takes the stages one after the other. It
shares the host's memory with the transfers of later rounds:

    step      = max over j of end(j) + store(j) + optimizer(0..j) + traffic(0..j-N)

Links (`share_links`): devices of one root complex share its rate, and all devices share the host's memory. The visits
of neighbours in the rotation begin one stage's microbatch apart and last M of them, so their prefetches overlap by
max(0, 1 - apart / M) if the devices wait for each other (M < N), and always otherwise (M >= N). The sum of these
overlaps is the mean number of other devices beside a device, which gets a fair share of the rate. Cross mapping puts
devices of one complex further apart. At the start of a step all devices load at once. The simulator
(`rpbench.sim.shared_links`) shares links moment by moment instead.

Source: the rotation, the prefetch of the next stage while one runs and its memory limit are from descriptions of
Mobius (Feng et al., ASPLOS'23). These equations, the optimizer and the rates of shared links are ours.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rpbench.cost.arrays import Floats, Ints
from rpbench.cost.footprint.sizes import ModelBytes
from rpbench.cost.hardware.machine import Machine

# Boundary tensors of a microbatch in a visit, (forward, backward): forward loads its input and stores its output and a
# kept input; backward loads a gradient and the kept input, and stores a gradient.
TENSORS_IN, TENSORS_OUT = (1, 2), (2, 1)
TENSORS = 3

Overlap = Callable[[int], float]


class Stage(NamedTuple):
    """A stage in many cuts at once; times in the rotation's unit, `weights` and `beside` in bytes."""

    forward: Floats
    backward: Floats
    visit_forth: Floats  # of all microbatches, if they wait only for the stage and its links
    visit_back: Floats
    first_load: Floats
    upload: Floats
    traffic: Floats  # of the host's memory in its backward visit
    optimizer: Floats
    store: Floats
    weights: Floats
    beside: Floats  # gradients and recomputed activations of its backward


@dataclass(frozen=True)
class Links:
    """Times per byte, by place in the rotation, of devices that share links to the host."""

    first_load: tuple[float, ...]  # of the first stages, which are all loaded at the start of the step
    alone: float  # of a load while nothing else is loaded
    # load, store: of transfers from and to the host while stages run
    load: tuple[float, ...]
    store: tuple[float, ...]
    host: float  # of the host's memory alone
    hop: float  # time of a boundary tensor from one device to the next
    boundary: tuple[float, ...]  # time of loading a boundary tensor at each place
    flow: tuple[tuple[float, float], ...]  # least time of one microbatch's tensors, forward and backward, at each place


@dataclass(frozen=True)
class Rotation:
    """A model on devices that take its stages in turn."""

    # num_ranks, num_microbatches: N and M
    num_ranks: int
    num_microbatches: int
    # forward, backward: times of a microbatch through each layer; recomputation is in `backward`
    forward: Sequence[float]
    backward: Sequence[float]
    head: tuple[float, float]  # the same two times of the head, in the last stage
    spared: Sequence[float]  # time that each layer saves in a last stage that is not recomputed; else zeros
    sizes: ModelBytes
    links: Links
    optimizer: float = 0.0  # time of the host's optimizer for a byte of optimizer state
    prefetches: bool = True  # whether the next stage's weights are loaded while a stage runs
    limit_bytes: int | None = None  # memory of a device; None for no limit
    repeats: bool = False  # another step follows, whose first stage is prefetched in a device's last visit

    @property
    def num_layers(self) -> int:
        return len(self.forward)

    @cached_property
    def running(self) -> Floats:
        """Sums over the layers below each layer, of the three times and then of the bytes, (quantities, layers + 1)."""
        sizes = ((each.weights, each.gradients, each.optimizer, each.activations) for each in self.sizes.layers)
        columns = [self.forward, self.backward, self.spared, *zip(*sizes, strict=True)]
        return np.concatenate([np.zeros((len(columns), 1)), np.cumsum(np.array(columns, float), axis=1)], axis=1)

    def stage(self, number: int, num_stages: int, first: Ints, end: Ints) -> Stage:
        """Times and bytes of stage `number` with layers `first` to `end`, one pair for each cut."""
        forward, backward, spared, *found, activations = self.running.take(end, 1) - self.running.take(first, 1)
        is_last = number == num_stages - 1
        ends = [self.sizes.embedding] * (number == 0) + [self.sizes.head] * is_last
        weights, gradients, optimizer = (
            own + sum(getattr(each, name) for each in ends)
            for name, own in zip(("weights", "gradients", "optimizer"), found, strict=True)
        )
        place, more = number % self.num_ranks, self.num_microbatches - 1
        forward = forward + self.head[0] * is_last
        backward = backward + (self.head[1] - spared) * is_last
        links = self.links
        of_ends = sum(each.weights for each in ends)  # heavy: they still load when the others have loaded
        return Stage(
            forward,
            backward,
            forward + more * np.maximum(forward, links.flow[place][0]),
            backward + more * np.maximum(backward, links.flow[place][1]),
            (weights - of_ends) * links.first_load[place] + of_ends * links.alone,
            weights * links.load[place],
            (weights + gradients + TENSORS * self.num_microbatches * self.sizes.boundary) * links.host,
            optimizer * self.optimizer,
            gradients * links.store[place],
            weights,
            gradients + activations,
        )

    def arriving(self, number: int, num_stages: int, *, backward: bool) -> float:
        """Time of a visit's activations on the link that also carries weights."""
        tensors = (number < num_stages - 1) + (number > 0) if backward else int(number > 0)
        return self.num_microbatches * tensors * self.links.boundary[number % self.num_ranks]

    def ready(self, since: Floats, free: Floats, upload: Floats) -> Floats:
        """When a stage's weights are there: loaded from `since` on with prefetch, else once the device is free."""
        return np.maximum(free, since + upload) if self.prefetches else free + upload

    def fits(self, number: int, num_stages: int, stage: Stage, before: Floats | None) -> npt.NDArray[np.bool_]:
        """Whether a stage fits beside the stage that its device runs before it; `before` are its weights in bytes."""
        if self.limit_bytes is None:
            return np.ones(len(stage.weights), bool)
        from rpbench.cost.footprint.memory import BOUNDARY_BUFFERS

        fixed = BOUNDARY_BUFFERS * self.sizes.boundary
        logits = self.sizes.logits_chunk * (number == num_stages - 1)
        next_back = stage.weights * self.repeats if before is None else before
        needed = stage.weights + stage.beside + next_back * self.prefetches + fixed + logits
        if before is not None:
            needed = np.maximum(needed, before + stage.weights * self.prefetches + fixed)
        if number >= num_stages - self.num_ranks:
            needed = np.maximum(needed, stage.weights * (1 + self.prefetches) + fixed + logits)
        return needed <= self.limit_bytes


def share_links(cluster: Machine, devices: Sequence[int], num_microbatches: int, boundary: int, unit: int) -> Links:
    """Times of transfers, in units of 1 / `unit` seconds, if stages go to the devices in this order."""
    size = len(devices)
    latency = 2 * cluster.transfer_latency_s * unit

    def times(lane: str, overlap: Overlap, on: Machine = cluster) -> tuple[float, ...]:
        return tuple(unit * _seconds_per_byte(on, lane, devices, place, overlap) for place in range(size))

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
    own_load, own_store = times("h2d", steady, narrow), times("d2h", steady, narrow)
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
    """The fraction of a visit during which the device `apart` places behind in the rotation has a visit too."""
    period = max(num_devices, num_microbatches)
    ahead, behind = num_microbatches - apart, num_microbatches - (period - apart)
    return min(1.0, (max(0, ahead) + max(0, behind)) / num_microbatches)


def _seconds_per_byte(cluster: Machine, lane: str, devices: Sequence[int], place: int, overlap: Overlap) -> float:
    """Seconds per byte on the slowest link of a device's transfers."""
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
