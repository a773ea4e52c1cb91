"""Rotation: the modelled step of a pipeline whose stages stream through the devices in turn.

Stage j runs on the j-th device of the rotation, counted round and round, for all M microbatches of the step, first
forward and later back. With N devices, f and b the times of one microbatch, h of a hop, u of the weights' upload:

    start(j)  = max(start(j-1) + f(j-1) + h,  ready(j))          the first microbatch is there, and the weights are
    end(j)    = max(start(j) + f(j) + (M-1) max(f(j), g),        the stage itself, its tensors' way to and from the
                    end(j-1) + h + f(j))                         host (g) or the stage before it is slowest
    ready(j)  = max(end(j-N),  start(j-N) + a(j-N) + u(j))       with prefetch: uploads hide behind the running stage
              = end(j-N) + u(j)                                  without

and the same from stage S-1 to 0 with b, where the first N stages back follow the forward of the same stage. `a` is
what the running visit brings over the same link: boundary tensors and kept inputs. Microbatches are alike, so the
arrivals at a stage are convex in their number and the first and the last one decide: `end` is exact, not a bound.
Behind the backward of stage j its gradients go home and the host's optimizer takes the stages one after the other; it
shares the host's memory with what the rounds behind it still move:

    step      = max over j of end(j) + store(j) + optimizer(0..j) + traffic(0..j-N)

Source: the rotation, the prefetch of the next stage while one runs and its limit by memory are from descriptions of
Mobius (Feng et al., ASPLOS'23). These equations, the optimizer and the paces of shared links are ours.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rpbench.cost.footprint.sizes import ModelBytes

# Boundary tensors of a microbatch in a visit: in forward one comes, and what is made and what is kept go; in backward a
# gradient and what was kept come, and one gradient goes.
TENSORS_IN, TENSORS_OUT = (1, 2), (2, 1)
TENSORS = 3

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


class Stage(NamedTuple):
    """What a stage takes, for many cuts at once; times in the rotation's unit, `weights` and `beside` in bytes."""

    forward: Floats
    backward: Floats
    visit_forth: Floats  # of all microbatches, if nothing but the stage and its links holds them up
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
    """Times for a byte, by place in the rotation, where devices share ways to the host.

    Args:
        first_load: of the first stages, which all come at the start of the step.
        alone: of what comes while nothing else does.
        load: of what comes while stages run; `store`: of what goes home.
        host: of the host's memory alone.
        hop: time of a boundary tensor from one device to the next.
        boundary: time of one that comes to the device at each place.
        flow: time that the tensors of one microbatch take at least, forward and backward, at each place.
    """

    first_load: tuple[float, ...]
    alone: float
    load: tuple[float, ...]
    store: tuple[float, ...]
    host: float
    hop: float
    boundary: tuple[float, ...]
    flow: tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Rotation:
    """A model on devices that take its stages in turn.

    Args:
        num_ranks, num_microbatches: N and M.
        forward, backward: times of a microbatch through each layer; recomputation is in `backward`.
        head: the same two times of the head, in the last stage.
        spared: what the last stage's layers save each where they are not recomputed; zeros otherwise.
        sizes: bytes of the layers.
        links: what transfers take.
        optimizer: time of the host's optimizer for a byte of optimizer state.
        prefetches: whether the next stage's weights come while a stage runs.
        limit_bytes: memory of a device; None for no limit.
        repeats: whether a step follows the step: a device's last visit has the first of the next one beside it.
    """

    num_ranks: int
    num_microbatches: int
    forward: Sequence[float]
    backward: Sequence[float]
    head: tuple[float, float]
    spared: Sequence[float]
    sizes: ModelBytes
    links: Links
    optimizer: float = 0.0
    prefetches: bool = True
    limit_bytes: int | None = None
    repeats: bool = False

    @property
    def num_layers(self) -> int:
        return len(self.forward)

    @cached_property
    def running(self) -> dict[str, Floats]:
        """Sums over the layers below, by what is summed."""
        layers = self.sizes.layers
        columns = {
            "forward": self.forward,
            "backward": self.backward,
            "spared": self.spared,
            "weights": [layer.weights for layer in layers],
            "gradients": [layer.gradients for layer in layers],
            "optimizer": [layer.optimizer for layer in layers],
            "activations": [layer.activations for layer in layers],
        }
        return {name: np.concatenate([[0.0], np.cumsum(np.array(column, float))]) for name, column in columns.items()}

    def stage(self, number: int, num_stages: int, first: Ints, end: Ints) -> Stage:
        """What stage `number` takes with layers `first` to `end`, one pair for each cut."""
        found = {name: sums[end] - sums[first] for name, sums in self.running.items()}
        is_last = number == num_stages - 1
        ends = [self.sizes.embedding] * (number == 0) + [self.sizes.head] * is_last
        weights, gradients, optimizer = (
            found[name] + sum(getattr(end_, name) for end_ in ends) for name in ("weights", "gradients", "optimizer")
        )
        place, more = number % self.num_ranks, self.num_microbatches - 1
        forward = found["forward"] + self.head[0] * is_last
        backward = found["backward"] + (self.head[1] - found["spared"]) * is_last
        links = self.links
        of_ends = sum(each.weights for each in ends)  # heavy, so that they still come when the others' have come
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
            gradients + found["activations"],
        )

    def arriving(self, number: int, num_stages: int, *, backward: bool) -> float:
        """Time of the activations that a visit brings over the link that weights take."""
        tensors = (number < num_stages - 1) + (number > 0) if backward else int(number > 0)
        return self.num_microbatches * tensors * self.links.boundary[number % self.num_ranks]

    def fits(self, number: int, num_stages: int, stage: Stage, before: Floats | None) -> npt.NDArray[np.bool_]:
        """Whether a stage fits beside the one that runs before it forward and after it backward (`before`, bytes)."""
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
        fits: npt.NDArray[np.bool_] = needed <= self.limit_bytes
        return fits

    def step_times(self, counts: Ints) -> Floats:
        """The modelled step of each cut, (cuts,); infinite where one does not fit.

        Args:
            counts: layers of each stage, (cuts, stages).
        """
        num_stages, size = counts.shape[1], self.num_ranks
        ends = np.cumsum(counts, axis=1)
        stages = [self.stage(j, num_stages, ends[:, j] - counts[:, j], ends[:, j]) for j in range(num_stages)]
        fits = np.ones(len(counts), bool)
        visits: list[tuple[Floats, Floats]] = []  # start and end forward
        for j, stage in enumerate(stages):
            fits &= self.fits(j, num_stages, stage, stages[j - size].weights if j >= size else None)
            last = (j - size, *visits[j - size]) if j >= size else None
            visits.append(self._visit(j, num_stages, stages, visits[-1] if j else None, last, backward=False))
        back: dict[int, tuple[Floats, Floats]] = {}
        done, updates = np.zeros(len(counts)), sum((stage.optimizer for stage in stages), start=np.zeros(len(counts)))
        moved = sum((stage.traffic for stage in stages[:-size]), start=np.zeros(len(counts)))
        for j in reversed(range(num_stages)):
            last = (j + size, *back[j + size]) if j + size < num_stages else (j, *visits[j])
            back[j] = self._visit(j, num_stages, stages, back.get(j + 1), last, backward=True)
            done = np.maximum(done, back[j][1] + stages[j].store + updates + moved)
            updates = updates - stages[j].optimizer
            moved = moved - (stages[j - size].traffic if j >= size else 0.0)
        return np.where(fits, done, np.inf)

    def _visit(
        self,
        number: int,
        num_stages: int,
        stages: Sequence[Stage],
        source: tuple[Floats, Floats] | None,
        last: tuple[int, Floats, Floats] | None,
        *,
        backward: bool,
    ) -> tuple[Floats, Floats]:
        """Start and end of a visit, after that of the stage it gets its tensors from and the device's last one."""
        stage, other = stages[number], stages[number + (1 if backward else -1)] if source else None
        own = stage.backward if backward else stage.forward
        if last is None:
            ready = stage.first_load
        else:
            turned = backward and last[0] != number  # the device's last visit went back already
            coming = self.arriving(last[0], num_stages, backward=turned)
            if self.prefetches:
                ready = np.maximum(last[2], last[1] + coming + stage.upload)
            else:
                ready = last[2] + stage.upload
        start, hop, whole = ready, self.links.hop, stage.visit_back if backward else stage.visit_forth
        end = start + whole
        if source is not None and other is not None:
            start = np.maximum(ready, source[0] + hop + (other.backward if backward else other.forward))
            end = np.maximum(start + whole, source[1] + hop + own)
        return start, end
