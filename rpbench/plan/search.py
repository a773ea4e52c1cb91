"""The partition that simulates best: numbers of stages first, then layers moved between stages.

Every candidate is timed by the simulator itself, in batches. The search is deterministic, and since what it
starts from takes part, its answer is never worse than the published, the even or the greedy partition.

    numbers of stages   most promising first, each judged by its plain partitions, for half of the budget
    layers              the best 8 numbers climb, half of them go on to the next round, until one is left
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from rpbench.ir.partition import Partition
from rpbench.ir.policy import Policy
from rpbench.plan.climb import Climb, Tally
from rpbench.plan.counts import Counts, plain_partitions, promising_counts
from rpbench.plan.evaluate import evaluate, why_unfit
from rpbench.plan.problem import Problem

# Share of the budget for trying numbers of stages, and how many of them are looked at closely.
SHARE_FOR_COUNTS = 0.5
FINALISTS = 8
# Steps of a long run that a search simulates: by then the time between steps is steady.
STEPS = 8
# Where finalists are timed with what they move, so much of the budget is for finding them, and there are so many.
SHARE_BEFORE_MOVING = 0.2
FINALISTS_THAT_MOVE = 4
STEPS_THAT_MOVE = 2


Progress = Callable[[int, float], None]
"""Told how many actions have been timed, and the best makespan so far."""


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
    if problem.traffic:
        budget = int(SHARE_BEFORE_MOVING * budget)
    few_steps = replace(problem, num_steps=_steps_to_simulate(problem, seeds[0]))
    found, *others = _search(few_steps, seeds, tally, budget, on_progress)
    # A few steps without their optimizer have found it, or an order made for equal stages; let the real run decide.
    if problem.traffic:
        found = _best_that_moves(few_steps, dict.fromkeys((found, *others[: FINALISTS_THAT_MOVE - 1], *seeds)))
    elif problem.num_steps > 1 or problem.entry.needs_costs:
        more = others if problem.entry.needs_costs else []
        plans = [evaluate(problem, partition, method="search") for partition in (found, *more, *seeds)]
        found = min(plans, key=lambda plan: (plan.infeasible != "", plan.makespan)).partition
    return found, tally.num_evaluated


def _best_that_moves(problem: Problem, partitions: Iterable[Partition]) -> Partition:
    """The best of a search that timed computation alone, with everything that moves; the first if none fits.

    Timing what moves takes long: what does not fit is not timed.
    """
    first, *others = partitions
    fitting = [partition for partition in (first, *others) if not why_unfit(problem, partition)]
    if len(fitting) < 2:
        return fitting[0] if fitting else first
    return min(fitting, key=lambda partition: evaluate(problem, partition, method="search").makespan)


def _steps_to_simulate(problem: Problem, seed: Partition) -> int:
    """One where every step begins with the weights of the one before, a few where steps overlap."""
    schedule = problem.schedule(len(seed.forward), len(seed.backward))
    return (
        1 if schedule.policy is Policy.FLUSH else min(problem.num_steps, STEPS_THAT_MOVE if problem.traffic else STEPS)
    )


def _search(
    problem: Problem, seeds: Sequence[Partition], tally: Tally, budget: int, on_progress: Progress | None
) -> list[Partition]:
    """What the climbs found, the best first."""
    every = climbs = _open_climbs(problem, seeds, tally, budget)
    alike = _computes_alike(problem, seeds[0])
    if problem.traffic and climbs[0].hopeless:
        smallest = promising_counts(problem)[-1]  # of what everybody runs in turn, small stages come nearest
        return [plain_partitions(problem, smallest)[0] if alike else climbs[0].best]
    if alike:
        return [climb.best for climb in every]
    while True:
        if on_progress:
            on_progress(tally.num_evaluated, climbs[0].best_score)
        share = max(0, budget - tally.work) // len(climbs).bit_length() // len(climbs)
        for climb in climbs:
            climb.run(share)
        climbs = sorted(climbs, key=_score)
        if len(climbs) == 1:
            return [climbs[0].best, *(climb.best for climb in sorted(every, key=_score) if climb is not climbs[0])]
        climbs = climbs[: len(climbs) // 2]


def _computes_alike(problem: Problem, seed: Partition) -> bool:
    """Whether every device runs all stages of its microbatches, so that only what moves depends on the cut."""
    if problem.traffic is None:
        return False
    placement = problem.schedule(len(seed.forward), len(seed.backward)).placement
    return bool(placement) and all(len(holders) == problem.num_ranks > 1 for holders in placement)


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
        if problem.traffic and climb.hopeless:
            break
    return climbs


def _score(climb: Climb) -> float:
    return climb.best_score
