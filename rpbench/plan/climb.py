"""Local search over the partitions with one pair of stage counts: one layer at a time moves to another stage."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush, nsmallest

import numpy as np

from rpbench.cost.arrays import Floats, Ints
from rpbench.cost.footprint.memory import Footprint
from rpbench.cost.footprint.sizes import ModelBytes
from rpbench.ir.checks.residency import turns_at_once
from rpbench.ir.partition import Partition, symmetric
from rpbench.plan.counts import Counts, single_moves
from rpbench.plan.cutting_planes import level_cuts
from rpbench.plan.problem import Problem
from rpbench.sim.batch import PlanBatch
from rpbench.sim.graph import Graph, build_graph
from rpbench.sim.memory import peak_in_flight

CHUNK = 256  # moves of one plan tried at a time: few, so that the climb soon turns to a better plan
GROUP = 16  # most plans changed in one round. A round ends once it has enough new plans to time side by side.
SLACK = 0.03  # plans worse than the best by more than this fraction are dropped
PATIENCE = 50_000  # a climb stops after this many moves without a better plan
TOLERANCE = 1e-9  # improvements below this share are rounding
MISFIT = 1e100  # score of a plan that does not fit, times bytes needed over the limit: worse than every plan that fits
HANDLING = 400  # handling a plan takes as long as timing this many actions
POINT = 20_000  # a round of cutting planes takes as long as timing this many actions
BUILDING = 1500  # building a graph takes as long as timing it this many times


@dataclass
class Tally:
    """The work of a search so far, over all its climbs: `work` in actions timed, and plans timed."""

    work: int = 0
    num_evaluated: int = 0


class ClimbOrder:
    """The order of all partitions with these numbers of stages, its graph and footprint; ValueError if there is none.

    Args:
        problem: its times and its memory are not read, so problems that differ only in these share an order.
        cut: an order that depends on times follows those of this cut; None: equal stages.
    """

    def __init__(self, problem: Problem, counts: Counts, cut: Partition | None = None) -> None:
        self._problem = problem
        self.schedule = problem.schedule(*counts) if cut is None else problem.order(cut)

    @cached_property
    def graph(self) -> Graph:
        return build_graph(self.schedule)

    @cached_property
    def turns_at_once(self) -> bool:
        """Whether the last stage's backward follows its forward directly."""
        return turns_at_once(self.schedule)

    def footprint(self, sizes: ModelBytes) -> Footprint:
        if self._footprint is None:
            entry = self._problem.entry
            shares = entry.lower is not None and not entry.separate_cuts  # transfers decide which bytes stay
            schedule = self._problem.finished(self.schedule) if shares else self.schedule
            self._footprint = Footprint(schedule, sizes, peak_in_flight(self.graph))
        return self._footprint.of_sizes(sizes)

    _footprint: Footprint | None = None


