"""kFkB: 1F1B whose unit is a group of k microbatches: k forwards, then k backwards, in turn.

While one microbatch of a group is in transfer, the ranks work on the others, so that runs of equal work hide a slow
link, at the price of k times as many activations. k = 1 is 1F1B, k = m is GPipe. With 3 ranks, 6 microbatches and k =
2:

    rank 0   0F0 0F1 0F2 0F3 0F4 0F5 0B0 0B1 0B2 0B3 0B4 0B5
    rank 1   1F0 1F1 1F2 1F3 1B0 1B1 1F4 1F5 1B2 1B3 1B4 1B5
    rank 2   2F0 2F1 2B0 2B1 2F2 2F3 2B2 2B3 2F4 2F5 2B4 2B5

`group_size=0` lets the times choose: the k whose step ends first, the smallest of those that end together, within
`in_flight` microbatches on the first rank.

Source: Wang et al., "Ada-Grouper: Accelerating Pipeline Parallelism in Preempted Network by Adaptive Group-Scheduling
for Micro-Batches", arXiv 2303.01675: the rule, from its abstract. How k is chosen is ours.
"""

from functools import lru_cache
from itertools import zip_longest

from rpbench.ir.action import Kind, actions
from rpbench.ir.costs import StageCosts
from rpbench.ir.schedule import Row, Schedule, Shape, check_one_stage, looped_placement, step_rows
from rpbench.ordering.list_order import ROUNDING, Rows, as_passes, time_rows
from rpbench.registry import schedule


@schedule("kfkb", source="Wang et al., arXiv 2303.01675", needs_costs=True)
def kfkb(shape: Shape, costs: StageCosts, *, group_size: int = 2, in_flight: int | None = None) -> Schedule:
    """1F1B of groups.

    Args:
        group_size: microbatches of a group (k); the last group of a step may be smaller. 0: the times choose.
        in_flight: with group_size=0, the most microbatches the first rank may hold; None: all of a step.
    """
    p, m = shape.num_ranks, shape.num_microbatches
    check_one_stage("kfkb", shape)
    if type(group_size) is not int or group_size < 0:
        raise ValueError(f"schedule.group_size={group_size}: a group holds at least 1 microbatch; 0 lets times choose")
    if in_flight is not None and (group_size or in_flight < min(p, m)):
        raise ValueError(
            f"schedule.in_flight={in_flight} with schedule.group_size={group_size}: room for at least as many "
            f"microbatches as 1F1B holds, {min(p, m)}, and only where times choose; take schedule.group_size=0"
        )
    size = group_size or _choose(p, m, costs, in_flight or m)
    rows = step_rows(shape, lambda rank, batch: _step(p, rank, batch, size))
    return Schedule(shape, rows, name="kfkb", placement=looped_placement(shape))


def _step(p: int, rank: int, batch: range, size: int) -> Row:
    groups = [batch[first : first + size] for first in range(0, len(batch), size)]
    num_warmup = min(p - 1 - rank, len(groups))
    order = [(Kind.F, group) for group in groups[:num_warmup]]
    for forward, backward in zip_longest(groups[num_warmup:], groups):
        order += [(Kind.F, forward)] * (forward is not None) + [(Kind.B, backward)]
    return tuple(action for kind, group in order for action in actions(kind, rank, group))


@lru_cache(maxsize=4)  # a partition search asks for the same order several times
def _choose(p: int, m: int, costs: StageCosts, in_flight: int) -> int:
    """The group size whose step ends first; of those that end together, the one that holds least."""
    sizes = [size for size in range(1, m + 1) if m % size == 0 and min(size * p, m) <= in_flight]
    times = {size: time_rows(_passes(p, range(m), size), _rank_of, costs).makespan for size in sizes}
    shortest = min(times.values())
    return next(size for size in sizes if times[size] <= shortest * (1 + ROUNDING))


def _rank_of(stage: int, _: int) -> int:
    return stage


@lru_cache(maxsize=16)  # the same under many times, as a search of cuts asks
def _passes(p: int, batch: range, size: int) -> Rows:
    return as_passes(_step(p, rank, batch, size) for rank in range(p))
