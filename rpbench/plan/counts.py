"""Numbers of stages worth trying, plain partitions for each of them, and the moves of one layer."""

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import accumulate, pairwise, product

import numpy as np

from rpbench.cost.arrays import Ints
from rpbench.cost.table import LayerTimes, Number
from rpbench.ir.partition import Partition, split_evenly, symmetric
from rpbench.plan.even_and_greedy import fill_stages, head_total, layer_totals
from rpbench.plan.problem import Problem

Counts = tuple[int, int]  # forward stages, backward stages


def promising_counts(problem: Problem) -> list[Counts]:
    """Numbers of stages to try, best guess first."""
    if problem.entry.separate_cuts:
        return _rank_separate(problem)
    numbers = [problem.num_bound_stages]
    if problem.entry.looped and problem.chunks_per_rank is None:
        # Up to one layer a stage, with the head in a stage of its own; more would only add empty stages.
        ranks = problem.num_ranks
        numbers = [ranks * chunk for chunk in range(1, -(-(problem.num_layers + 1) // ranks) + 1)]
    return [(number, number) for number in numbers]


def _rank_separate(problem: Problem) -> list[Counts]:
    """Every pair of stage counts, by an estimate of the makespan.

    The steady part lies between perfect packing (the work) and lock-step (every stage as long as the longest): their
    mean is taken. Filling and draining pass (p - 1) / 2 stages of either direction, averaged over devices.
    """
    times, layers = problem.times, problem.num_layers
    again = [recompute + backward for recompute, backward in zip(times.recompute, times.backward, strict=True)]
    forward, backward, head = float(sum(times.forward)), float(sum(again)), float(head_total(times))
    nums = np.arange(1, layers + 1)
    cuts = [split_evenly(layers, num) for num in nums.tolist()]
    longest_forward = np.array([max(stage_times(times.forward, cut)) for cut in cuts], float)
    longest_backward = np.array([max(stage_times(again, cut)) for cut in cuts], float)
    longest = np.maximum(np.maximum.outer(longest_forward, longest_backward), head)
    work = forward + backward + head
    slots = np.maximum(np.add.outer(nums, nums + 1), problem.num_ranks) * longest
    steady = (work + np.maximum(slots, work)) / 2 * problem.num_microbatches / problem.num_ranks
    ends = np.add.outer(forward / nums, backward / nums) * (problem.num_ranks - 1) / 2
    order = np.argsort((steady + ends).ravel(), kind="stable")
    return [(int(flat // layers) + 1, int(flat % layers) + 2) for flat in order]  # the fused stage comes on top


def plain_partitions(problem: Problem, counts: Counts) -> list[Partition]:
    """Even and time-balanced partitions into these numbers of stages, from which a search starts."""
    layers, times = problem.num_layers, problem.times
    num_forward, num_backward = counts
    if not problem.entry.separate_cuts:
        cuts = _plain_cuts(layers, num_forward)
        if num_forward > 1:
            cuts += [(*cut, 0) for cut in _plain_cuts(layers, num_forward - 1)]  # the head alone
        inner = num_forward - problem.num_ranks
        if problem.entry.looped and problem.entry.chunks is None and inner > 0:
            # Every device has as many stages with layers, and the last one the head too.
            cuts += [(*(0,) * (problem.num_ranks - 1), *cut, 0) for cut in _plain_cuts(layers, inner)]
        cuts.append(fill_stages(layer_totals(times), problem.head_time, num_forward, problem.stage_speeds(num_forward)))
        return [symmetric(cut) for cut in dict.fromkeys(cuts)]
    found: list[Partition] = []
    for fused in _fused_sizes(times, num_backward):
        below = layers - fused
        if num_forward <= below and 1 <= num_backward - 1 <= below:
            pairs = product(_plain_cuts(below, num_forward), _plain_cuts(below, num_backward - 1))
            found += [Partition(up, (*down, fused), fused=True) for up, down in pairs]
    return found


def _plain_cuts(layers: int, stages: int) -> list[tuple[int, ...]]:
    """Equal stages, with the remainder in the middle, at the start or at the end."""
    base, extra = divmod(layers, stages)
    at_start = (base + 1,) * extra + (base,) * (stages - extra)
    return list(dict.fromkeys([split_evenly(layers, stages), at_start, at_start[::-1]]))


def _fused_sizes(times: LayerTimes, num_backward: int) -> Iterator[int]:
    """Layers in the fused stage: none beside the head, or enough to make it as long as the others."""
    yield 0
    mean = (sum(times.recompute) + sum(times.backward)) / max(1, num_backward - 1)
    tops = accumulate(up + down for up, down in zip(times.forward[::-1], times.backward[::-1], strict=True))
    fitting = sum(head_total(times) + top <= mean for top in tops)
    if 0 < fitting < times.num_layers:
        yield fitting


@cache
def single_moves(num_stages: int, *, near_first: bool = False) -> Ints:
    """All moves of one layer from a stage to another, as changes of the counts, (moves, stages)."""
    givers, takers = np.nonzero(~np.eye(num_stages, dtype=bool))
    if near_first:
        order = np.argsort(np.abs(givers - takers), kind="stable")
        givers, takers = givers[order], takers[order]
    one = np.eye(num_stages, dtype=np.int64)
    return one[takers] - one[givers]


def stage_times(layers: Sequence[Number], counts: tuple[int, ...]) -> list[Number]:
    """Sum of a per-layer time over each stage."""
    ends = [0, *accumulate(counts)]
    return [sum(layers[start:stop]) for start, stop in pairwise(ends)]