class Climb:
    """Best-first search from given partitions: every move is applied to the best plan not yet changed.

    Unlike a plain ascent it crosses plateaus, which are wide: the makespan depends on the critical path only, and other
    moves change nothing.

    Args:
        seeds: partitions with the same numbers of stages.
        order: of the problem and these numbers of stages; None: it is made, or ValueError.
        fitting: whether every plan recomputes as few of its layers as its memory allows.
    """

    def __init__(
        self,
        problem: Problem,
        seeds: Sequence[Partition],
        tally: Tally,
        order: ClimbOrder | None = None,
        *,
        fitting: bool = False,
    ) -> None:
        self._problem, self._fitting = problem, fitting
        self.counts: Counts = len(seeds[0].forward), len(seeds[0].backward)
        self._separate = problem.entry.separate_cuts
        order = order or ClimbOrder(problem, self.counts)
        keeps_last, graph = problem.keeps_last and order.turns_at_once, order.graph
        self.num_actions, self._num_ranks = graph.num_actions, problem.num_ranks
        self._keeps_last = keeps_last
        self._batch = self._batch_of(graph)
        self._memory = problem.memory
        self.hopeless = False  # whether no partition fits into memory
        if self._memory is not None:
            self._footprint = order.footprint(self._memory.sizes)
            if self._footprint.least_bytes > self._memory.limit_bytes:
                # Nothing fits: then the fastest is searched for, and the verdict says why it cannot run.
                self._memory, self.hopeless = None, True

        # A bound stage without layers passes tensors on and pays for the hops. If the directions are cut apart, a stage
        # is a job of its own, which needs layers.
        num_columns = sum(self.counts) if self._separate else self.counts[0]
        self._least = np.full(num_columns, int(self._separate))
        if self._separate:
            self._least[-1] = 0  # the fused stage may hold the head alone
        self._moves: Ints | None = None
        self._weights = np.random.default_rng(0).integers(2**63, size=num_columns)
        self._seen: set[int] = set()  # plans, each as the weighted sum of its counts
        self._plans: list[Ints] = []
        self._scored: list[tuple[float, int]] = []  # score and plan, if worth changing
        self._open: list[tuple[float, int, int]] = []  # score, plan, moves already tried
        self._tally = tally
        tally.work += BUILDING * graph.num_actions
        self.best_score = float("inf")
        self._best = 0
        rows = [(*seed.forward, *seed.backward) if self._separate else seed.forward for seed in seeds]
        self._add(self._fresh(np.array(rows)))

    @property
    def best(self) -> Partition:
        return self._partition(self._best)

    def _partition(self, plan: int) -> Partition:
        row = self._plans[plan].tolist()
        if not self._separate:
            return symmetric(tuple(row))
        return Partition(tuple(row[: self.counts[0]]), tuple(row[self.counts[0] :]), fused=True)

    def leaders(self, number: int) -> list[Partition]:
        """The best partitions found so far, at most `number`, best first."""
        worst = self.best_score * (1 + SLACK)
        nearest = nsmallest(number, [each for each in self._scored if each[0] <= worst])
        return [self._partition(plan) for _, plan in nearest] or [self.best]

    @property
    def keeps_everything(self) -> bool:
        """Whether the best partition recomputes nothing."""
        if not self._fitting or self._memory is None:
            return self._fitting
        row = self._plans[self._best][None, :]
        return bool((self._footprint.fitting(row, row, self._memory.limit_bytes) == row).all())

    def _batch_of(self, graph: Graph) -> PlanBatch:
        problem = self._problem
        ahead = {"recompute_ahead": problem.recompute_ahead, "fused_ahead": problem.fused_ahead}
        return PlanBatch(graph, problem.times, **ahead)

    def best_under(self, order: ClimbOrder) -> float:
        """The makespan of the best partition under another order, with the same layers recomputed."""
        forward, backward = self._directions(self._plans[self._best][None, :])
        keeps = self._most(backward)
        if self._fitting and self._memory is not None:
            keeps = self._footprint.fitting(forward, backward, self._memory.limit_bytes)
        self._tally.work += (BUILDING + 1) * order.graph.num_actions
        return float(self._batch_of(order.graph).makespans(forward, backward, keeps)[0])

    def run(self, work: int, patience: int = PATIENCE) -> None:
        """Search until `work` more is done, or `patience` moves in a row bring no better plan."""
        if self._moves is None:
            self._moves = _moves(self.counts, self._separate)
        until, tried, improved_at = self._tally.work + work, 0, 0
        while self._open and self._tally.work < until and tried < improved_at + patience:
            groups: list[Ints] = []
            while self._open and len(groups) < GROUP and sum(map(len, groups)) < CHUNK:
                neighbours = self._next_neighbours(self._moves)
                tried += len(neighbours)
                groups.append(self._fresh(neighbours[(neighbours >= self._least).all(axis=1)]))
            if self._add(np.concatenate(groups)):
                improved_at = tried

    def level(self) -> None:
        """Score the cuts that cutting planes find, which are as good as a long climb; nothing with a stage a device."""
        if not self._separate and self.counts[0] <= self._num_ranks:
            return
        start, num_forward = self._plans[self._best], self.counts[0] if self._separate else 0
        last = np.arange(len(start)) == len(start) - 1
        kept = np.ones_like(start) if self._fitting else (last & self._keeps_last).astype(np.int64)
        cuts, num_points = level_cuts(self._batch.linear(kept, num_forward), start, self._least, num_forward)
        self._tally.work += num_points * (POINT + self.num_actions)
        self._add(self._fresh(cuts[(cuts >= self._least).all(axis=1)]))

    def _next_neighbours(self, moves: Ints) -> Ints:
        """The results of the next moves on the best open plan."""
        score, plan, tried = heappop(self._open)
        if score > self.best_score * (1 + SLACK):
            self._open.clear()
        elif tried + CHUNK < len(moves):
            heappush(self._open, (score, plan, tried + CHUNK))
        neighbours: Ints = self._plans[plan] + moves[tried : tried + CHUNK]
        self._tally.work += HANDLING * len(neighbours)
        return neighbours

    def _fresh(self, rows: Ints) -> Ints:
        fresh = []
        for index, key in enumerate((rows * self._weights).sum(axis=1).tolist()):
            if key not in self._seen:
                self._seen.add(key)
                fresh.append(index)
        return rows[fresh]

    def _add(self, rows: Ints) -> bool:
        """Score new plans and open those worth changing; whether one is better than any before."""
        if not len(rows):
            return False
        scores, before, first = self._score(rows), self.best_score, len(self._plans)
        self._plans.extend(rows)
        self._tally.num_evaluated += len(rows)
        self._tally.work += self.num_actions * len(rows)
        lowest = int(scores.argmin())
        improved = bool(scores[lowest] < before * (1 - TOLERANCE))
        if improved:
            self.best_score, self._best = float(scores[lowest]), first + lowest
        for index in np.flatnonzero(scores <= self.best_score * (1 + SLACK)).tolist():
            heappush(self._open, (float(scores[index]), first + index, 0))
            self._scored.append((float(scores[index]), first + index))
        return improved

    def _score(self, rows: Ints) -> Floats:
        forward, backward = self._directions(rows)
        scores = self._batch.makespans(forward, backward, self._most(backward))  # a lower bound where some recompute
        if self._memory is not None:
            close = scores <= self.best_score * (1 + SLACK)  # the other plans are dropped whatever they need
            limit, forward, backward = self._memory.limit_bytes, forward[close], backward[close]
            keeps = self._most(backward)
            if self._fitting:
                keeps = self._footprint.fitting(forward, backward, limit)
                again = (keeps < backward).any(axis=1)
                scores[np.flatnonzero(close)[again]] = self._batch.makespans(
                    forward[again], backward[again], keeps[again]
                )
            worst = self._footprint.peaks(forward, backward, keeps).max(axis=1)
            scores[close] = np.where(worst <= limit, scores[close], MISFIT * worst / max(1, limit))
        return scores

    def _directions(self, rows: Ints) -> tuple[Ints, Ints]:
        """The layers of forward and of backward stages."""
        return (rows[:, : self.counts[0]], rows[:, self.counts[0] :]) if self._separate else (rows, rows)

    def _most(self, backward: Ints) -> Ints | None:
        """The most layers that may not be recomputed, (plans, backward stages); None: as times and sizes say."""
        if self._fitting:
            return backward
        if not self._keeps_last:
            return None
        last = np.arange(backward.shape[1]) == backward.shape[1] - 1
        return np.where(last, backward, 0)


def _moves(counts: Counts, separate: bool) -> Ints:
    """Changes of the counts that take a layer from one stage and give it to another, near stages first."""
    num_forward, num_backward = counts
    up = single_moves(num_forward, near_first=True)
    if not separate:
        return up
    columns = num_forward + num_backward
    up = np.pad(up, ((0, 0), (0, num_backward)))
    down = np.pad(single_moves(num_backward - 1, near_first=True), ((0, 0), (num_forward, 1)))
    # A layer that enters the fused stage leaves a forward and a backward stage, one of them next to it.
    givers = [
        (forward, backward)
        for forward in range(num_forward)
        for backward in range(num_forward, columns - 1)
        if forward == num_forward - 1 or backward == columns - 2
    ]
    enter = np.zeros((len(givers), columns), np.int64)
    enter[:, -1] = 1
    for index, pair in enumerate(givers):
        enter[index, pair] = -1
    return np.concatenate([up, down, enter, -enter])
