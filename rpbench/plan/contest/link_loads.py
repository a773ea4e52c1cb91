"""Loads of links: the least seconds for which the transfers of a step occupy links, whatever the cut.

Each stage's weights, gradients and optimizer state cross a link a number of times; a layer counts as often as those of
the stage that crosses least. Moved activations do not count, for a cut decides how many stages keep them. At best all
devices share the load evenly; a shared link carries all of it (`rpbench.sim.shared_links`).
"""

from collections import Counter, defaultdict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from rpbench.cost.arrays import Floats
from rpbench.cost.charges import CHARGES
from rpbench.cost.footprint.sizes import LayerSize, ModelBytes, saved_state
from rpbench.ir.analysis import Analysis, analysed
from rpbench.ir.schedule import Schedule
from rpbench.plan.contest.contender import Contender, Setting
from rpbench.plan.contest.frame import posed
from rpbench.plan.contest.terms import Terms
from rpbench.plan.counts import plain_partitions, promising_counts
from rpbench.plan.problem import Problem
from rpbench.workload.counts import BYTES_PER_VALUE

BY_STAGE = ("boundary", "sum")  # objects whose size does not depend on the layers of their stage
NOT_STRAIGHT = 1e-9  # largest distance from a straight line


class Crossing(NamedTuple):
    """One kind of transfer: an object of forward or backward stages on a link."""

    object: str
    lane: str  # the link
    backward: bool
    stands_in: str  # the device's lane that has the action; a tensor between devices has a lane at both ends


Crossings = Mapping[Crossing, Floats]  # how often each stage crosses in a step, all devices together, (stages,)


class LinkLoads:
    """The loads of one contender's settings, from a few short orders with all their transfers.

    The crossings of steps with few microbatches are extended to more if they lie on a straight line; else the whole
    order is made.
    """

    def __init__(self, contender: Contender, terms: Terms) -> None:
        self._contender, self._terms = contender, terms
        self._known: dict[tuple[object, ...], dict[int, Analysis | None]] = {}
        self._crossings: dict[int, Crossings] = {}

    def short(self, setting: Setting, most: int = 3) -> list[Analysis]:
        """The first `most` orders of a step with n, 2n and 3n microbatches, n the fewest, without refused ones.

        Microbatch size, recomputation and prefetching do not matter.
        """
        known = self._known.setdefault((setting.chunks_per_device, setting.options), {})
        fewest = self._terms.num_microbatches(max(self._terms.microbatches))
        for times in range(1, most + 1):
            if times not in known:
                problem = posed(self._contender, setting, self._terms, 1)
                known[times] = None
                with suppress(ValueError):
                    known[times] = analysed(_with_transfers(replace(problem, num_microbatches=times * fewest)))
        return [found for times in range(1, most + 1) if (found := known[times]) is not None]

    def least_seconds(self, setting: Setting, num_microbatches: int) -> float:
        """Least seconds of a step, from the busiest link; ValueError if the schedule does not take the setting."""
        known, found = self.short(setting), None
        if len(known) == 3:
            at = [(each.schedule.shape.num_microbatches, self._of(each)) for each in known]
            found = extended(at, num_microbatches)
        if found is None:
            known = [analysed(_with_transfers(posed(self._contender, setting, self._terms, 1)))]
            found = crossings(known[0])
        sizes = self._terms.sizes(setting.microbatch_sequences).under(known[0].schedule)
        return least_seconds(found, sizes, self._terms)

    def _of(self, analysis: Analysis) -> Crossings:
        if id(analysis) not in self._crossings:
            self._crossings[id(analysis)] = crossings(analysis)
        return self._crossings[id(analysis)]


def _with_transfers(problem: Problem) -> Schedule:
    return problem.finished(problem.order(plain_partitions(problem, promising_counts(problem)[0])[0]))


def crossings(analysis: Analysis) -> Crossings:
    """The crossings of one step of a schedule with all its transfers."""
    shape, found = analysis.schedule.shape, defaultdict[Crossing, Floats](lambda: np.zeros(0))
    lanes, lane_of = analysis.index.lanes, analysis.index.lane_of
    moved = Counter((payload, lanes[lane_of[number]].name) for number, payload in analysis.payload.items())
    for (payload, lane), number in moved.items():
        key = Crossing(payload.object, payload.lane, payload.backward, lane)
        if key not in found:
            found[key] = np.zeros(shape.num_backward_stages if payload.backward else shape.num_stages)
        found[key][payload.stage] += number * float(payload.share) / shape.num_steps
    return found


def extended(known: list[tuple[int, Crossings]], num_microbatches: int) -> Crossings | None:
    """The crossings of more microbatches, from three smaller numbers of them; None unless all lie on straight lines."""
    (first, at_first), (second, at_second), (third, at_third) = known[:3]
    found = dict[Crossing, Floats]()
    for key in at_first.keys() | at_second.keys() | at_third.keys():
        begun, later, last = (at.get(key, np.zeros(1)) for at in (at_first, at_second, at_third))
        each = (later - begun) / (second - first)
        if np.abs(begun + each * (third - first) - last).max() > NOT_STRAIGHT:
            return None
        found[key] = begun + each * (num_microbatches - first)
    return found


def least_seconds(found: Crossings, sizes: ModelBytes, terms: Terms) -> float:
    """Least seconds of the busiest link."""
    cluster, num, own = terms.cluster, terms.num_devices, defaultdict[str, float](float)
    moved = defaultdict[str, float](float)  # bytes by lane
    for key, shares in found.items():
        carried = _least_bytes(key, shares, sizes, terms)
        moved[key.lane] += carried
        collective = key.lane == "net" and CHARGES[key.object].exchanged and cluster.collective_bytes_per_s
        pace = collective or (None if key.lane == "host" else cluster.link_bytes_per_s(key.lane))
        own[key.stands_in] += carried / (pace * num) if pace else 0.0
    memory = cluster.shared_host_bytes_per_s
    shared = [sum(moved[lane] for lane in ("h2d", "d2h", "host")) / memory] if memory else []
    if cluster.devices_per_root_complex is not None and cluster.root_complex_bytes_per_s is not None:
        complexes = -(-num // cluster.devices_per_root_complex)
        shared += [moved[lane] / (complexes * cluster.root_complex_bytes_per_s) for lane in ("h2d", "d2h")]
    return max([*own.values(), *shared], default=0.0)


def _least_bytes(key: Crossing, shares: Floats, sizes: ModelBytes, terms: Terms) -> float:
    """Bytes of all devices, if every layer were in the stage that crosses least."""
    if key.object in BY_STAGE:
        seen = 1 - terms.optimizer.hidden_sums if key.object == "sum" else 1.0
        return float(shares.sum()) * sizes.boundary * seen
    if key.object not in ("P", "G", "O"):
        return 0.0
    times = [*[float(shares.min())] * sizes.num_layers, float(shares[0]), float(shares[-1])]
    return sum(number * _bytes_of(key, size, sizes, terms) for number, size in zip(times, sizes.every, strict=True))


def _bytes_of(key: Crossing, size: LayerSize, sizes: ModelBytes, terms: Terms) -> float:
    """Bytes of a layer; as `rpbench.cost.transfers.TransferTimes.bytes_of`."""
    found = float(CHARGES[key.object].bytes_of(size, sizes))
    if key.lane == "host":
        return terms.optimizer.host_bytes(found, saved_state(size))
    if key.object == "G" and key.lane == "net":
        return found * sizes.reduced_bytes / BYTES_PER_VALUE
    return found
