"""The partition that simulates best: the search of a contest (`rpbench.plan.contest`) over the cuts of one problem.

Only numbers of stages and cuts are open. The starting partitions are timed too, over all steps, so the answer is never
worse than the published, the even, the greedy or Mobius's partition. It is deterministic.

A run is as long as its last transfer or update takes, for which a further step would wait; a record of one or two steps
leaves out what ends after the last computation, so that another cut may be faster there.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from math import inf

from rpbench.cost.hardware.machine import Machine
from rpbench.cost.transfers import OptimizerTraffic
from rpbench.ir.partition import Partition
from rpbench.ir.waits.moves import has_transfers
from rpbench.passes.recomputation import Recompute
from rpbench.plan.contest.contender import Contender, Space
from rpbench.plan.contest.frame import FRAME, FRAME_OF_TIMES
from rpbench.plan.contest.plans import Budget, beats
from rpbench.plan.contest.search import Search
from rpbench.plan.contest.terms import Limits, Terms
from rpbench.plan.contest.trials import RESERVED
from rpbench.plan.counts import promising_counts
from rpbench.plan.problem import Problem
from rpbench.workload.architecture import Architecture

# Cuts timed in full per number of stages on a device: if each cut has its own order, and if all cuts share one.
CUTS, CUTS_OF_ORDER = 6, 2
# How often a sketch may spend its work: before its climb, in it, and in the climb with another order.
TIMES, TIMES_OF_PAIRS = 4, 1.5
MOVING = 2  # with transfers, half of the budget is for cuts timed in full


def plan_search(problem: Problem, starts: Sequence[Partition], *, budget: int) -> tuple[Partition, int]:
    """The best partition found, and how many were simulated.

    A partition that fits into memory beats one that does not. If none fits, memory is ignored. Raises ValueError if the
    schedule takes no cut at all.

    Args:
        starts: partitions to time as well; they fit the schedule, with any number of stages.
        budget: actions to time; a tenth of `BUDGET` brings most of the gain.
    """
    space = _space(problem, starts)
    num, entry = len(space.dimensions["chunks_per_device"]), problem.entry
    alone = entry.needs_costs or entry.separate_cuts  # every cut has an order of its own
    work = RESERVED + len(starts) + num * (CUTS * (FRAME_OF_TIMES + 1) if alone else FRAME + CUTS_OF_ORDER)
    times = (TIMES_OF_PAIRS if entry.separate_cuts else TIMES) * (MOVING if _moves(problem) else 1)
    spend = Budget(work, max(1, int(budget / times / num)))
    search = Search(Contender(problem.entry), _terms(problem, starts), spend, space)
    search.look()
    best = search.finish(everywhere=False, recuts=False)
    for start in starts:
        known = search.in_full(best.setting, start)
        best = known if known is not None and beats(known, best) else best
    if not best.timed.fits:
        return plan_search(replace(problem, memory=None), starts, budget=budget)
    return best.cut, search.sketcher.tally.num_evaluated + search.num_timed


def _moves(problem: Problem) -> bool:
    """Whether transfers or the optimizer take time, so that a sketch is no timeline."""
    if problem.traffic is None or problem.traffic.optimizer:
        return problem.traffic is not None
    with suppress(ValueError):  # as the search will say
        return has_transfers(problem.finished(problem.schedule(*promising_counts(problem)[0])))
    return True


def _space(problem: Problem, starts: Sequence[Partition]) -> Space:
    """The space of a problem: only the number of stages on a device is open, beside the cut."""
    chunks: tuple[int | None, ...] = (problem.chunks_per_rank,)
    if problem.entry.looped and not problem.entry.separate_cuts:
        stages = [counts[0] for counts in promising_counts(problem)] + [len(start.forward) for start in starts]
        chunks = tuple(dict.fromkeys(number // problem.num_ranks for number in stages))
    dimensions = {"microbatch_sequences": (1,), "chunks_per_device": chunks, "prefetch": (1,)}
    return Space({**dimensions, "recompute": (_recompute(problem),)}, tuple(problem.options.items()))


def _recompute(problem: Problem) -> Recompute:
    if problem.fitting or problem.keeps_last:
        return "fitting" if problem.fitting else "except_last"
    return "none" if problem.memory is not None and problem.memory.sizes.keeps_activations else "all"


def _terms(problem: Problem, starts: Sequence[Partition]) -> Terms:
    """The problem's own terms. A microbatch counts as one token, so the pace is the inverse of the run's length."""
    memory = problem.memory
    return Terms(
        Architecture("posed", problem.num_layers, hidden=1, heads=1, vocab=1, seq_len=1),
        Machine("posed"),
        lambda sequences: problem.times,
        OptimizerTraffic(0, 1, inf),  # only the problem charges for an optimizer
        problem.num_ranks,
        problem.num_microbatches,
        (1,),
        problem.num_steps,
        Limits(None if memory is None else memory.limit_bytes),
        problem=problem,
        starts=tuple(starts),
    )
