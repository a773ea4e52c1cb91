"""2BP: backward in two halves, with all weight gradients at the end of the step.

I is the input gradient, W the weight gradient. A rank sends its input gradient down at once, so that no rank waits
for weight gradients. With `base=gpipe`, 3 ranks and 4 microbatches:

    rank 0   0F0 0F1 0F2 0F3 0I0 0I1 0I2 0I3 0W0 0W1 0W2 0W3
    rank 1   1F0 1F1 1F2 1F3 1I0 1I1 1I2 1I3 1W0 1W1 1W2 1W3
    rank 2   2F0 2F1 2F2 2F3 2I0 2I1 2I2 2I3 2W0 2W1 2W2 2W3

`base=1f1b` alternates F and I as 1F1B alternates F and B. Either way the bubble is (p-1)(F+I), that of GPipe and
1F1B (p-1)(F+I+W), and every rank holds what its W need for all m microbatches: time is bought with memory.

Source: Rae, Lee and Richings, "2BP: 2-Stage Backpropagation", arXiv 2405.18047. Its fusing of the delayed products over
microbatches is left out.
"""

from itertools import chain

from baselines.synchronous.gpipe import gpipe
from baselines.synchronous.one_f_one_b import one_f_one_b
from rpbench.ir.action import Kind
from rpbench.ir.schedule import Row, Schedule, Shape, check_one_stage, looped_placement
from rpbench.registry import schedule, unknown_name

_BASES = {"gpipe": gpipe, "1f1b": one_f_one_b}


@schedule("two_bp", source="Rae et al., arXiv 2405.18047", searched={"base": tuple(_BASES)})
def two_bp(shape: Shape, *, base: str = "gpipe") -> Schedule:
    """Every rank keeps all microbatches until their W.

    Raises:
        ValueError: for a base that is neither gpipe nor 1f1b, or more or fewer stages than ranks.
    """
    if base not in _BASES:
        raise ValueError(unknown_name("base", base, list(_BASES)))
    check_one_stage("two_bp", shape, "interleaved_zb")
    whole = _BASES[base](shape)
    rows = tuple(_delayed(shape, whole.compute(rank)) for rank in range(shape.num_ranks))
    return Schedule(shape, rows, name="two_bp", placement=looped_placement(shape))


def _delayed(shape: Shape, row: Row) -> Row:
    """A row of F and B, step after step, with I in place of B and every step's W at its end."""
    length = 2 * shape.num_microbatches
    steps = (row[start : start + length] for start in range(0, len(row), length))
    return tuple(chain.from_iterable(map(_split_step, steps)))


def _split_step(step: Row) -> Row:
    first = [action._replace(kind=Kind.I) if action.kind is Kind.B else action for action in step]
    return (*first, *(action._replace(kind=Kind.W) for action in step if action.kind is Kind.B))
