"""Megatron-LM's tensor parallelism: every device has a shard of every matrix and works on every microbatch.

The first matrix of attention and of the MLP is cut by columns, the second by rows; an all-reduce after each of the two
sums the partial results of all devices, in forward and backward. Part d of an action is the shard of device d. With 2
devices, 2 stages and 2 microbatches (device 0; device 1 has `.1`):

    compute   0F0          1F0          1B0          0B0          0F1 ...
    net           0SUM_F0      1SUM_F0      1SUM_B0      0SUM_B0      0SUM_F1 ...

All devices idle while they wait for a sum; only a microbatch's last sum runs beside the first forward of the next one.
SUM_F stands for the two all-reduces in each layer of a stage's forward, SUM_B for the two of recomputation and the two
of backward: six of n s h elements for each layer and microbatch, of which a device sends 2 (p - 1) / p. Embedding and
head are cut over the vocabulary: there is one more sum for the embedding, in forward and in recomputation, one for the
gradient of the head's input, and three of one number a token for the loss, which bytes and times here leave out.
Weights, gradients, optimizer state and inner activations are 1/p on each device; kept stage inputs are whole, and norms
count as 1/p as well.

With tensors (virtual, cpu) the devices meet at every sum inside F and B, because each layer needs the sums of the one
before; so an action's time includes waiting for others and adding (`sums_wait_s`). SUM_F and SUM_B then check that
their F or B has made exactly the sums they stand for. A stage's STEP updates the shards of all devices and stands on
one of them.

`sequence_parallel` (Korthikanti et al.): between the matrices, where norms, dropout and residuals are, a device has a
slice of every sequence, S/p tokens. Each all-reduce is split into its two halves: slices are gathered before the matrix
that is cut by columns, and after the one cut by rows each device sums its own slice; in backward the other way round.

Source: Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism", arXiv
1909.08053, section 3; `sequence_parallel`: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer
Models", MLSys'23, section 4.2.2.
"""

from collections.abc import Iterator
from dataclasses import replace

from baselines.data_parallel.data_parallel import through_all, with_steps
from rpbench.ir.action import Action, Kind
from rpbench.ir.schedule import Row, Schedule, Shape
from rpbench.passes.lower import with_rows
from rpbench.registry import schedule

_SUM_OF = {Kind.F: Kind.SUM_F, Kind.B: Kind.SUM_B}


def _lower(order: Schedule, *, prefetch: int, sequence_parallel: bool = False) -> Schedule:
    def sums(row: Row) -> Iterator[Action]:
        return (each._replace(kind=_SUM_OF[each.kind]) for each in row if each.kind in _SUM_OF)

    stepped = with_steps(order)
    return with_rows(stepped, ({**lanes, "net": sums(lanes["compute"])} for lanes in stepped.lanes))


@schedule(
    "megatron_tp",
    source="Shoeybi et al., arXiv 1909.08053, section 3",
    looped=True,
    tensor_parallel=True,
    lower=_lower,
    searched={"sequence_parallel": (False, True)},
)
def megatron_tp(shape: Shape, *, sequence_parallel: bool = False) -> Schedule:
    """All devices run the same actions on their shards, a microbatch forward and backward before the next.

    With `sequence_parallel`, norms and residuals are cut along the sequence.
    """
    if not isinstance(sequence_parallel, bool):
        raise ValueError(
            f"schedule.sequence_parallel={sequence_parallel}: whether norms and residuals are cut along the sequence; "
            "take true or false"
        )
    joint = replace(shape, num_parts=shape.num_ranks, tensor_parallel=True, sequence_parallel=sequence_parallel)
    everywhere = (tuple(range(shape.num_ranks)),) * shape.num_stages
    microbatches = range(shape.total_microbatches)
    rows = tuple(tuple(through_all(shape.num_stages, microbatches, part=device)) for device in range(shape.num_ranks))
    return Schedule(joint, rows, name="megatron_tp", placement=everywhere)
