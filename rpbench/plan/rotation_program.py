"""The program of a rotation: the cut with the shortest modelled step, by branch and bound.

Stages are added one by one; a partial cut is dropped if no completion can be shorter than the best cut known. The
first best cut comes from a descent that moves one layer at a time. Partial cuts are extended in batches, the deepest
first, so that memory stays bounded. The cut is proven to be the best under the model, unless `LIMIT` partial cuts were
not enough: then it is the best cut seen (`Program.proven`).

The bound on the step of every completion: a partial cut has its first k stages. Their forward is known, and so is the
longest path from the start and from the end of each backward visit to the end of the step. So

    known(d)   end of the forward of device d's last stage + longest path from the start of its backward
    turn(d)    the stages behind a device's last one, forth and back, once

bound the step by known(d) + M x (times of the layers the device still gets) + turn(d), for every device d. The layers
left must go somewhere: the bound fails the target where the devices together have no room for them before it.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rpbench.cost.arrays import Floats, Ints
from rpbench.ir.partition import split_evenly
from rpbench.plan.counts import single_moves
from rpbench.plan.rotation import Rotation, Stage

TOLERANCE = 1e-9  # a cut that is shorter by less is no better
BATCH = 20_000  # partial cuts that are extended together
LIMIT = 3_000_000  # partial cuts in all: less than a minute


@dataclass
class Partials:
    """Partial cuts of the same number of stages. Tables of (up to N, cuts) have the last N stages, the latest last."""

    counts: Ints  # layers of each stage so far, (cuts, stages)
    # start, end: of the forward visits, (up to N, cuts)
    start: Floats
    end: Floats
    # from_start, from_end: longest path from start and end of the backward visits to the end of the step
    from_start: Floats
    from_end: Floats
    layers_end: Ints  # layers up to each stage, the stage included
    weights: Floats  # bytes of each stage
    last: Stage | None
    updates: Floats  # time of the optimizer for all stages so far
    moved: Floats  # host traffic of all stages up to each, the stage included

    def take(self, chosen: npt.NDArray[np.int64] | npt.NDArray[np.bool_]) -> "Partials":
        arrays = {name: value[..., chosen] for name, value in vars(self).items() if name not in ("counts", "last")}
        last = None if self.last is None else Stage(*(column[chosen] for column in self.last))
        return Partials(counts=self.counts[chosen], **arrays, last=last)

    def __len__(self) -> int:
        return len(self.counts)


def nothing() -> Partials:
    """One partial cut without stages."""
    none, whole = np.zeros((0, 1)), np.zeros((0, 1), np.int64)
    return Partials(whole.T, none, none, none, none, whole, none, None, np.zeros(1), none)


def extend(rotation: Rotation, num_stages: int, old: Partials, counts: Ints) -> tuple[Partials, npt.NDArray[np.bool_]]:
    """Partial cuts with one more stage, the last of the `counts` of their layers; and whether that stage fits."""
    number, size = old.counts.shape[1], rotation.num_ranks
    first = old.layers_end[-1] if number else np.zeros(len(counts), np.int64)
    ends = first + counts[:, -1]
    stage = rotation.stage(number, num_stages, first, ends)
    full = number >= size  # then the first row is of the stage before it on its device
    fits = rotation.fits(number, num_stages, stage, old.weights[0] if full else None)
    start, end = _forward(rotation, number, num_stages, old, stage)
    updates = old.updates + stage.optimizer
    from_start, from_end = _backward(rotation, number, num_stages, old, stage, updates)
    moved = stage.traffic + (old.moved[-1] if number else 0.0)

    def grown(table: Any, column: Any) -> Any:
        return np.concatenate([table[int(full) :], column[None]])

    found = Partials(
        counts,
        grown(old.start, start),
        grown(old.end, end),
        grown(old.from_start, from_start),
        grown(old.from_end, from_end),
        grown(old.layers_end, ends),
        grown(old.weights, stage.weights),
        stage,
        updates,
        grown(old.moved, moved),
    )
    return found, fits


def _forward(rotation: Rotation, number: int, num_stages: int, old: Partials, stage: Stage) -> tuple[Floats, Floats]:
    """Start and end of the forward visit of the next stage."""
    hop = rotation.links.hop
    if number < rotation.num_ranks:
        ready = stage.first_load
    else:
        coming = rotation.arriving(number - rotation.num_ranks, num_stages, backward=False)
        ready = rotation.ready(old.start[0] + coming, old.end[0], stage.upload)
    start, end = ready, ready + stage.visit_forth
    if old.last is not None:
        start = np.maximum(ready, old.start[-1] + old.last.forward + hop)
        end = np.maximum(start + stage.visit_forth, old.end[-1] + hop + stage.forward)
    return start, end


def _backward(
    rotation: Rotation, number: int, num_stages: int, old: Partials, stage: Stage, updates: Floats
) -> tuple[Floats, Floats]:
    """Longest paths from start and end of the backward visit of the next stage to the end of the step."""
    hop = rotation.links.hop
    from_end, from_start = stage.store + updates, np.zeros(len(updates))
    if number >= rotation.num_ranks:
        from_end = from_end + old.moved[0]
    if old.last is not None:
        from_end = np.maximum(from_end, hop + old.last.backward + old.from_end[-1])
        from_start = stage.backward + hop + old.from_start[-1]
    if number >= rotation.num_ranks:
        before = old.from_start[0]
        upload = old.weights[0] * rotation.links.load[number % rotation.num_ranks]
        if rotation.prefetches:
            coming = rotation.arriving(number, num_stages, backward=True)
            from_end, from_start = np.maximum(from_end, before), np.maximum(from_start, coming + upload + before)
        else:
            from_end = np.maximum(from_end, upload + before)
    return np.maximum(from_start, stage.visit_back + from_end), from_end


def whole_steps(rotation: Rotation, num_stages: int, partials: Partials) -> Floats:
    """The modelled step of whole cuts: every path passes a device's turn from forward to backward."""
    found = np.zeros(len(partials))
    for column in range(rotation.num_ranks):
        number = num_stages - rotation.num_ranks + column
        place = number % rotation.num_ranks
        coming = rotation.arriving(number, num_stages, backward=False)
        upload = partials.weights[column] * rotation.links.load[place]
        ready = rotation.ready(partials.start[column] + coming, partials.end[column], upload)
        found = np.maximum(found, ready + partials.from_start[column])
    return found


