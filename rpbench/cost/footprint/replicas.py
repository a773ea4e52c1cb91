"""Bytes where replicas share a model or keep parts of it on the host: counted from a schedule's actions.

    weights             whole; a shard if they are gathered (UNSHARD); none if they are loaded from the host for a visit
    gathered weights    from UNSHARD and LOAD:P to RESHARD and FREE:P: the peak of those lanes
    gradients           whole; a shard if they are scattered after every visit; none if they are stored (STORE:G)
    gradients on their way   of two successive backward visits: one is computed while the other is scattered or stored;
                        if layers are recomputed one by one, they are gathered and scattered one by one too: two are
                        gathered, and the gradient of one is on its way
    optimizer state     whole; a shard if gradients are scattered; none if the STEP is on the host's lane; twice if a
                        ROLLBACK restores a copy; of important columns only if the host steps the rest: it has all state
                        and the sums of one window, or of two that overlap
    kept by trials      under policy trial: a copy of the optimizer state of the stage that is tried, the largest one,
                        and the gradients of the round before, in shards

Where stages go from device to device (LOAD:P>q), the home of a stage has its weights and optimizer state, and other
devices have the copies they load. The home has the gradient too if sums of groups are sent to it.

A gathered stage includes its device's own shard. Each of n devices sends, keeps and updates 1/n. Classes that stay are
exact; the number of gradients on their way depends on the links, and room for two stages is counted. If sums of whole
gradients overlap with the next round (policy trial), all gradients are counted once more.

Source: Rajbhandari et al., "ZeRO", SC'20, section 5.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from functools import cached_property
from itertools import pairwise
from math import lcm
from typing import Any, NamedTuple, TypeVar

import numpy as np

from rpbench.cost.arrays import Floats, Ints
from rpbench.cost.footprint.sizes import LAYERS_GATHERED, LayerSize, ModelBytes
from rpbench.cost.transfers import StageBytes
from rpbench.ir.action import Kind
from rpbench.ir.analysis import Analysis
from rpbench.ir.checks.residency import inputs_stay, moves_activations
from rpbench.ir.moved_objects import Payload
from rpbench.ir.policy import Policy
from rpbench.ir.schedule import Schedule, Weights
from rpbench.ir.waits.moves import has_transfers

_SHARING = frozenset({Kind.UNSHARD, Kind.REDUCE_GRAD})

Shares = Mapping[int, Fraction | float]  # stage -> the fraction of it on a device
Of = TypeVar("Of")


def shares_or_offloads(schedule: Schedule) -> bool:
    """Whether weights or gradients move between devices, or to the host."""
    moves = has_transfers(schedule) and any(what in ("P", "G") for _, what in schedule.moves)
    return moves or not schedule.kinds.isdisjoint(_SHARING)


def host_bytes(
    schedule: Schedule,
    sizes: ModelBytes,
    analysis: Analysis | None = None,
    shares: "ReplicaShares | None" = None,
    keeps: Sequence[int] | None = None,
) -> int:
    """Bytes in the host's memory: weights loaded for every visit, gradients stored, and state updated there; and the
    most activations of every device that wait there for their backward.

    Streamed schedules have everything there, with a step's inputs for recomputation unless those stay on the device. Of
    objects on SSDs, the host has one layer for each device, in transfer. `analysis` and `shares`: of the same actions,
    if known; they are the same for every cut. `keeps`: as in `StageBytes`.
    """
    cut = schedule.cut
    numbers, of_schedule = range(schedule.shape.num_backward_stages), sizes.under(schedule)
    found = 0
    if schedule.weights is Weights.STREAMED:
        on_host = 0 if inputs_stay(schedule) else sum(sizes.each) or schedule.shape.num_microbatches
        found = round(sizes.boundary * (len(numbers) - 1) * on_host) + _states(of_schedule)
    elif shares_or_offloads(schedule):
        shares = shares or ReplicaShares(analysis or Analysis(schedule))
        stages = StageBytes(cut, of_schedule)
        found = sum(round(_on_host(shares, number, stages.stage(number, backward=True))) for number in numbers)
    elif moves_activations(schedule):
        stages = StageBytes(cut, of_schedule, keeps)
        each = [int(stages.of(Payload("A", number, True, Fraction(1), "d2h"))) for number in numbers]
        hosted = (analysis or Analysis(schedule)).hosted_levels
        found = sum(int((np.array(list(levels)) @ each).max()) for levels in hosted)
    if not schedule.on_ssd:
        return found
    in_transfer = max(_on_ssd(layer, schedule.on_ssd) for layer in of_schedule.every)
    return found - ssd_bytes(schedule.on_ssd, of_schedule).held + in_transfer * schedule.shape.num_ranks


class SsdBytes(NamedTuple):
    """Bytes on the SSDs of a host, and bytes that a step writes there."""

    held: int
    written: int


def ssd_bytes(on_ssd: str, sizes: ModelBytes) -> SsdBytes:
    """Bytes on SSDs for `Schedule.on_ssd`, of the sizes `under` that schedule; only trained weights are written."""
    written = sum(layer.optimizer * ("O" in on_ssd) + layer.gradients * ("P" in on_ssd) for layer in sizes.every)
    return SsdBytes(sum(_on_ssd(layer, on_ssd) for layer in sizes.every), written)


def _on_ssd(layer: LayerSize, on_ssd: str) -> int:
    return layer.optimizer * ("O" in on_ssd) + layer.weights * ("P" in on_ssd)


def _states(sizes: ModelBytes) -> int:
    return sum(sum(layer[:3]) for layer in sizes.every)


def least_host_bytes(analysis: Analysis | None, sizes: ModelBytes) -> int:
    """A lower bound on the host's bytes for every cut: each layer is in the stage with least of it on the host.

    Inputs for recomputation are left out; 0 if there are objects on SSDs. `analysis`: None for any order that streams
    all stages from the host.
    """
    if analysis is None:
        return _states(sizes)
    schedule, sizes = analysis.schedule, sizes.under(analysis.schedule)
    is_streamed = schedule.weights is Weights.STREAMED
    if schedule.on_ssd or not (is_streamed or shares_or_offloads(schedule)):
        return 0
    if is_streamed:
        return _states(sizes)
    shares, numbers = ReplicaShares(analysis), range(schedule.shape.num_backward_stages)
    found = sum(min(_on_host(shares, number, layer) for number in numbers) for layer in sizes.every)
    return max(0, int(found) - len(numbers))  # each stage's bytes are rounded


def _on_host(shares: "ReplicaShares", number: int, size: LayerSize) -> float:
    """Bytes on the host of a stage, or of one of its layers."""
    if number in shares.homes:
        return 0
    rule = shares.rule
    if rule is not None:  # the host steps the rest: it has all masters and moments, and sums of gradients in 32 bits
        if rule.all_at_once and not rule.num_warmup_steps:
            return 0
        return size.optimizer + 2 * size.gradients * rule.rest * (1 + rule.overlap)
    found = size.weights * (not shares.of_weights(0, number))
    found += size.gradients * shares.moves.moves((Kind.STORE, "G"), number)
    return found + size.optimizer * shares.on_host.get(number, False) * shares.num_states(number)


class ReplicaFootprint:
    """Bytes on devices of stages that replicas share or partly keep on the host, for many cuts.

    Attributes:
        weights, gradients, optimizer: the fraction of each stage that stays on a device, (stages, devices).
    """

    def __init__(self, analysis: Analysis) -> None:
        schedule, shares = analysis.schedule, ReplicaShares(analysis)
        self.shares, self._num_stages = shares, schedule.shape.num_stages
        self._tries = schedule.policy is Policy.TRIAL
        self._twins = shares.twins()

        def stays(of: Callable[[int, int], Fraction]) -> Floats:
            rows = self._by_device(lambda device: {stage: of(device, stage) for stage in shares.held(device)})
            return np.stack([self._row(row) for row in rows], 1)

        fractions = shares.of_weights, shares.of_gradients, shares.of_state
        self.weights, self.gradients, self.optimizer = map(stays, fractions)
        self._gathered = self._by_device(
            lambda device: [self._rows(shares.arrivals(device, lane)) for lane in ("net", "h2d")]
        )
        self._passing = self._by_device(lambda device: self._rows(shares.passing(device)))
        self._by_visit = bool(shares.gathered_by_visit)

    def _by_device(self, of: Callable[[int], Of]) -> list[Of]:
        """A value of every device, computed once for twins."""
        known = {twin: of(twin) for twin in dict.fromkeys(self._twins)}
        return [known[twin] for twin in self._twins]

    def classes(self, stages: LayerSize, sizes: ModelBytes) -> dict[str, Ints]:
        """Bytes at the peak of each class that does not stay, (plans, devices)."""
        gathered = self._by_device(lambda device: sum(_peak(stages.weights, lane) for lane in self._gathered[device]))
        passing = self._by_device(lambda device: _peak(stages.gradients, self._passing[device]))
        if sizes.by_layer:
            layer = _largest_layer(sizes)
            if self._by_visit:
                of_layers = np.minimum(stages.weights, layer.weights)
                gathered = [LAYERS_GATHERED * layer.weights + _peak(of_layers, lanes[1]) for lanes in self._gathered]
            if not self._tries:
                passing = [np.full(len(stages.weights), layer.gradients * each.any()) for each in self._passing]
        found: dict[str, list[Any]] = {"gathered weights": gathered, "gradients on their way": passing}
        if self._tries:
            found["kept by trials"] = [
                (stages.optimizer * own).max(axis=1) + stages.gradients @ own for own in self.optimizer.T
            ]
        return {name: np.rint(np.stack(columns, axis=1)).astype(np.int64) for name, columns in found.items()}

    def least_bytes(self, sizes: ModelBytes) -> int:
        """A lower bound on the bytes of the fullest device, for every cut of the layers."""
        total = LayerSize(*(sum(each) for each in zip(*sizes.every, strict=True)))
        found: float = sizes.logits * sum(self._num_stages - 1 in own for own in self._by_device(self.shares.held))
        for name in ("weights", "gradients", "optimizer"):
            found += getattr(self, name).sum(axis=1).min() * getattr(total, name)
        layer = _largest_layer(sizes)
        for lanes, passing in zip(self._gathered, self._passing, strict=True):
            if sizes.by_layer and self._by_visit:
                found += LAYERS_GATHERED * layer.weights
            else:
                found += sum(map(_least_at_peak, lanes)) * total.weights
            if sizes.by_layer and not self._tries:
                found += layer.gradients * passing.any()
            else:
                found += _least_at_peak(passing) * total.gradients
        return int(found / len(self._gathered))

    def _row(self, shares: Shares) -> Floats:
        row = np.zeros(self._num_stages)
        for stage, share in shares.items():
            row[stage] = share
        return row

    def _rows(self, moments: Sequence[Shares]) -> Floats:
        rows = {tuple(shares.get(stage, 0) for stage in range(self._num_stages)) for shares in moments}
        return np.array(sorted(rows or {(0,) * self._num_stages}), np.float64)


def _largest_layer(sizes: ModelBytes) -> LayerSize:
    return LayerSize(*(max(each) for each in zip(*sizes.layers, strict=True)))


def _peak(sizes: Ints, moments: Floats) -> Floats:
    """The most bytes at any moment, (plans,)."""
    found: Floats = (sizes @ moments.T).max(axis=1)
    return found


def _least_at_peak(moments: Floats) -> float:
    """A lower bound on the fraction of all bytes at the peak: the least stage at one moment, or the mean of moments."""
    return float(max(moments.min(axis=1).max(), moments.mean(axis=0).min()))


class ReplicaShares:
    """The fraction of every stage that stays on a device, and those in transfer at each moment."""

    def __init__(self, analysis: Analysis) -> None:
        self._index, self.moves, self._visits = analysis.index, analysis.moves, analysis.visits
        self.homes = self.moves.handovers.homes  # stage -> its home, where it goes from device to device
        self._grouped = {stage for stage, _ in self.moves.handovers.grouped}  # whose home sums gradients of groups
        self.on_host = {  # stage -> whether the host updates it
            self._index.actions[number].stage: self._index.lanes[self._index.lane_of[number]].name == "host"
            for number in self._index.steps.values()
        }
        self._loaded = {stage for _, stage in self._served_by_visit((Kind.LOAD, "P"))} | self.homes.keys()
        self.rule = analysis.schedule.late_rest
        self.gathered_by_visit = self._served_by_visit((Kind.UNSHARD, None))
        self._leaving = self._served_by_visit((Kind.REDUCE_GRAD, None), (Kind.STORE, "G"))
        self._stored_by_visit = self._served_by_visit((Kind.STORE, "G"))
        if self.rule is not None:  # a sum that is scattered by visits may be stored by steps
            self._leaving = self._served_by_visit((Kind.REDUCE_GRAD, None)) | self._stored_by_visit
        self._payload = analysis.payload
        self._tries = analysis.schedule.policy is Policy.TRIAL

    def held(self, device: int) -> list[int]:
        return sorted({visit.stage for visit in self._visits[device]})

    def twins(self) -> list[int]:
        """For each device, the first one with the same parts of the same stages and the same transfers."""
        units, keys = self._arrivals[0], list[Any]()
        by_visit = (self._leaving, self._stored_by_visit)
        for device, visits in enumerate(self._visits):
            lanes = [self._lane(device, name) for name in ("net", "h2d")]
            brought = [[units.get(number) for number in lane] for lane in lanes]
            moved = [self._index.actions[lane.start : lane.stop] for lane in lanes]
            made = [(visit.stage, visit.last_gradient >= 0) for visit in visits]
            at_home = {stage for stage, home in self.homes.items() if home == device}
            keys.append((made, at_home, brought, moved, *({s for d, s in found if d == device} for found in by_visit)))
        return [keys.index(key) for key in keys]

    def of_weights(self, device: int, stage: int) -> Fraction:
        """The fraction of a stage's weights that stays on a device."""
        if stage in self.homes:
            return Fraction(int(self.homes[stage] == device))
        if stage in self._loaded:
            return Fraction(0)
        gathered = self.moves.moves((Kind.UNSHARD, None), stage)
        return Fraction(1, self.moves.replicas.get(stage, 1)) if gathered else Fraction(1)

    def of_gradients(self, device: int, stage: int) -> Fraction:
        """The fraction of a stage's gradients that stays on a device."""
        if stage in self._grouped:
            return Fraction(int(self.homes[stage] == device))
        stored = self.moves.moves((Kind.STORE, "G"), stage)
        leaves = stored or self.moves.moves((Kind.UNSHARD, None), stage)  # sums of whole replicas stay
        if not leaves or (device, stage) not in self._leaving:
            return Fraction(1)
        shard = Fraction(1, self.moves.replicas.get(stage, 1))
        if self.rule is not None:  # gradients of the device's own columns stay, and all that are stored once per step
            return shard * (1 - self.rule.rest if (device, stage) in self._stored_by_visit else 1)
        return Fraction(0) if stored else shard

    def of_state(self, device: int, stage: int) -> Fraction:
        """The fraction of a stage's optimizer state that stays on a device."""
        if stage in self.homes:
            return Fraction(int(self.homes[stage] == device))
        shared = self.moves.moves((Kind.UNSHARD, None), stage)
        whole = Fraction(self.num_states(stage), self.moves.replicas.get(stage, 1) if shared else 1)
        if self.rule is not None:
            return whole * (1 - self.rule.rest)
        return Fraction(0) if self.on_host.get(stage, False) else whole

    def num_states(self, stage: int) -> int:
        """Copies of a stage's optimizer state: two if a ROLLBACK restores one."""
        return 1 + any(stage == other for other, _ in self._index.rollbacks)

    def _served_by_visit(self, *kinds: tuple[Kind, str | None]) -> set[tuple[int, int]]:
        """(device, stage) whose transfers of some kinds each serve one visit only."""
        served = [visits for what in kinds for _, visits, _ in self.moves.transfers[what]]
        several = {(visits[0][0], visits[0][2]) for visits in served if len(visits) > 1}
        return {(visits[0][0], visits[0][2]) for visits in served} - several

    @cached_property
    def _arrivals(self) -> tuple[dict[int, int], int]:
        """Number of each action that brings weights for a visit -> their units, and the units of a whole stage."""
        actions, loaded = self._index.actions, self._loaded
        found = {
            number: payload
            for number, payload in self._payload.items()
            if actions[number][0] is Kind.UNSHARD or (payload[0] == "P" and payload[1] in loaded)
        }
        distinct = {id(payload): payload for payload in found.values()}  # few, as fractions are slow
        shares = {key: Fraction(1) if own.stage in self.homes else own.share for key, own in distinct.items()}
        whole = lcm(*(share.denominator for share in shares.values()))
        units = {key: share.numerator * (whole // share.denominator) for key, share in shares.items()}
        return {number: units[id(payload)] for number, payload in found.items()}, whole

    def arrivals(self, device: int, name: str) -> list[Shares]:
        """The weights that a lane has brought and not freed, after each action that brings some; each case once."""
        units, whole = self._arrivals
        brought: dict[int, deque[int]] = defaultdict(deque)  # stage -> units of each copy, oldest first
        there: dict[int, int] = {}  # stage -> units of all copies
        moments: set[tuple[tuple[int, int], ...]] = set()
        for number in self._lane(device, name):
            kind, stage, _, part, _, what, _, _ = self._index.actions[number]
            if number in units:
                if part == 0:
                    brought[stage].append(0)
                brought[stage][-1] += units[number]
                there[stage] = there.get(stage, 0) + units[number]
                moments.add(tuple(sorted(there.items())))
            elif (kind is Kind.RESHARD or what == "P") and brought[stage]:
                there[stage] -= brought[stage].popleft()
                if not brought[stage]:
                    del there[stage]
        return [{stage: part / whole for stage, part in moment} for moment in moments]

    def _lane(self, device: int, name: str) -> range:
        found = (lane for lane in self._index.lanes if (lane.device, lane.name) == (device, name))
        return next((range(lane.start, lane.stop) for lane in found), range(0))

    def passing(self, device: int) -> list[Shares]:
        """Gradients of two successive backward visits, if they leave after each visit; each case once."""
        made = [visit.stage for visit in self._visits[device] if visit.last_gradient >= 0]
        if self._tries and any(self.of_gradients(device, stage) == 1 for stage in set(made)):
            return [dict.fromkeys(made, Fraction(1))]  # all of the round before
        share = {stage: int(self.of_gradients(device, stage) < 1) for stage in set(made)}
        pairs = [
            {first: share[first] * (1 + (first == second)), second: share[second] * (1 + (first == second))}
            for first, second in dict.fromkeys(pairwise(made))
        ]
        return [*pairs, {stage: share[stage] for stage in made[-1:]}]
