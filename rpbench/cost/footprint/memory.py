"""Bytes on a device by class of tensor, for weights bound to a device and for weights streamed through it.

    bound      weights, gradients and optimizer state of every stage of the device, older versions of trained weights
               that a policy stashes, the input of every stage and microbatch in flight, the recomputed activations of
               one stage, logits; with a sharded head, logits of every microbatch that waits for the other shards;
               with backward in halves, activations of microbatches that wait for the second half
    streamed   weights of the stage that runs and of those prefetched (the next one, unless transfers differ),
               gradients of the stage that runs, its recomputed activations, boundary tensors double-buffered both
               ways, a chunk of logits

`rpbench.cost.footprint.replicas` counts stages that replicas share or keep on the host.

Both recompute everything from the input of a stage. Where layers of bound stages are not recomputed, the activations of
every microbatch in flight, and logits in the last stage, replace saved inputs and recomputed activations. Mixed
precision: weights and gradients in 16 bits; the optimizer (Adam) keeps master weights and two moments in 32 bits, on
the device when bound, on the host when streamed, where the saved inputs of streamed stages are too. Working memory of
kernels and allocator is left out.

Source: bytes per parameter as in Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion
Parameter Models", SC'20, section 3.1; streamed tensors as in the released library of RoundPipe
(arXiv 2604.27085).
"""

import re
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from itertools import accumulate, chain, pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from rpbench.cost.arrays import Floats, Ints
from rpbench.cost.charges import CHARGES
from rpbench.cost.footprint import replicas
from rpbench.cost.footprint.fitting import Moments, columns_of, fitting_layers, levels_of, waiting_halves
from rpbench.cost.footprint.sizes import LayerSize, ModelBytes
from rpbench.ir.action import HEAD, Action, Kind
from rpbench.ir.analysis import Analysis
from rpbench.ir.checks.residency import inputs_stay, moves_activations, peak_kept_inputs, prefetch_depth
from rpbench.ir.policy import Policy
from rpbench.ir.schedule import Schedule, Weights
from rpbench.passes.lower import add_steps
from rpbench.workload.counts import BYTES_PER_VALUE
from rpbench.yaml_file import read_keys

BOUNDARY_BUFFERS = 4  # boundary tensors of a streamed stage: two arrive, two leave
STAYING_BUFFERS = 2  # a stage's input and output, where neither leaves the device

# Under these policies a backward reads the weights of its forward, which may not be the newest.
_STASHING = frozenset({Policy.STASH, Policy.VERTICAL, Policy.TWO_BW})
_OF_RECOMPUTING = ("kept stage inputs", "recomputed activations", "activations between halves", "logits")


def classes_of(
    schedule: Schedule,
    sizes: ModelBytes,
    in_flight: Sequence[int],
    keeps: Sequence[int] | None = None,
    analysis: Analysis | None = None,
) -> list[dict[str, int]]:
    """Bytes of each class of tensors at the peak of every device; ValueError if the schedule has no partition.

    Args:
        in_flight: most stage inputs at a time on each device of a bound schedule (`rpbench.sim.memory.peak_in_flight`).
        keeps: layers of each backward stage whose activations are saved; empty: none; None: all or none, by
            `sizes.keeps_activations`.
        analysis: of the schedule, if there is one already.
    """
    cut = schedule.cut
    footprint = Footprint(schedule, sizes, in_flight, keeps, analysis)
    tables = footprint.classes(np.array([cut.forward]), np.array([cut.backward]))
    devices = range(schedule.shape.num_ranks)
    return [{name: int(table[0, device]) for name, table in tables.items()} for device in devices]