def step_times(rotation: Rotation, counts: Ints) -> Floats:
    """The modelled step of each cut, (cuts,), from its layers per stage, (cuts, stages); infinite for a misfit."""
    num, num_stages = counts.shape
    cuts, fits = nothing().take(np.zeros(num, np.int64)), np.ones(num, bool)
    for number in range(num_stages):
        cuts, fit = extend(rotation, num_stages, cuts, counts[:, : number + 1])
        fits &= fit
    return np.where(fits, whole_steps(rotation, num_stages, cuts), np.inf)


class Bounds:
    """Bounds on the step that rule out partial cuts, for one number of stages."""

    def __init__(self, rotation: Rotation, num_stages: int) -> None:
        self.rotation, self.num_stages = rotation, num_stages
        forth = np.array(rotation.forward, float)
        back = np.array(rotation.backward, float) - np.array(rotation.spared, float)
        layers = forth + back
        self._head = sum(rotation.head)
        self._below = np.concatenate([[0.0], np.cumsum(layers)])
        # Minima over the layers from each one on: time both ways, forward and backward; bytes of weights.
        self._least = _least_behind(layers)
        self._least_forth, self._least_back = _least_behind(forth), _least_behind(back)
        self._lightest = _least_behind(np.array([layer.weights for layer in rotation.sizes.layers], float))

    def may_beat(self, partials: Partials, target: float) -> npt.NDArray[np.bool_]:
        """Whether a completion may have a shorter step than the target."""
        known, size, target = partials.counts.shape[1], self.rotation.num_ranks, target * (1 - TOLERANCE)
        done = partials.layers_end[-1]
        room, time, fine = np.zeros(len(partials)), np.zeros(len(partials)), self._chained(partials) <= target
        for place in range(size):
            number = known - 1 - (known - 1 - place) % size  # the device's latest stage; below 0: none yet
            upcoming = number + size
            if number >= 0:
                fine &= self._turned(partials, number) <= target
            if upcoming >= self.num_stages:
                continue
            free = target - self._committed(partials, number, upcoming)
            more, behind = divmod(self.num_stages - 1 - upcoming, size)
            num_full = more + (behind > 0)  # stages with layers: the last may hold the head alone
            fine &= free >= (num_full * self.rotation.num_microbatches * self._least[done]) * (1 - TOLERANCE)
            room += self._layers(partials, number, free, target)
            time += np.maximum(free, 0.0)
        rest = self._below[-1] - self._below[done]
        fine &= room >= self.rotation.num_layers - done
        return fine & (time >= self.rotation.num_microbatches * rest * (1 - TOLERANCE))

    def _turned(self, partials: Partials, number: int) -> Floats:
        """A bound from one stage with all its microbatches: the stages behind it run forward and backward once."""
        column = self._column(partials, number)
        behind = (
            self._below[-1] - self._below[partials.layers_end[column]] + self._head * (number < self.num_stages - 1)
        )
        hops = 2 * self.rotation.links.hop * (self.num_stages - 1 - number)
        return partials.end[column] + behind + hops + partials.from_start[column]

    def _chained(self, partials: Partials) -> Floats:
        """A bound from the stages to come: one microbatch passes all of them, all microbatches pass the longest."""
        latest, hop, more = partials.last, self.rotation.links.hop, self.rotation.num_microbatches - 1
        assert latest is not None
        done, num_left = partials.layers_end[-1], self.num_stages - partials.counts.shape[1]
        largest = np.ceil((self.rotation.num_layers - done) / num_left)
        forth = np.maximum(self.rotation.head[0], largest * self._least_forth[done])
        back = np.maximum(self.rotation.head[1], largest * self._least_back[done])
        once = self._below[-1] - self._below[done] + self._head + 2 * hop * num_left
        ends = partials.start[-1] + latest.forward + latest.backward + partials.from_end[-1]
        return ends + once + more * (forth + back)

    def _committed(self, partials: Partials, number: int, upcoming: int) -> Floats:
        """The part of a step that a device cannot give to layers still to come."""
        size, hop, latest = self.rotation.num_ranks, self.rotation.links.hop, partials.last
        done, between = partials.layers_end[-1], upcoming - partials.counts.shape[1]
        assert latest is not None
        forth, back = self._least_forth[done], self._least_back[done]
        before = partials.start[-1] + latest.forward + hop + between * (forth + hop)
        behind = partials.from_end[-1] + latest.backward + hop + between * (back + hop)
        if number >= 0:
            column = self._column(partials, number)
            before = np.maximum(before, partials.end[column])
            behind = np.maximum(behind, partials.from_start[column])
        found, least = before + behind, self._least[done]
        num_behind = (self.num_stages - 1 - upcoming) % size  # stages after the device's last one
        if not num_behind:
            return found + self.rotation.num_microbatches * self._head
        return found + (num_behind - 1) * least + self._head + 2 * hop * num_behind

    def _layers(self, partials: Partials, number: int, free: Floats, target: float) -> Floats:
        """Most layers that a device can still get: they take its time, and their weights take its link."""
        done = partials.layers_end[-1]
        work = self.rotation.num_microbatches * self._least[done]
        if number < 0:
            return _whole(free, work)
        column, load = self._column(partials, number), self.rotation.links.load[number % self.rotation.num_ranks]
        moved, own = 2 * self._lightest[done] * load, partials.weights[column] * load
        if self.rotation.prefetches:
            path, each = partials.start[column] + partials.from_start[column], moved
        else:
            path, each = partials.end[column] + partials.from_start[column], moved + work
        return np.minimum(_whole(free, work), _whole(target - path - own, each))

    def _column(self, partials: Partials, number: int) -> int:
        return number - (partials.counts.shape[1] - len(partials.start))


