"""1F1B whose warm-up depth follows the times of devices and links (rule ours; idea: HARP).

Stage s runs d(s) forwards before its first backward, then alternates one of each. With d(s) = p - s (1F1B) every
microbatch pays for two hops. With d(s) = 2(p - s) - 1 (the eager order of DAPPLE) hops are hidden, for nearly twice the
activations. Here the depth grows by one or two from a stage to the one before it: by one wherever that costs no time on
the given devices and links. With 3 equal ranks, 4 microbatches and free hops it is 1F1B; where hops take time:

    rank 0   0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3
    rank 1   1F0 1F1 1F2 1B0 1F3 1B1 1B2 1B3
    rank 2   2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3

Rank s holds at most d(s) activations, between p - s and 2(p - s) - 1. The split of the layers is the partition's part:
`partition=greedy` and `search` give each device as much as its speed allows.

Source: the rule above is ours. A warm-up that adapts to the links is the idea of "HARP: orchestrating automated
parallel training on heterogeneous GPU clusters", arXiv 2509.24859, whose planner and choice of depths are not described
closely enough to follow. Both extreme orders are from Fan et al., "DAPPLE", PPoPP'21.
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
    down: list[list[float]] = [[] for _ in depths]  # when each forward has ended
    up: list[list[float]] = [[] for _ in depths]  # and each backward
    before, after = [None, *down[:-1]], [*up[1:], None]
    backward, free = costs.backward, [0.0] * len(depths)
    active = list(range(len(depths)))
    while active:
        for stage in active:
            forwards, backwards = down[stage], up[stage]
            while len(backwards) < num_microbatches:
                if len(forwards) - len(backwards) < depths[stage] and len(forwards) < num_microbatches:
                    own, source, time = forwards, before[stage], costs.forward[stage]
                else:
                    own, source, time = backwards, after[stage], backward[stage]
                if source is not None and len(source) <= len(own):
                    break
                ready = 0.0 if source is None else source[len(own)] + costs.hop
                free[stage] = max(free[stage], ready) + time
                own.append(free[stage])
        active = [stage for stage in active if len(up[stage]) < num_microbatches]
    return max(free)
