"""Seq1F1B: 1F1B whose unit of work is a segment of a sequence, not a whole microbatch.

Every microbatch is cut into k segments (`.1` is the second). Forward takes them in order, since the attention of a
segment reads the keys and values of earlier ones; backward takes them in reverse, since these keys and values get
gradients from later segments. With 3 ranks, 2 microbatches and 2 segments:

    rank 0   0F0 0F0.1 0F1 0F1.1 0B0.1 0B0 0B1.1 0B1
    rank 1   1F0 1F0.1 1F1 1B0.1 1F1.1 1B0 1B1.1 1B1
    rank 2   2F0 2F0.1 2B0.1 2F1 2B0 2F1.1 2B1.1 2B1

Rank s begins with min(p - 2 - s + k, mk) forwards, then alternates one forward and one backward. With segments that
take equal time the bubble is (p - 1)(F + B)/k, and rank s holds at most p - s + k - 1 segments, A(p - s + k - 1)/k of
activations. The simulator assumes that segments take equal time ("computation-wise" cuts); the engine cuts sequences
into segments with numbers of tokens as equal as possible.

Source: Sun et al., "Seq1F1B: Efficient Sequence-Level Pipeline Parallelism for Large Language Model Training",
NAACL'25 (arXiv 2406.03488).
"""

from dataclasses import replace
from itertools import chain

from rpbench.ir.action import Action, Kind
from rpbench.ir.schedule import Row, Schedule, Shape, check_one_stage, looped_placement, step_rows
from rpbench.registry import schedule


@schedule("seq1f1b", source="Sun et al., NAACL'25", searched={"num_segments": (2, 4, 8, 1)}, segments="num_segments")
def seq1f1b(shape: Shape, *, num_segments: int = 2) -> Schedule:
    """1F1B of segments.

    Args:
        shape: with one stage on every rank.
        num_segments: parts that every sequence is cut into (k in the paper).
    """
    check_one_stage("seq1f1b", shape)
    if num_segments < 1:
        raise ValueError(f"schedule.num_segments={num_segments}: a sequence has at least 1 segment; try 2")
    shape = replace(shape, num_parts=num_segments)
    rows = step_rows(shape, lambda rank, batch: _step(shape, rank, batch))
    return Schedule(shape, rows, name="seq1f1b", placement=looped_placement(shape))


def _step(shape: Shape, rank: int, batch: range) -> Row:
    parts = range(shape.num_parts)
    forwards = [Action(Kind.F, rank, mb, part) for mb in batch for part in parts]
    backwards = [Action(Kind.B, rank, mb, part) for mb in batch for part in reversed(parts)]

    # As in 1F1B, and the first backward has to wait for the last segment of its microbatch.
    num_warmup = min(shape.num_ranks - 2 - rank + shape.num_parts, len(forwards))
    num_steady = len(forwards) - num_warmup

    pairs = zip(forwards[num_warmup:], backwards[:num_steady], strict=True)
    return (*forwards[:num_warmup], *chain.from_iterable(pairs), *backwards[num_steady:])