def _least_behind(layers: Floats) -> Floats:
    """The minimum over the layers from each one on; 0 behind the last."""
    return np.append(np.minimum.accumulate(layers[::-1])[::-1], 0.0)


def _whole(free: Floats, each: Floats) -> Floats:
    """How many fit into `free`; infinite if each takes nothing."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(each > 0, np.floor(np.maximum(free, 0.0) / each * (1 + TOLERANCE)), np.inf)


class Program(NamedTuple):
    """The result of the program."""

    counts: tuple[int, ...]  # layers of each stage; empty if nothing fits
    step: float  # modelled, in the rotation's unit; infinite if nothing fits
    proven: bool  # whether no cut is shorter under the model


def solve(rotation: Rotation, numbers: Iterable[int], limit: int = LIMIT) -> Program:
    """The best cut into any of these numbers of stages, each at least the number of devices.

    Every stage has a layer, except that the last may hold the head alone.
    """
    starts = [found for num_stages in numbers if (found := _descend(rotation, num_stages)) is not None]
    starts.sort(key=lambda found: found[1])
    best, step = starts[0] if starts and starts[0][1] < np.inf else ((), np.inf)
    looked = 0
    for start, _ in starts:
        counts, step, seen = _branch(rotation, len(start), step, limit - looked)
        looked += seen
        best = counts or best
    return Program(best, step, looked < limit)


def _descend(rotation: Rotation, num_stages: int) -> tuple[tuple[int, ...], float] | None:
    """A cut that no move of one layer between two stages makes shorter, and its step; None for too few layers."""
    starts = _plain(rotation.num_layers, num_stages)
    if not starts:
        return None
    table = np.array(starts)
    steps = step_times(rotation, table)
    counts, step = table[steps.argmin()], steps.min()
    while True:
        table = _moves(counts)
        steps = step_times(rotation, table) if len(table) else np.array([np.inf])
        if not steps.min() < step * (1 - TOLERANCE):
            return tuple(counts.tolist()), float(step)
        counts, step = table[steps.argmin()], steps.min()


def _plain(num_layers: int, num_stages: int) -> list[tuple[int, ...]]:
    """Even cuts, with the head in a stage of its own as well."""
    found = []
    if num_layers >= num_stages:
        found.append(split_evenly(num_layers, num_stages))
    if num_stages > 1 and num_layers >= num_stages - 1:
        found.append((*split_evenly(num_layers, num_stages - 1), 0))
    return found


def _moves(counts: Ints) -> Ints:
    """All cuts one layer away; only the last stage may be left without layers."""
    moved = counts + single_moves(len(counts))
    return moved[(moved[:, :-1] > 0).all(axis=1) & (moved[:, -1] >= 0)]


def _branch(rotation: Rotation, num_stages: int, target: float, limit: int) -> tuple[tuple[int, ...], float, int]:
    """The best cut shorter than the target, empty if there is none; its step; and how many partial cuts were seen."""
    bounds, looked = Bounds(rotation, num_stages), 0
    best: tuple[int, ...] = ()
    stack = [nothing()]
    while stack and looked < limit:
        grown = _grow(rotation, num_stages, stack.pop())
        looked += len(grown)
        if not len(grown):
            continue
        if grown.counts.shape[1] == num_stages:
            steps = whole_steps(rotation, num_stages, grown)
            if steps.min() < target * (1 - TOLERANCE):
                best, target = tuple(grown.counts[steps.argmin()].tolist()), float(steps.min())
            continue
        grown = grown.take(bounds.may_beat(grown, target))
        promise = np.argsort(-(grown.end[-1] + grown.from_start[-1]), kind="stable")
        stack += [grown.take(promise[first : first + BATCH]) for first in range(0, len(grown), BATCH)]
    return best, target, looked


def _grow(rotation: Rotation, num_stages: int, partials: Partials) -> Partials:
    """Every partial cut with every next stage that fits and leaves a layer for each later stage but the last."""
    number = partials.counts.shape[1]
    own = left = rotation.num_layers - partials.counts.sum(axis=1)
    if number < num_stages - 1:
        most = left - (num_stages - 2 - number)
        partials = partials.take(np.repeat(np.arange(len(partials)), np.maximum(most, 0)))
        own = np.concatenate([np.zeros(0, np.int64), *(np.arange(1, each + 1) for each in most.tolist())])
    counts = np.concatenate([partials.counts, own[:, None]], axis=1)
    found, fits = extend(rotation, num_stages, partials, counts)
    return found if fits.all() else found.take(fits)
