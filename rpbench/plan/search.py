"""The partition that simulates best: numbers of stages first, then layers moved between stages.

Every candidate is timed by the simulator itself, in batches. The search is deterministic, and since what it starts
from takes part, its answer is never worse than the published, the even or the greedy partition.
"""

from collections.abc import Callable, Sequence

from rpbench.ir.partition import Partition
from rpbench.plan.climb import Climb
from rpbench.plan.counts import plain_partitions, promising_counts
from rpbench.plan.problem import Problem

# Work allowed, counted in actions timed: about two seconds.
BUDGET = 1_000_000_000
# Building the graph of new stage counts takes as long as so many timings of it.
BUILD = 1500
# Handling a plan takes as long as timing so many actions.
HANDLING = 500
# Share of the budget for trying numbers of stages; how many of them are looked at closely.
SHARE_FOR_COUNTS = 0.5
FINALISTS = 8

Progress = Callable[[int, float], None]


def plan_search(
    problem: Problem, seeds: Sequence[Partition], *, budget: int = BUDGET, on_progress: Progress | None = None
) -> tuple[Partition, int]:
    """The best partition found, and how many were simulated.

    Args:
        seeds: partitions to start from; they fit the schedule.
        budget: actions to time; a tenth of it finds most of what there is.
        on_progress: told the number of plans timed so far and the best makespan, now and then.
    """
    counter = _Counter(budget, on_progress)
    finalists: dict[tuple[int, int], Climb] = {}
    starts: dict[tuple[int, int], list[Partition]] = {}
    for seed in seeds:
        starts.setdefault((len(seed.forward), len(seed.backward)), []).append(seed)
    for counts in dict.fromkeys([*starts, *promising_counts(problem)]):
        if counts not in starts and counter.spent > SHARE_FOR_COUNTS * budget:
            break
        candidates = [*starts.get(counts, ()), *plain_partitions(problem, counts)]
        if not candidates:
            continue
        climb = Climb(problem, candidates)
        counter.built(climb)
        finalists[counts] = climb
        if len(finalists) > FINALISTS:
            del finalists[max(finalists, key=lambda key: finalists[key].best_score)]

    ranked = sorted(finalists.values(), key=lambda climb: climb.best_score)
    num_rounds = len(ranked).bit_length()
    for remaining in range(num_rounds, 0, -1):  # half of them go on to the next round
        share = max(0, budget - counter.spent) // remaining // len(ranked)
        for climb in ranked:
            counter.run(climb, share)
        ranked.sort(key=lambda climb: climb.best_score)
        ranked = ranked[: max(1, len(ranked) // 2)]
    return ranked[0].best, counter.num_evaluated


class _Counter:
    """What the search has spent, and whom it tells."""

    def __init__(self, budget: int, on_progress: Progress | None) -> None:
        self.spent = 0
        self.num_evaluated = 0
        self._best = float("inf")
        self._on_progress = on_progress
        self._budget = budget

    def built(self, climb: Climb) -> None:
        self.spent += BUILD * climb.num_actions
        self._count(climb, 0)

    def run(self, climb: Climb, share: int) -> None:
        before = climb.num_evaluated
        climb.run(share // (climb.num_actions + HANDLING))
        self._count(climb, before)

    def _count(self, climb: Climb, before: int) -> None:
        num = climb.num_evaluated - before
        self.num_evaluated += num
        self.spent += num * (climb.num_actions + HANDLING)
        self._best = min(self._best, climb.best_score)
        if self._on_progress:
            self._on_progress(self.num_evaluated, self._best)
