"""ReCycle: the other pipelines run the work of a lost rank in their bubbles; no rank is replaced or restarted.

Each pipeline has all stages, so its peers have the weights of a lost rank. Only the running step is lost, with the
gradients of the lost rank. From then on microbatches make detours. Equal stages absorb one lost rank as long as
m <= (p - 1)(d - 1) and the peers have memory for the additional microbatches. If every pipeline has lost a rank of one
stage, all go back to the persistent store, on new ranks.

At a stage whose rank is lost, microbatch j of pipeline k goes to the (j mod n)-th of the n pipelines that still have
one, counted from k + 1 on, and comes back. Every rank takes a ready part by priority: an input gradient, a forward (if
it may hold one more), a weight gradient; so weight gradients fill waits. A stage steps when it has all its weight
gradients of a step, independently of other stages, and goes on with its next forwards.

Without failures a step takes the time of the 1F1B schedule, and under failures never less, even where the order of the
detours, whose steps are not flushed, would be faster.

Source: after the abstract of Gandhi et al., "ReCycle: Resilient Training of Large DNNs using Pipeline Adaptation",
SOSP'24 (arXiv 2405.14009). Order, limits in flight and the treatment of several failures are ours: a list scheduling,
where the paper solves an integer program for each number of failures.
"""

import heapq
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import NamedTuple

from rpbench.failures.walk import Checkpoint, Progress, Recovery
from rpbench.ordering.list_order import ROUNDING

STEPS = 4  # simulated; the first fills the pipelines, and the others give the pace


class Part(NamedTuple):
    """A piece of work; tuples compare in the order in which ranks take them."""

    order: int  # 0 input gradient, 1 forward, 2 weight gradient
    step: int
    microbatch: int
    pipeline: int
    stage: int


INPUT, FORWARD, WEIGHT = range(3)
Rank = tuple[int, int]  # pipeline, stage


@dataclass(frozen=True)
class SplitTimes:
    """Seconds of each stage's forward and of both halves of its backward, and of a hop."""

    forward: tuple[float, ...]
    input_grad: tuple[float, ...]
    weight_grad: tuple[float, ...]
    hop: float = 0.0

    def of(self, part: Part) -> float:
        return (self.input_grad, self.forward, self.weight_grad)[part.order][part.stage]


@dataclass(frozen=True)
class Pace:
    """Seconds of a step in full pipelines, and the most microbatches that a rank of each stage holds."""

    step_s: float
    in_flight: tuple[int, ...]


def is_absorbed(num_stages: int, num_microbatches: int, num_pipelines: int) -> bool:
    """Whether the work of one lost rank fits into the bubble of its peers: m / (d - 1) (F + B) <= (p - 1) (F + B)."""
    return num_microbatches <= (num_stages - 1) * (num_pipelines - 1)


def living(lost: Collection[Rank], num_stages: int, num_pipelines: int) -> tuple[tuple[int, ...], ...]:
    """For each stage, the pipelines that still have a rank of it."""
    pipelines = range(num_pipelines)
    return tuple(tuple(k for k in pipelines if (k, stage) not in lost) for stage in range(num_stages))


def runs_on(pipeline: int, microbatch: int, peers: Sequence[int], num_pipelines: int) -> int:
    """The pipeline that runs a stage for a microbatch of `pipeline`; `peers` have a rank of the stage."""
    if pipeline in peers:
        return pipeline
    behind = sorted(peers, key=lambda peer: (peer - pipeline - 1) % num_pipelines)
    return behind[microbatch % len(behind)]


def pace(
    peers: Sequence[Sequence[int]],
    num_pipelines: int,
    num_microbatches: int,
    times: SplitTimes,
    most_in_flight: Sequence[int],
) -> Pace:
    """The pace of pipelines of `num_microbatches` each under detours.

    `peers` are for each stage the pipelines that have a rank of it; each may hold `most_in_flight` microbatches.
    """
    run = _Run(peers, num_pipelines, num_microbatches, times, most_in_flight)
    ends = run.to_the_end()
    return Pace((ends[-1] - ends[0]) / (STEPS - 1), tuple(run.peak))