class Footprint:
    """Peak bytes of partitions with the same numbers of stages, under one schedule.

    If replicas share stages or keep parts of them on the host, the schedule must have its transfers.
    """

    def __init__(
        self,
        schedule: Schedule,
        sizes: ModelBytes,
        in_flight: Sequence[int],
        keeps: Sequence[int] | None = None,
        analysis: Analysis | None = None,
    ) -> None:
        """The arguments of `classes_of`."""
        self._schedule, self._analysis = schedule, analysis or Analysis(schedule)
        self._take(sizes)
        self._keeps = keeps
        self._streamed = schedule.weights is Weights.STREAMED
        self._in_flight = np.asarray(in_flight, np.int64)
        devices = range(schedule.shape.num_ranks)
        self._visits = [_visits(schedule.compute(device)) if self._streamed else [] for device in devices]
        self._depth = prefetch_depth(schedule) if self._streamed else 1
        self._holds = _holds(schedule)
        self._kept_inputs = [peak_kept_inputs(schedule, device) for device in devices] if inputs_stay(schedule) else []
        self._tensor_shards = schedule.shape.num_ranks if schedule.shape.tensor_parallel else 1
        self._along_sequence = schedule.shape.sequence_parallel
        self._fused, self._num_head_shards = schedule.shape.fused, schedule.shape.num_head_shards
        self._waiting_shards = [_most_waiting(schedule.compute(device)) for device in devices if self._num_head_shards]
        self._num_states = 1 + (Kind.ROLLBACK in schedule.kinds)  # ROLLBACK restores a copy
        shares = not self._streamed and replicas.shares_or_offloads(schedule)
        self._more_versions = np.array([] if self._streamed else _kept_versions(self._analysis), np.int64) - 1
        self._known_moments = list[Moments]()  # made on demand, also for copies
        self._rests = list[Ints]()  # 1 where a stage's activations rest on a device at some moment; the same
        self._between_halves: Moments | None = None
        if not self._streamed and not schedule.kinds.isdisjoint({Kind.W, Kind.OVERLAP}):
            self._between_halves = Moments(waiting_halves(schedule, sizes.each))
        self._replicas = replicas.ReplicaFootprint(self._analysis) if shares else None
        if sizes.each and not (shares or self._streamed or moves_activations(schedule)):
            self._in_flight = np.array([levels.sum(axis=1).max() for levels in levels_of(self._analysis, sizes.each)])

    @property
    def shares(self) -> replicas.ReplicaShares | None:
        """Fractions of stages on devices, for every cut; None if replicas neither share nor offload them."""
        return None if self._replicas is None else self._replicas.shares

    def _take(self, sizes: ModelBytes) -> None:
        self._per_trained = sizes.summed_bytes // BYTES_PER_VALUE  # of a gradient over those of its weight
        sizes = sizes.under(self._schedule).added_up
        shape = self._schedule.shape
        if shape.num_parts > 1 and not shape.tensor_parallel:  # an action runs a segment of every sequence
            sizes = sizes.of_part(1 / shape.num_parts)
        self._sizes = sizes
        self._embedding, self._head = np.array([sizes.embedding, sizes.head])
        below = np.zeros((1, len(LayerSize._fields)), np.int64)
        self._most_activations = max(layer.activations for layer in sizes.layers)
        self._running: Ints = np.concatenate([below, np.cumsum(sizes.layers, axis=0)]).T  # (sizes, layers + 1)

    @property
    def least_bytes(self) -> int:
        """A lower bound on the bytes of the fullest device, for every cut of the layers.

        The fullest device holds no less than any weighted mean of all devices. A device weighs more the fewer bytes a
        layer takes there, so that an even cut meets the bound; each layer is where it adds least to the mean.
        """
        if self._streamed:
            return 0
        if self._replicas is not None:
            return self._replicas.least_bytes(self._sizes)
        each = self._staying(self._sizes.layers)
        lightest = np.where(self._holds > 0, each.mean(axis=0)[:, None], np.inf).min(axis=0)  # a layer, by device
        weights = np.where(np.isfinite(lightest) & (lightest > 0), 1 / lightest, 0.0)
        if not weights.any():
            return 0
        counted = self._holds @ (weights / weights.sum())  # what a byte of a stage adds to the mean
        found = (each * counted).min(axis=1).sum()
        if not self._num_head_shards:
            ends = self._staying((self._embedding, self._head))
            found += ends[0, 0] * counted[0] + ends[1, -1] * counted[-1]
        return int(found / self._tensor_shards)

    def staying(self) -> tuple[Floats, tuple[float, float]]:
        """Least bytes of a layer that stay on the device of each stage, (stages,), and those of embedding and head."""
        ends = self._staying((self._embedding, self._head))
        return self._staying(self._sizes.layers).min(axis=0), (ends[0, 0], ends[1, -1])

    def moments(self) -> list[Ints]:
        """Microbatches in flight of each stage at the peaks, for each device, (moments, stages)."""
        return levels_of(self._analysis, (), (self._sizes.until_weights,))

    def between_halves(self) -> list[Any]:
        """Microbatches between I and W at the peaks, counted by the fraction that W frees; empty without halves."""
        halves = [] if self._between_halves is None else waiting_halves(self._analysis.schedule)
        return [self._sizes.until_weights * each for each in halves]

    def _staying(self, sizes: Sequence[LayerSize]) -> Floats:
        """Bytes of layers that stay on the device of each stage, (layers, stages)."""
        weights, gradients, optimizer = np.array(sizes, np.float64).T[:3]
        stashed = np.outer(gradients / self._per_trained, self._more_versions)
        return stashed + (weights + gradients + optimizer * self._num_states)[:, None]

    def keeping(self, keeps: Sequence[int] | None) -> "Footprint":
        """The footprint with saved activations of so many layers of each backward stage; empty: none; None: all."""
        found = copy(self)
        found._keeps = keeps
        if keeps is None:
            found._sizes = replace(found._sizes, keeps_activations=True)
        return found

    def of_sizes(self, sizes: ModelBytes) -> "Footprint":
        found = copy(self)
        found._take(sizes)
        return found

    def peaks(self, forward: Ints, backward: Ints, keeps: Ints | None = None) -> Ints:
        """Bytes on each device, (plans, devices); arguments as in `classes`."""
        total: Ints = sum(self.classes(forward, backward, keeps).values(), start=np.zeros((), np.int64))
        return total

    def classes(self, forward: Ints, backward: Ints, keeps: Ints | None = None) -> dict[str, Ints]:
        """Bytes of each class at the peak, (plans, devices).

        Args:
            forward: layers of each forward stage, (plans, forward stages).
            backward: layers of each backward stage, (plans, backward stages).
            keeps: of these, the layers whose activations are saved, the last of their stage; None: the footprint's own.
        """
        below = self._stages(backward, has_head=True)
        everything = keeps is None and self._keeps is None and self._sizes.keeps_activations
        if keeps is None:
            keeps = backward * self._sizes.keeps_activations
            if self._keeps is not None:
                keeps = 0 * backward + (np.array(self._keeps) if len(self._keeps) else 0)
        held = self._of_activations(below, backward, keeps, everything=everything)
        return self._without_activations(forward, below) | held

    def _without_activations(self, forward: Ints, below: LayerSize) -> dict[str, Ints]:
        """Classes that do not depend on recomputation; of streamed stages all."""
        if self._streamed:
            found = self._streamed_classes(self._stages(forward, has_head=not self._fused), below)
            if self._kept_inputs:
                inputs = np.array(self._kept_inputs) * self._sizes.boundary
                found["kept stage inputs"] = np.tile(inputs, (len(forward), 1))
        else:
            found = self._sharded(self._states(below))
            if self._replicas is not None:
                found |= self._replicas.classes(below, self._sizes)
            if self._sizes.working:
                found["working set"] = np.full((len(below.weights), self._holds.shape[1]), self._sizes.working)
        for name, charge in CHARGES.items():
            if not charge.ends.isdisjoint(self._analysis.schedule.kinds):
                each = charge.bytes_of(below, self._sizes) + 0 * below.weights  # (plans, stages)
                found[f"{name} buffers"] = (each[:, :, None] * self._holds[: each.shape[1]]).max(axis=1)
        return found

    def _sharded(self, found: dict[str, Ints]) -> dict[str, Ints]:
        """The classes of a device that has a shard of every tensor, under tensor parallelism."""
        for name in found if self._tensor_shards > 1 and self._replicas is None else ():
            if self._along_sequence or name != "kept stage inputs":  # inputs are cut by sequence parallelism alone
                found[name] = -(-found[name] // self._tensor_shards)
        return found

    def _of_activations(
        self, stages: LayerSize, layers: Ints, keeps: Ints, *, everything: bool = False
    ) -> dict[str, Ints]:
        """Classes with saved activations of all microbatches in flight in some layers, and inputs of the others.

        The head saves its logits if a layer of its stage saves activations, or with `everything`; else it runs just
        before its backward. Without layers on its stage it saves its input, and saves logits if that takes less.
        `keeps`: (..., plans, stages), for several choices at once; then classes are (..., plans, devices).
        """
        if self._streamed:
            return {}
        if not (everything or keeps.any()):
            return self._recomputed(stages)
        in_halves = self._between_halves is not None  # then I frees the inputs of recomputed layers
        ends = np.cumsum(layers, axis=1)
        *_, kept, inputs = (running[ends] - running[ends - keeps] for running in self._running)
        again = stages._replace(activations=stages.activations - kept, inputs=stages.inputs - inputs)
        has_head = not self._num_head_shards
        alone = (layers[:, -1:] == 0) & has_head
        with_logits = (((keeps[..., -1:] > 0) | everything) & has_head) | alone
        with_input = keeps < layers
        with_input[..., -1:] |= alone
        every, some = (keeps == layers).all(axis=-1, keepdims=True), keeps.any(axis=-1, keepdims=True) | everything
        saved = np.maximum(again.inputs, self._sizes.boundary) * with_input
        logits = self._sizes.logits * with_logits
        apart = in_halves and self._sizes.by_layer
        held = [kept, logits, saved] if apart else [kept + saved, logits, *([0 * saved] if in_halves else ())]
        each = np.concatenate(held, axis=-1)
        peaks = self._moments_in_flight[0].peaks(each)
        found = self._recomputed(again)
        if alone.any() and not everything:
            each[..., kept.shape[-1]] = 0
            waits = self._moments_in_flight[0].peaks(each)
            less = alone & (waits + found["logits"] < peaks)
            peaks, with_logits = np.where(less, waits, peaks), with_logits & ~less
        dropped = dict.fromkeys(_OF_RECOMPUTING, every) | {"kept stage inputs": some, "logits": with_logits & some}
        for name in dropped.keys() & found.keys():
            found[name] = found[name] * ~dropped[name]
        return {name: table for name, table in found.items() if table.any()} | {"activations": peaks * some}

    def fitting(self, forward: Ints, backward: Ints, limit_bytes: int | None) -> Ints:
        """The layers of each backward stage that are not recomputed, as many as fit the memory, (plans, stages)."""
        holds = self._holds[: backward.shape[1]]
        if moves_activations(self._analysis.schedule):  # a partner of its device may have a stage's activations too
            if not self._rests:
                self._rests.append(np.array([levels.any(axis=0) for levels in self.moments()]).T)
            holds = holds | self._rests[0]
        below = self._stages(backward, has_head=True)
        others: Any = sum(self._without_activations(forward, below).values())

        def peak_bytes(keeps: Ints) -> Ints:
            none = np.zeros((*keeps.shape[:-1], 1), np.int64)
            return sum(self._of_activations(below, backward, keeps).values(), start=others + none)

        return fitting_layers(peak_bytes, backward, holds, limit_bytes)

    def _stages(self, counts: Ints, *, has_head: bool) -> LayerSize:
        ends = np.cumsum(counts, axis=1)
        sums = self._running[:, ends] - self._running[:, ends - counts]  # (sizes of a layer, plans, stages)
        if self._num_head_shards:  # embedding and head are sharded by vocabulary
            sums += -(-(self._embedding + self._head) // self._num_head_shards)[:, None, None]
        else:
            sums[:, :, 0] += self._embedding[:, None]
            sums[:, :, -1] += self._head[:, None] * has_head
        return LayerSize(*sums)

    def _states(self, stages: LayerSize) -> dict[str, Ints]:
        held, shares, more_versions = self._holds, self._replicas, self._more_versions
        parts: tuple[Any, ...] = (held, held, held * self._num_states)
        if shares is not None:
            parts, more_versions = (shares.weights, shares.gradients, shares.optimizer), 0 * more_versions
        states = [stage @ part for stage, part in zip(stages[:3], parts, strict=True)]
        weights, gradients, optimizer = states if shares is None else np.rint(states).astype(np.int64)
        trained = stages.gradients // self._per_trained  # of frozen weights there is one version
        stashed = {"stashed weights": (trained * more_versions) @ held} if more_versions.any() else {}
        return {"weights": weights, **stashed, "gradients": gradients, "optimizer state": optimizer}

    def _recomputed(self, stages: LayerSize) -> dict[str, Ints]:
        """Inputs of the stages, recomputed activations, those between I and W, and logits, where all is recomputed.

        If layers are recomputed one by one, their inputs, and one layer at a time.
        """
        held, again, boundary = self._holds, stages.activations, self._sizes.boundary
        plans = again.shape[:-1]
        if self._sizes.by_layer:
            inputs = self._moments_in_flight[1].peaks(np.maximum(stages.inputs, boundary))
            again = np.minimum(again, self._most_activations)
        else:
            inputs = np.tile(self._in_flight * boundary, (*plans, 1)).astype(np.int64)
        logits = self._sizes.logits * held[again.shape[-1] - 1]
        if self._num_head_shards:
            logits = np.array(self._waiting_shards) * -(-self._sizes.logits // self._num_head_shards)
        found = {
            "kept stage inputs": inputs,
            "recomputed activations": (again[..., None] * held).max(axis=-2, initial=0),
            "logits": np.tile(logits, (*plans, 1)),
        }
        if self._between_halves is not None and self._between_halves.hold_anything:
            waiting = self._between_halves.peaks(stages.activations) * self._sizes.until_weights
            found["activations between halves"] = waiting.astype(np.int64)
        return self._sharded(found)

    @property
    def _moments_in_flight(self) -> list[Moments]:
        """Of saved activations, logits and stage inputs; and of the inputs of layers recomputed one by one."""
        if not self._known_moments:
            sizes, num_stages = self._sizes, self._analysis.schedule.shape.num_stages
            in_halves = self._between_halves is not None  # then I frees inputs
            parts = sizes.until_weights, sizes.logits_until_weights, *((0.0,) if in_halves else ())
            levels = levels_of(self._analysis, sizes.each, parts)
            own = slice(-num_stages, None) if in_halves else slice(num_stages)
            self._known_moments.append(Moments(levels))
            self._known_moments.append(Moments([each[:, own] for each in levels]))
        return self._known_moments

    def _streamed_classes(self, up: LayerSize, down: LayerSize) -> dict[str, Ints]:
        """Classes at the visit with the most bytes; a visit includes the stages that are prefetched during it."""
        plans, num_up = up.weights.shape
        none = num_up + down.weights.shape[1]  # a column of zeros after forward and backward stages: no stage
        runs = [_with_next(device, self._depth) for device in self._visits]
        columns = [none if visit is None else visit[1] + num_up * visit[0] for run in chain(*runs) for visit in run]
        current, *after = np.array(columns).reshape(-1, self._depth + 1).T
        with_head = (current == none - 1) | ((current == num_up - 1) & (not self._fused))
        zeros = np.zeros_like(up.weights)
        states = ((up.weights, down.weights), (zeros, down.gradients), (zeros, down.activations))
        weights, gradients, activations = (np.concatenate([*state, zeros[:, :1]], axis=1) for state in states)
        buffers = STAYING_BUFFERS if self._kept_inputs else BOUNDARY_BUFFERS
        boundary = buffers * self._sizes.boundary * (current != none)
        at_visits = {
            "weights": weights[:, current],
            "prefetched weights": sum((weights[:, found] for found in after), start=np.zeros_like(weights[:, current])),
            "gradients": gradients[:, current],
            "recomputed activations": activations[:, current],
            "boundary tensors": np.tile(boundary, (plans, 1)),
            "logits": np.tile(self._sizes.logits_chunk * with_head, (plans, 1)),
        }
        total = sum(at_visits.values(), start=np.zeros((), np.int64))
        bounds = [0, *np.cumsum([len(device) for device in runs]).tolist()]
        worst = [total[:, start:stop].argmax(axis=1) + start for start, stop in pairwise(bounds)]
        chosen = np.stack(worst, axis=1)
        return {name: np.take_along_axis(table, chosen, axis=1) for name, table in at_visits.items()}


def _holds(schedule: Schedule) -> Ints:
    """1 where a stage runs on a device, (stages, devices)."""
    shape = schedule.shape
    found = np.zeros((max(shape.num_stages, shape.num_backward_stages), shape.num_ranks), np.int64)
    for device in range(shape.num_ranks):
        row = schedule.compute(device)
        inside = [part for action in row for part in action.sub] if Kind.OVERLAP in schedule.kinds else ()
        pairs = {*map(itemgetter(0, 1), row), *map(itemgetter(0, 1), inside)}
        found[[stage for kind, stage in pairs if kind not in (*HEAD, Kind.OVERLAP)], device] = 1
    return found


def _kept_versions(analysis: Analysis) -> Sequence[int]:
    """The most versions of its weights that each stage keeps at a time."""
    schedule = analysis.schedule
    if schedule.policy not in _STASHING:
        return (1,) * schedule.shape.num_backward_stages
    return (analysis if Kind.STEP in schedule.kinds else Analysis(add_steps(schedule))).versions.live


Visit = tuple[bool, int]  # successive actions of one stage on a device: whether backward, number of the stage


def _visits(row: Sequence[Action]) -> list[Visit]:
    """The visits of a device's compute row, in order."""
    kind, stage, _ = columns_of(row)
    plain = ~np.isin(kind, HEAD)
    backward, stage = ~np.isin(kind[plain], (Kind.F, Kind.R)), stage[plain]
    begins = np.ones(len(stage), bool)
    begins[1:] = (backward[1:] != backward[:-1]) | (stage[1:] != stage[:-1])
    return list(zip(backward[begins].tolist(), stage[begins].tolist(), strict=True))


def _most_waiting(row: Sequence[Action]) -> int:
    """The most microbatches between forward and backward of a device's shard of the head."""
    return max(accumulate(((action.kind is Kind.HF) - (action.kind is Kind.HB) for action in row), initial=0))


def _with_next(visits: Sequence[Visit], depth: int) -> list[tuple[Visit | None, ...]]:
    """Every visit with the `depth` visits after it, each run once; None where there is no further visit."""
    ahead = [*visits, *[None] * depth]
    runs = (tuple(ahead[place : place + depth + 1]) for place in range(len(visits)))
    return list(dict.fromkeys(runs)) or [(None,) * (depth + 1)]


_WAYS_OUT = read_keys(Path(__file__).with_name("ways_out.yaml"))


def _way_out(schedule: Schedule, largest: str) -> str:
    """What to do about the largest class of tensors, without the name of the schedule that runs."""
    known = _WAYS_OUT["bound"] | (_WAYS_OUT["streamed"] if schedule.weights is Weights.STREAMED else {})
    first, *others = known.get(largest, ("take smaller microbatches",))
    own = re.compile(rf"(schedule=|such as ){re.escape(schedule.name)}\b")
    others = [way for way in others if not (schedule.name and own.search(way))]
    if "activations" in largest and schedule.name in _WAYS_OUT["own"]:
        others.insert(0, _WAYS_OUT["own"][schedule.name])
    return ", ".join([first, *others[:-1], *(f"or {way}" for way in others[-1:])])


def why_infeasible(schedule: Schedule, classes: Sequence[Mapping[str, int]], limit_bytes: int) -> str:
    """Why a schedule does not fit: the fullest device, its largest class of tensors, a way out; "" if it fits.

    Args:
        classes: bytes of each device by class (`classes_of`).
        limit_bytes: of a device.
    """
    needed = [sum(by_class.values()) for by_class in classes]
    worst = needed.index(max(needed))
    if needed[worst] <= limit_bytes:
        return ""
    largest = max(classes[worst], key=lambda name: classes[worst][name])
    return (
        f"device {worst} needs {needed[worst] / 1e9:.1f} GB and has {limit_bytes / 1e9:.1f} GB; "
        f"{classes[worst][largest] / 1e9:.1f} GB of it are {largest}: {_way_out(schedule, largest)}"
    )
