"""Whole layers: the least memory of every plan of a contender, cut and recomputation included, and the plan itself.

Where every stage is whole on one device, and the order follows from no times, what a device holds follows from the
layers of its own stages alone. So for each number of layers its least bytes are those of the best way to part them
among its stages, each recomputed or kept as it is; and the fullest device of the best cut has the least bytes at which
all devices together have room for the model. That is exact where all layers weigh the same, and a bound where not.
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

MOST_WAYS = 20_000  # to part layers among the stages of a device and to choose what runs again: beyond, nobody looks

Ints = npt.NDArray[np.int64]


class Lightest(NamedTuple):
    """The plan whose fullest device holds least."""

    bytes: int
    setting: Setting
    cut: Partition


def lightest(search: Search, is_over: Callable[[], bool]) -> Lightest | None:
    """The lightest plan of a contender, or the first one within the memory.

    None: neither is known. Time was over before, there are too many ways to part layers, or the order follows from
    times, shares stages, or moves what they hold.
    """
    entry, limit = search.contender.entry, search.terms.limits.device_memory_bytes
    if entry.needs_costs or entry.separate_cuts or entry.lower is not None or limit is None:
        return None
    best, is_open = None, False
    for setting in sorted(search.bounds.settings(), key=lambda each: each.microbatch_sequences):
        if is_over():
            return None
        try:
            frame = _frame(search, setting)
        except ValueError:  # the schedule does not take the setting, whatever the cut
            continue
        own = _own_stages(frame)
        found = None if own is None else _lightest_of(frame, own, setting)
        is_open |= found is None
        if found is not None and (best is None or found.bytes < best.bytes):
            best = found
        if best is not None and best.bytes <= limit:
            return best
    return None if is_open else best


def _frame(search: Search, setting: Setting) -> Frame:
    """With as many steps as make a difference to what is in flight: one where each step is drained."""
    problem = posed(search.contender, setting, search.terms, 1)
    cuts = plain_partitions(problem, promising_counts(problem)[0])
    if not cuts:
        raise ValueError("there are fewer layers than stages")
    frame = Frame(search.contender, setting, search.terms, cuts[0], 1)
    if frame.schedule.policy is not Policy.FLUSH:
        frame = Frame(search.contender, setting, search.terms, cuts[0], search.terms.num_steps)
    return frame


def _own_stages(frame: Frame) -> Ints | None:
    """The stages of each device, (devices, stages of one); None where they are shared, come and go, or differ in
    number.
    """
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


def _lightest_of(frame: Frame, own: Ints, setting: Setting) -> Lightest | None:
    """The lightest plan of a setting; None where there are too many ways to part layers."""
    num_layers, limit = frame.terms.model.num_layers, frame.terms.limits.device_memory_bytes or 0
    needs = _Needs(_footprint(frame, setting), own)
    each, least = 0, 0
    while True:  # layers of a device, up to where one more is too many for any
        if comb(each + own.shape[1] - 1, each) * 2 ** own.shape[1] > MOST_WAYS:
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
    """Of as many layers as all devices may be asked for, each as light as the lightest."""
    sizes, analysis = frame.terms.sizes(setting.microbatch_sequences), frame.graph.analysis
    found = Footprint(frame.schedule, sizes, peak_in_flight(frame.graph), keeps=(), analysis=analysis)
    low = LayerSize(*map(min, zip(*sizes.layers, strict=True)))
    return found.of_sizes(replace(sizes, layers=(low,) * sizes.num_layers * frame.schedule.shape.num_ranks))


class _Needs:
    """What devices need at least by their number of layers, and how those are parted among their stages.

    Args:
        own: the stages of each device, (devices, stages of one).
    """

    def __init__(self, footprint: Footprint, own: Ints) -> None:
        self._footprint, self._own = footprint, own
        self.bytes: list[Ints] = []  # of each number of layers, (devices,)
        self._ways: list[Ints] = []  # the same, (ways, stages of one), the most even first
        self._tables: list[tuple[Ints, Ints]] = []  # bytes where all runs again, and at least, (ways, devices)

    def add(self, num_layers: int) -> None:
        """Of so many layers a device, for all devices at once: what one holds is nothing to the others."""
        each = self._own.shape[1]
        ways = np.array(sorted(_ways(num_layers, each), key=max))
        layers = np.zeros((len(ways), self._own.size), np.int64)
        layers[:, self._own] = ways[:, None]
        found = []
        for kept in product((False, True), repeat=each):  # nothing is kept first
            keeps = np.zeros((len(ways), self._own.size), bool)
            keeps[:, self._own] = kept
            found.append(self._footprint.peaks(layers, layers, keeps))
        least = np.min(found, axis=0)
        self.bytes.append(least.min(axis=0))
        self._ways.append(ways)
        self._tables.append((found[0], least))

    def cut(self, num_layers: int, held: int) -> tuple[int, ...]:
        """The layers of each stage of a cut that holds no more: as even as may be, with all made again if it can be."""
        for tables in zip(*self._tables, strict=True):  # all made again; at least
            room = _room(np.array([each.min(axis=0) for each in tables]), held)
            if room.sum() >= num_layers:
                break
        found = np.zeros(self._own.size, np.int64)
        for device, number in enumerate(_evened(room, num_layers)):
            first = int((tables[number][:, device] <= held).argmax())
            found[self._own[device]] = self._ways[number][first]
        return tuple(found.tolist())


def _ways(num_layers: int, num_stages: int) -> Iterator[tuple[int, ...]]:
    """Every way to part layers among stages."""
    if num_stages == 1:
        yield (num_layers,)
        return
    for first in range(num_layers + 1):
        yield from ((first, *others) for others in _ways(num_layers - first, num_stages - 1))


def _room(known: Ints, bytes_: int) -> Ints:
    """Layers that find room on each device; of one that holds too much without any, more than all there are too few."""
    room: Ints = (known <= bytes_).sum(axis=0) - 1
    return room if (room >= 0).all() else np.full_like(room, -1)


def _evened(room: Ints, num_layers: int) -> list[int]:
    """So many layers of each device, of all that find room; those that have most give first."""
    found = room.copy()
    while found.sum() > num_layers:
        found[found.argmax()] -= 1
    return [int(each) for each in found]
