"""ZB-H1: 1F1B with backward cut in two; the weight gradients fill the former drain.

I is the input gradient, W the weight gradient. Rank r puts off its first W by r microbatches, so that gradients travel
down the pipeline without waiting for it. With 3 ranks and 4 microbatches:

    rank 0   0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3
    rank 1   1F0 1F1 1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3
    rank 2   2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3

The bubble of the longest device-local span is (p-1)(F+I-W), that of 1F1B (p-1)(F+I+W). A rank holds at most p
activations, as the first rank of 1F1B does.

Source: Qi et al., "Zero Bubble Pipeline Parallelism", ICLR'24 (arXiv 2401.10241). The paper writes B for what is I
here.
"""

from collections.abc import Callable, Sequence

from rpbench.ir.action import Action, Kind, actions
from rpbench.ir.schedule import Row, Schedule, Shape, check_one_stage, looped_placement, step_rows
from rpbench.registry import schedule


@schedule("zb_h1", source="Qi et al., ICLR'24")
def zb_h1(shape: Shape) -> Schedule:
    """Every rank keeps at most min(num_ranks, num_microbatches) activations until their W."""
    p = shape.num_ranks
    return split_schedule("zb_h1", shape, [(p - rank, rank) for rank in range(p)])


def split_schedule(name: str, shape: Shape, counts: list[tuple[int, int]]) -> Schedule:
    """One stage a rank, backward in two halves; ValueError for more or fewer stages than ranks.

    `counts` are, of each rank, its warmup forwards and how many later I its first W waits for.
    """
    check_one_stage(name, shape, "interleaved_zb")
    rows = step_rows(shape, lambda rank, batch: split_step(lambda kind: actions(kind, rank, batch), *counts[rank]))
    return Schedule(shape, rows, name=name, placement=looped_placement(shape))


def split_step(actions_of: Callable[[Kind], Sequence[Action]], num_warmup: int, lag: int) -> Row:
    """One rank's step: `num_warmup` forwards, then I and F in turn; each W waits for `lag` more I."""
    forwards, inputs, weights = map(actions_of, (Kind.F, Kind.I, Kind.W))
    order = list(forwards[:num_warmup])
    for number, action in enumerate(inputs):
        order.append(action)
        if number >= lag:
            order.append(weights[number - lag])
        order.extend(forwards[num_warmup + number : num_warmup + number + 1])
    return (*order, *weights[max(0, len(weights) - lag) :])