@dataclass(frozen=True, kw_only=True)
class Recycle(Checkpoint):
    """Detours over other pipelines, whose memory `fits` judges; ValueError for a single pipeline."""

    times: SplitTimes
    fits: Callable[[Sequence[int]], bool]  # most microbatches in flight of each stage -> whether they fit

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.job.num_pipelines < 2:
            raise ValueError(
                f"{self.job.num_pipelines} pipeline: work of a lost rank goes to another pipeline; "
                "set mode.pipelines to 2 or more, or take mode.policy=checkpoint"
            )

    @cached_property
    def pace(self) -> Pace:
        """The fastest pace that fits into memory, over several limits in flight; the tightest limit where none fits."""
        job, p = self.job, self.job.num_stages
        found: list[Pace] = []
        for more in (0, (p + 1) // 2, p, 2 * p):
            most = [p - stage + more for stage in range(p)]
            each = pace(self._peers(self.lost), job.num_pipelines, job.num_microbatches, self.times, most)
            if not found or self.fits(each.in_flight):
                found.append(each)
        return min(found, key=lambda each: each.step_s)

    @property
    def slowdown(self) -> float:
        """Seconds of a step over those without failures; 1 if failures are absorbed."""
        found = self.pace.step_s / self.job.step_s if self.lost else 1.0
        return found if found > 1.0 + ROUNDING else 1.0

    @property
    def pace_s(self) -> float:
        return self.job.step_s * self.slowdown

    def recover(self, lost: frozenset[int], progress: Progress) -> Recovery:
        """The running step begins anew on the ranks that are left."""
        gone, job = self.lost | lost, self.job
        if not all(self._peers(gone)):
            return self.from_store(progress, replace(self, lost=frozenset()))
        into_s = min(progress.into_s, self.pace_s)
        return Recovery(
            source="replica",
            then=replace(self, lost=gone),
            lost_microbatches=job.again(0, into_s),
            fetched_bytes={},
            detect_s=job.detect_s,
            recompute_s=into_s,
        )

    def _peers(self, lost: frozenset[int]) -> tuple[tuple[int, ...], ...]:
        return living(set(map(self.job.place, lost)), self.job.num_stages, self.job.num_pipelines)


@dataclass
class _Run:
    """A simulation of greedy ranks, which run the first part that is ready."""

    peers: Sequence[Sequence[int]]
    num_pipelines: int
    num_microbatches: int
    times: SplitTimes
    limits: Sequence[int]  # in flight

    def __post_init__(self) -> None:
        num_stages = len(self.peers)
        ranks = [(k, stage) for stage, there in enumerate(self.peers) for k in there]
        self.ready: dict[Rank, tuple[list[Part], ...]] = {rank: ([], [], []) for rank in ranks}  # by order
        self.free, self.held, self.peak = dict.fromkeys(ranks, 0.0), dict.fromkeys(ranks, 0), [0] * num_stages
        steps = list(product(range(STEPS), range(num_stages)))
        self.left = dict.fromkeys(steps, self.num_pipelines * self.num_microbatches)  # weight gradients
        self.stepped = dict.fromkeys(steps, 0.0)  # end of the last of them
        # Events: a part that arrives at a rank, or None to look at the rank again.
        self.moments: list[tuple[float, int, Part | None, Rank]] = []
        self.num_moments = 0
        for step, microbatch, k in product(range(STEPS), range(self.num_microbatches), range(self.num_pipelines)):
            part = Part(FORWARD, step, microbatch, k, 0)
            self._arrive(0.0, part, self._rank(part))

    def to_the_end(self) -> list[float]:
        """The end of each step, at all stages."""
        while self.moments:
            now, _, part, rank = heapq.heappop(self.moments)
            if part is not None:
                heapq.heappush(self.ready[rank][part.order], part)
            if self.moments and self.moments[0][0] == now:
                continue  # ranks choose after all events of this moment
            for each in self.ready:
                if self.free[each] <= now:
                    self._take(each, now)
        assert not any(self.left.values()), "ranks that wait for each other"
        return [max(self.stepped[step, stage] for stage in range(len(self.peers))) for step in range(STEPS)]

    def _rank(self, part: Part) -> Rank:
        return runs_on(part.pipeline, part.microbatch, self.peers[part.stage], self.num_pipelines), part.stage

    def _arrive(self, moment: float, part: Part | None, rank: Rank) -> None:
        heapq.heappush(self.moments, (moment, self.num_moments, part, rank))
        self.num_moments += 1

    def _take(self, rank: Rank, now: float) -> None:
        for parts in self.ready[rank]:
            if parts and not self._must_wait(parts[0], rank, now):
                part = heapq.heappop(parts)
                self.free[rank] = end = now + self.times.of(part)
                self._follow(part, rank, end)
                return

    def _must_wait(self, part: Part, rank: Rank, now: float) -> bool:
        """Whether the rank holds as many microbatches as it may, or its stage has not finished the step before."""
        if part.order != FORWARD:
            return False
        before = part.step - 1, part.stage
        is_early = part.step > 0 and (self.left[before] > 0 or self.stepped[before] > now)
        return is_early or self.held[rank] >= self.limits[part.stage]

    def _follow(self, part: Part, rank: Rank, end: float) -> None:
        self._arrive(end, None, rank)
        if part.order == FORWARD:
            self.held[rank] += 1
            self.peak[part.stage] = max(self.peak[part.stage], self.held[rank])
            top = part.stage == len(self.peers) - 1
            self._send(end, rank, part._replace(order=INPUT) if top else part._replace(stage=part.stage + 1))
        elif part.order == INPUT:
            self._arrive(end, part._replace(order=WEIGHT), rank)
            if part.stage:
                self._send(end, rank, part._replace(stage=part.stage - 1))
        else:
            self.held[rank] -= 1
            place = part.step, part.stage
            self.left[place] -= 1
            self.stepped[place] = max(self.stepped[place], end)
            for k in self.peers[part.stage] if not self.left[place] else ():
                self._arrive(self.stepped[place], None, (k, part.stage))

    def _send(self, end: float, rank: Rank, part: Part) -> None:
        to = self._rank(part)
        self._arrive(end + (self.times.hop if to != rank else 0.0), part, to)
