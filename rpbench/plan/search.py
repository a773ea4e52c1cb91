"""The partition that simulates best: numbers of stages first, then layers moved between stages.

Every candidate is timed by the simulator itself, in batches. The search is deterministic, and since what it
starts from takes part, its answer is never worse than the published, the even or the greedy partition.

    numbers of stages   most promising first, each judged by its plain partitions, for half of the budget
    layers              the best 8 numbers climb, half of them go on to the next round, until one is left
"""

from collections.abc import Sequence
from dataclasses import replace

from rpbench.ir.partition import Partition
from rpbench.ir.policy import Policy
from rpbench.plan import Progress
from rpbench.plan.climb import Climb, Tally
from rpbench.plan.counts import Counts, plain_partitions, promising_counts
from rpbench.plan.evaluate import evaluate
from rpbench.plan.problem import Problem

# Share of the budget for trying numbers of stages, and how many of them are looked at closely.
SHARE_FOR_COUNTS = 0.5
FINALISTS = 8
# Steps of a long run that a search simulates: by then the time between steps is steady.
STEPS = 8


def plan_search(
    problem: Problem,
    seeds: Sequence[Partition],
    *,
    budget: int,
    on_progress: Progress | None = None,
) -> tuple[Partition, int]:
    """The best partition found, and how many were simulated.

    What fits into memory is better than what does not. Where nothing can fit, memory does not matter.

    Args:
        seeds: partitions to start from; they fit the schedule.
        budget: actions to time; a tenth of it finds most of what there is.
        on_progress: told the number of plans timed so far and the best makespan, after every round.
    """
    tally = Tally()
    few_steps = replace(problem, num_steps=_steps_to_simulate(problem, seeds[0]))
    found, *others = _search(few_steps, seeds, tally, budget, on_progress)
    # A few steps without their optimizer have found it, or an order made for equal stages; let the real run decide.
    if problem.num_steps > 1 or problem.entry.needs_costs:
        more = others if problem.entry.needs_costs else []
        plans = [evaluate(problem, partition, method="search") for partition in (found, *more, *seeds)]
        found = min(plans, key=lambda plan: (plan.infeasible != "", plan.makespan)).partition
    return found, tally.num_evaluated


def _steps_to_simulate(problem: Problem, seed: Partition) -> int:
    """One where every step begins with the weights of the one before, a few where steps overlap."""
    schedule = problem.schedule(len(seed.forward), len(seed.backward))
    return 1 if schedule.policy is Policy.FLUSH else min(problem.num_steps, STEPS)


def _search(
    problem: Problem, seeds: Sequence[Partition], tally: Tally, budget: int, on_progress: Progress | None
) -> list[Partition]:
    """What the climbs found, the best first."""
    every = climbs = _open_climbs(problem, seeds, tally, budget)
    while True:
        if on_progress:
            on_progress(tally.num_evaluated, climbs[0].best_score)
        share = max(0, budget - tally.work) // len(climbs).bit_length() // len(climbs)
        for climb in climbs:
            climb.run(share)
        climbs = sorted(climbs, key=_score)
        if len(climbs) == 1:
            return [climbs[0].best, *(climb.best for climb in every if climb is not climbs[0])]
        climbs = climbs[: len(climbs) // 2]


def _open_climbs(problem: Problem, seeds: Sequence[Partition], tally: Tally, budget: int) -> list[Climb]:
    """Climbs for the numbers of stages whose plain partitions are best, the best first."""
    starts: dict[Counts, list[Partition]] = {}
    for seed in seeds:
        starts.setdefault((len(seed.forward), len(seed.backward)), []).append(seed)
    climbs: list[Climb] = []
    for counts in dict.fromkeys([*starts, *promising_counts(problem)]):
        if counts not in starts and tally.work > SHARE_FOR_COUNTS * budget:
            break
        try:
            candidates = [*starts.get(counts, ()), *plain_partitions(problem, counts)]
            climb = Climb(problem, candidates, tally)
        except ValueError:  # some schedules take only some numbers of stages
            if counts in starts:
                raise
            continue
        climbs = sorted([*climbs, climb], key=_score)[:FINALISTS]
    return climbs


def _score(climb: Climb) -> float:
    return climb.best_score
