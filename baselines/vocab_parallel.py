"""Vocabulary parallelism: head and embedding cut over all devices, so that no stage is heavy; on 1F1B.

Every device has an equal part of the vocabulary. When a microbatch leaves the last stage, all devices make the logits
of their part with their maximum and sum (HF), and once all sums are known the gradients (HB); then the last stage goes
back. What is exchanged, hidden states, sums and their gradients, crosses between all devices. With 3 ranks and
4 microbatches:

    rank 0   0F0 0F1 0HF0 0F2 0HB0 0HF1 0F3 0HB1 0HF2 0HB2 0B0 0HF3 0HB3 0B1 0B2 0B3
    rank 1   1F0 1F1 1HF0 1HB0 1F2 1HF1 1HB1 1F3 1HF2 1B0 1HB2 1HF3 1B1 1HB3 1B2 1B3
    rank 2   2F0 2HF0 2F1 2HB0 2HF1 2F2 2HB1 2B0 2HF2 2F3 2HB2 2B1 2HF3 2HB3 2B2 2B3

The two waits between a forward of the last stage and its backward keep two (`slack`) more microbatches in flight than
1F1B: p - s + 2 on rank s. A step takes about (m + p + 1)(F + B + H/p), where the head takes H, and F and B are of a
stage without it; without the cut the last stage alone takes m(F + B + H).

Source: Yeung, Qi, Lin and Wan, "Balancing Pipeline Parallelism with Vocabulary Parallelism", MLSys'25 (arXiv
2411.05288), sections 4 and 5: its first algorithm, with two barriers. The embedding's cut is in the memory model only:
looking up takes no time here. The engine runs heads whole, so this one is simulated.
"""

from dataclasses import replace
from itertools import chain

from rpbench.ir.action import Action, Kind
from rpbench.ir.schedule import Row, Schedule, Shape, looped_placement
from rpbench.registry import schedule


@schedule("vocab_parallel", source="Yeung et al., MLSys'25, sections 4 and 5", shards_head=True)
def vocab_parallel(shape: Shape, *, slack: int = 2) -> Schedule:
    """1F1B whose ranks share the head.

    Args:
        shape: with one stage on every rank.
        slack: microbatches in flight more than 1F1B has, for the waits between a last forward and its backward. The
            paper's two barriers take 2; 3 hide them where a backward is much longer than a forward.
    """
    if shape.num_stages != shape.num_ranks:
        raise ValueError(
            f"vocab_parallel puts one stage on each rank, got {shape.num_stages} stages on {shape.num_ranks} ranks; "
            "set chunks_per_device=1"
        )
    if slack < 1:
        raise ValueError(f"schedule.slack={slack}: at least 1 microbatch more must be in flight; try 2")
    shape = replace(shape, num_head_shards=shape.num_ranks)
    rows = tuple(
        tuple(chain.from_iterable(_step(shape, rank, slack, step) for step in range(shape.num_steps)))
        for rank in range(shape.num_ranks)
    )
    return Schedule(shape, rows, name="vocab_parallel", placement=looped_placement(shape))


def _step(shape: Shape, rank: int, slack: int, step: int) -> Row:
    """The actions of a rank in the order of their slots, two slots a microbatch; the head's lie between slots."""
    p, first = shape.num_ranks, step * shape.num_microbatches
    slots = {
        Kind.F: rank,
        Kind.HF: p + 0.25,
        Kind.HB: p + slack - 0.5,
        Kind.B: 2 * p - 1 - rank + 2 * slack,
    }
    timed = [(slot + 2 * mb, kind, mb) for kind, slot in slots.items() for mb in range(shape.num_microbatches)]
    return tuple(Action(kind, rank, first + mb) for _, kind, mb in sorted(timed))
