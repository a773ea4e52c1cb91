"""Whole layers: the plan of a contender that needs the least memory, over all cuts and choices of recomputation.

If every stage is whole on one device, and the order does not depend on times, then what a device holds depends only on
the layers of its own stages. So for each number of layers a device needs at least the bytes of the best way to
distribute them over its stages, each recomputed or not; and the fullest device of the best cut needs the least bytes at
which all devices together have room for the model. That is exact if all layers are equally large, and otherwise a
bound.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from math import comb
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rpbench.cost.footprint.memory import Footprint
from rpbench.cost.footprint.sizes import LayerSize
from rpbench.ir.partition import Partition, symmetric
from rpbench.ir.policy import Policy
from rpbench.ir.schedule import Weights
from rpbench.plan.contest.contender import Setting
from rpbench.plan.contest.frame import Frame, posed
from rpbench.plan.contest.search import Search
from rpbench.plan.counts import plain_partitions, promising_counts
from rpbench.sim.memory import peak_in_flight

MOST_WAYS = 20_000  # to distribute layers over a device's stages and choose recomputation; with more, no search

Ints = npt.NDArray[np.int64]


class Lightest(NamedTuple):
    """The plan whose fullest device needs least."""

    bytes: int
    setting: Setting
    cut: Partition


def lightest(search: Search, is_over: Callable[[], bool]) -> Lightest | None:
    """The lightest plan of a contender, or the first one that fits.

    None if neither is known: the time was over, there are too many ways to distribute layers, or the order depends on
    times, shares stages, or moves weights or activations.
    """
    entry, limit = search.contender.entry, search.terms.limits.device_memory_bytes
    if entry.needs_costs or entry.separate_cuts or entry.lower is not None or limit is None:
        return None
    best, is_open, seen = None, False, set[Setting]()
    for setting in sorted(search.bounds.settings(), key=lambda each: each.microbatch_sequences):
        plain = setting.changed("recompute", "all")  # every choice of it is looked at
        if is_over():
            return None
        if plain in seen:
            continue
        try:
            frame = _frame(search, setting)
        except ValueError:  # the schedule refuses the setting with any cut
            continue
        seen.add(plain)
        own = _own_stages(frame)
        found = None if own is None else _lightest_of(frame, own, setting, is_over)
        is_open |= found is None
        if found is not None and (best is None or found.bytes < best.bytes):
            best = found
        if best is not None and best.bytes <= limit:
            return best
    return None if is_open else best


def _frame(search: Search, setting: Setting) -> Frame:
    """A frame with as many steps as affect the peak in flight: one if each step is flushed."""
    problem = posed(search.contender, setting, search.terms, 1)
    cuts = plain_partitions(problem, promising_counts(problem)[0])
    if not cuts:
        raise ValueError("there are fewer layers than stages")
    frame = Frame(search.contender, setting, search.terms, cuts[0], 1)
    if frame.schedule.policy is not Policy.FLUSH:
        frame = Frame(search.contender, setting, search.terms, cuts[0], search.terms.num_steps)
    return frame


def _own_stages(frame: Frame) -> Ints | None:
    """The stages of each device, (devices, stages of one); None if they are shared, streamed, or unequal in number."""
    schedule = frame.schedule
    shape, holders = schedule.shape, schedule.placement
    if not holders or schedule.weights is not Weights.BOUND or shape.tensor_parallel or shape.num_head_shards:
        return None
    own: list[list[int]] = [[] for _ in range(shape.num_ranks)]
    for stage, devices in enumerate(holders):
        if len(devices) != 1:
            return None
        own[devices[0]].append(stage)
    return np.array(own) if len(set(map(len, own))) == 1 else None


def _lightest_of(frame: Frame, own: Ints, setting: Setting, is_over: Callable[[], bool]) -> Lightest | None:
    """The lightest plan of a setting; None if time ends, or there are too many ways to distribute layers."""
    num_layers, limit = frame.terms.model.num_layers, frame.terms.limits.device_memory_bytes or 0
    if _num_ways(-(-num_layers // len(own)), own.shape[1]) > MOST_WAYS:  # of the device with most layers, in any cut
        return None
    needs = _Needs(_footprint(frame, setting), own)
    each, least = 0, 0
    while True:  # layers of a device, until one more is too many for every device
        if _num_ways(each, own.shape[1]) > MOST_WAYS or is_over():
            return None
        needs.add(each)
        known = np.array(needs.bytes)  # (layers, devices), more with every layer
        enough = [bytes_ for bytes_ in np.unique(known) if _room(known, bytes_).sum() >= num_layers]
        if enough:
            least = int(enough[0])
            if (known[-1] > least).all() or each == num_layers:
                break
        each += 1
    return Lightest(least, setting, symmetric(needs.cut(num_layers, max(least, limit))))


def _footprint(frame: Frame, setting: Setting) -> Footprint:
    """The footprint of as many layers as all devices may be asked for, each as small as the smallest."""
    sizes, analysis = frame.terms.sizes(setting.microbatch_sequences), frame.graph.analysis
    found = Footprint(frame.schedule, sizes, peak_in_flight(frame.graph), keeps=(), analysis=analysis)
    low = LayerSize(*map(min, zip(*sizes.layers, strict=True)))
    return found.of_sizes(replace(sizes, layers=(low,) * sizes.num_layers * frame.schedule.shape.num_ranks))


class _Needs:
    """The least bytes of devices by their number of layers, and how the layers are distributed over their stages.

    Args:
        own: the stages of each device, (devices, stages of one).
    """

    def __init__(self, footprint: Footprint, own: Ints) -> None:
        self._footprint, self._own = footprint, own
        self.bytes: list[Ints] = []  # by number of layers, (devices,)
        self._ways: list[Ints] = []  # by number of layers, (ways, stages of one), the most even first
        self._tables: list[tuple[Ints, Ints]] = []  # bytes with all recomputed, and the least, (ways, devices)

    def add(self, num_layers: int) -> None:
        """Add the bytes of so many layers on a device, for all devices at once: they are independent."""
        each = self._own.shape[1]
        ways = np.array(sorted(_ways(num_layers, each), key=max))
        layers = np.zeros((len(ways), self._own.size), np.int64)
        layers[:, self._own] = ways[:, None]
        recomputed = self._footprint.peaks(layers, layers, 0 * layers)
        least = np.minimum(recomputed, self._footprint.keeping(None).peaks(layers, layers))
        kept = np.array([*product((0, 1), repeat=each)])  # (choices, stages of one)
        for first in (0, 1):  # every second device at a time, while the others keep one layer each
            own, others = self._own[first::2], self._own[1 - first :: 2]
            beside, keeps = layers.copy(), np.zeros((len(kept), *layers.shape), np.int64)
            keeps[..., own] = kept[:, None, None]
            beside[:, others] = keeps[..., others] = np.arange(each) == 0
            found = self._footprint.peaks(beside, beside, keeps * beside)[..., first::2].min(axis=0)
            least[:, first::2] = np.minimum(least[:, first::2], found)
        self.bytes.append(least.min(axis=0))
        self._ways.append(ways)
        self._tables.append((recomputed, least))

    def cut(self, num_layers: int, held: int) -> tuple[int, ...]:
        """The layers of each stage, as even as possible within `held` bytes, with all recomputed if that is enough."""
        for tables in zip(*self._tables, strict=True):  # all recomputed; the least
            room = _room(np.array([each.min(axis=0) for each in tables]), held)
            if room.sum() >= num_layers:
                break
        found = np.zeros(self._own.size, np.int64)
        for device, number in enumerate(_evened(room, num_layers)):
            first = int((tables[number][:, device] <= held).argmax())
            found[self._own[device]] = self._ways[number][first]
        return tuple(found.tolist())


def _num_ways(num_layers: int, num_stages: int) -> int:
    """The number of ways to distribute layers over stages and to choose which stages recompute."""
    return comb(num_layers + num_stages - 1, num_layers) * 2**num_stages


def _ways(num_layers: int, num_stages: int) -> Iterator[tuple[int, ...]]:
    """Every way to distribute layers over stages."""
    if num_stages == 1:
        yield (num_layers,)
        return
    for first in range(num_layers + 1):
        yield from ((first, *others) for others in _ways(num_layers - first, num_stages - 1))


def _room(known: Ints, bytes_: int) -> Ints:
    """Layers that fit on each device; -1 everywhere if one device is full without any."""
    room: Ints = (known <= bytes_).sum(axis=0) - 1
    return room if (room >= 0).all() else np.full_like(room, -1)


def _evened(room: Ints, num_layers: int) -> list[int]:
    """Layers of each device that sum to `num_layers`: the fullest devices give up layers first."""
    found = room.copy()
    while found.sum() > num_layers:
        found[found.argmax()] -= 1
    return [int(each) for each in found]
