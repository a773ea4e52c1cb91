"""1F1B whose warm-up depth follows the times of devices and links (rule ours; idea: HARP).

Every stage warms up as deep as it must: it runs d(s) forwards before its first backward, then one of each in turn.
With d(s) = p - s (1F1B) every microbatch pays for two hops; with d(s) = 2(p - s) - 1 (the eager order of DAPPLE) hops
are hidden, for nearly twice the activations. Here the depth grows by one or by two from a stage to the one before it:
by one wherever that costs no time on the given devices and links. With 3 equal ranks, 4 microbatches and free hops it
is 1F1B; where hops take time:

    rank 0   0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3
    rank 1   1F0 1F1 1F2 1B0 1F3 1B1 1B2 1B3
    rank 2   2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3

Rank s holds d(s) activations at most, between p - s and 2(p - s) - 1. How the layers are split is the partition's
part: `partition=greedy` and `search` give each device as much as its speed allows.

Source: the rule above is ours. The idea of a warm-up that adapts to the links is that of "HARP: orchestrating automated
parallel training on heterogeneous GPU clusters", arXiv 2509.24859, whose planner and choice of depths are not described
closely enough to follow; both orders it lies between are from Fan et al., "DAPPLE", PPoPP'21.
"""

from functools import lru_cache
from itertools import accumulate

from baselines.synchronous.one_f_one_b import alternating
from rpbench.ir.costs import StageCosts
from rpbench.ir.schedule import Schedule, Shape, check_one_stage
from rpbench.ordering.list_order import ROUNDING
from rpbench.registry import schedule

# Microbatches with which depths are tried: all, or with many stages as many as make this number of actions, and at
# least three a stage.
TRIED_ACTIONS = 12_800


@schedule("adaptive_1f1b", source="rule ours; idea: HARP, arXiv 2509.24859", needs_costs=True)
def adaptive_1f1b(shape: Shape, costs: StageCosts) -> Schedule:
    """1F1B with a depth for every stage."""
    check_one_stage("adaptive_1f1b", shape)
    p = shape.num_ranks
    depths = _least_depths(costs, min(shape.num_microbatches, max(3 * p, TRIED_ACTIONS // p)))
    return alternating("adaptive_1f1b", shape, [depth - 1 for depth in depths])


@lru_cache(maxsize=4)  # a partition search asks for the same order several times
def _least_depths(costs: StageCosts, num_microbatches: int) -> list[int]:
    """The depth of every stage: from the deepest, made smaller from the first stage on while no time is lost."""
    gaps = [2] * (costs.num_stages - 1)
    best = _makespan(_depths(gaps), costs, num_microbatches)
    for stage in range(len(gaps)):
        gaps[stage] = 1
        found = _makespan(_depths(gaps), costs, num_microbatches)
        if found > best * (1 + ROUNDING):
            gaps[stage] = 2
        best = min(best, found)
    return _depths(gaps)


def _depths(gaps: list[int]) -> list[int]:
    return [1 + deeper for deeper in accumulate(reversed(gaps), initial=0)][::-1]


def _makespan(depths: list[int], costs: StageCosts, num_microbatches: int) -> float:
    """The time of one step; each stage in turn runs until it needs an input that is not there yet."""
    stages, last = range(len(depths)), len(depths) - 1
    backward = [sum(halves) for halves in zip(costs.input_grad, costs.weight_grad, strict=True)]
    down: list[list[float]] = [[] for _ in stages]  # when each forward has ended
    up: list[list[float]] = [[] for _ in stages]  # and each backward
    free = [0.0] * len(depths)
    active = list(stages)
    while active:
        for stage in active:
            while len(up[stage]) < num_microbatches:
                forward = len(down[stage])
                if forward - len(up[stage]) < depths[stage] and forward < num_microbatches:
                    source, hop = (down[stage - 1] if stage else None), costs.hop
                    if source is not None and len(source) <= forward:
                        break
                    ready = 0.0 if source is None else source[forward] + hop
                    free[stage] = max(free[stage], ready) + costs.forward[stage]
                    down[stage].append(free[stage])
                else:
                    number, above = len(up[stage]), (up[stage + 1] if stage < last else None)
                    if above is not None and len(above) <= number:
                        break
                    ready = 0.0 if above is None else above[number] + costs.hop
                    free[stage] = max(free[stage], ready) + backward[stage]
                    up[stage].append(free[stage])
        active = [stage for stage in active if len(up[stage]) < num_microbatches]
    return max(free)
