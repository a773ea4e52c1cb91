"""Vocabulary parallelism: head and embedding are cut over all devices, so that no stage is heavy; on 1F1B.

Every device has an equal part of the vocabulary. When a microbatch leaves the last stage, all devices compute the
logits of their part with maximum and sum (HF), and once all sums are known the gradients (HB); then the last stage runs
its backward. Hidden states, sums and their gradients are exchanged between all devices. With 3 ranks, 4 microbatches
and B = 2F:

    rank 0   0F0 0F1 0HF0 0F2 0HF1 0HB0 0F3 0HF2 0HB1 0HF3 0HB2 0B0 0HB3 0B1 0B2 0B3
    rank 1   1F0 1F1 1HF0 1F2 1HF1 1HB0 1F3 1HF2 1HB1 1HF3 1HB2 1B0 1HB3 1B1 1B2 1B3
    rank 2   2F0 2HF0 2F1 2HF1 2HB0 2F2 2HF2 2HB1 2F3 2B0 2HF3 2HB2 2B1 2HB3 2B2 2B3

The two waits between a forward of the last stage and its backward keep two (`slack`) more microbatches in flight than
1F1B: p - s + 2 on rank s. The order comes from slots as long as a mean stage's forward and backward: with slots of
equal length, two more would be too few where backwards are longer. Unless `slack` is given, the value from 1 to 4 whose
step ends first is taken. A step takes about (m + p + 1)(F + B + H/p), where the head takes H, and F and B are of a
stage without it; without the cut the last stage alone takes m(F + B + H).

Source: Yeung, Qi, Lin and Wan, "Balancing Pipeline Parallelism with Vocabulary Parallelism", MLSys'25 (arXiv
2411.05288), sections 4 and 5: its first algorithm, with two barriers.
"""

from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from rpbench.ir.action import Kind
from rpbench.ir.costs import StageCosts
from rpbench.ir.schedule import Schedule, Shape, check_one_stage, looped_placement
from rpbench.ordering.list_order import Pass, Rows, Timed, repeat_steps, shortest, time_rows
from rpbench.registry import schedule

PAPERS_SLACK = 2  # one for each barrier


class Slots(NamedTuple):
    """Lengths of the slots that an order is made on; a period is one of each."""

    forward: float
    backward: float


@schedule(
    "vocab_parallel",
    source="Yeung et al., MLSys'25, sections 4 and 5",
    shards_head=True,
    needs_costs=True,
    searched={"slack": (None, 1, 2, 3)},
)
def vocab_parallel(shape: Shape, costs: StageCosts, *, slack: int | None = None) -> Schedule:
    """1F1B whose ranks share the head.

    Args:
        shape: with one stage on every rank.
        slack: microbatches in flight beyond those of 1F1B, for the waits between a last forward and its backward. The
            paper's two barriers take 2; if not given, times choose.
    """
    check_one_stage("vocab_parallel", shape)
    if slack is not None and slack < 1:
        raise ValueError(f"schedule.slack={slack}: at least 1 microbatch more must be in flight; try 2")
    shape = replace(shape, num_head_shards=shape.num_ranks)
    rows = repeat_steps(shape, _by_times(replace(shape, num_steps=1), costs, slack))
    return Schedule(shape, rows, name="vocab_parallel", placement=looped_placement(shape))


@lru_cache(maxsize=4)  # a partition search asks for the same order several times
def _by_times(shape: Shape, costs: StageCosts, slack: int | None) -> Rows:
    """The rows of one step that end first."""
    p = shape.num_ranks
    units, mean = Slots(1.0, 1.0), Slots(*(sum(times) / p for times in (costs.forward, costs.backward)))
    slacks = [slack] if slack else [PAPERS_SLACK, *(other for other in range(1, 5) if other != PAPERS_SLACK)]

    def timed(slots: Slots, slack: int) -> Timed:
        return time_rows(_rows(shape, slots, slack), lambda stage, _: stage, costs)

    trials = (timed(slots, slack) for slack in slacks for slots in (mean, units))
    return shortest(timed(units, slacks[0]), trials, p + max(slacks)).rows


def _rows(shape: Shape, slots: Slots, slack: int) -> Rows:
    """The passes of every rank in the order of their slots; the head's lie between slots."""
    p, period = shape.num_ranks, slots.forward + slots.backward
    turn = p * slots.forward
    rows = []
    for rank in range(p):
        starts = {
            Kind.F: rank * slots.forward,
            Kind.HF: turn + period / 8,
            Kind.HB: turn + (slack / 2 - 0.25) * period,
            Kind.B: turn + (p - 1 - rank) * slots.backward + slack * period,
        }
        microbatches = range(shape.num_microbatches)
        timed = [(start + mb * period, Pass(kind, rank, mb)) for kind, start in starts.items() for mb in microbatches]
        rows.append([what for _, what in sorted(timed)])
    return rows
