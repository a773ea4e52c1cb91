"""Megatron-LM's tensor parallelism: every device has a share of every matrix and works on every microbatch.

A layer's first matrix of attention and of the MLP is cut by columns, the second by rows; the partial sums of all
devices are added by an all-reduce after each of the two, forth and back. A part of an action is the share of the device
of the same number. With 2 devices, 2 stages and 2 microbatches (device 0; device 1 has `.1`):

    compute   0F0          1F0          1B0          0B0          0F1 ...
    net           0SUM_F0      1SUM_F0      1SUM_B0      0SUM_B0      0SUM_F1 ...

All devices wait for every sum and idle meanwhile; only a microbatch's last sum runs beside the first forward of the
next one. SUM_F stands for the two all-reduces a layer of a stage's forward, SUM_B for the two of recomputation and the
two of backward: six of n s h elements a layer and microbatch, of which a device sends 2 (p - 1) / p. Embedding and head
are cut over the vocabulary: the embedding takes one sum more, forth and when it is run again, the gradient of the
head's input one, and the loss three of a number a token, which bytes and times here leave out. Weights, gradients,
optimizer state and inner activations are 1/p on each device; kept stage inputs are whole, norms count as shared.

With tensors (virtual, cpu) the devices meet at every sum, which is inside F and B, because layers need one another's:
SUM_F and SUM_B then close the account, and fail unless their F or B has made exactly the sums they stand for. So an
action's time holds the waiting for others and the adding (`sums_wait_s`), and the lane `net` takes next to none; bytes
are counted as they are sent (`sums_sent_bytes`). Norms run whole on every device, where times and bytes of the
simulator divide them too. Of the logits a device has those of its own rows (`rpbench.models.shards`). A
stage's STEP updates the shares of all devices on the device that it stands on, every device having as many stages as
any other.

`sequence_parallel` (Korthikanti et al.): between the matrices, where norms, dropout and residuals are, a device has a
slice of every sequence, S/p tokens. Each all-reduce comes in its two halves: slices are gathered before the matrix that
is cut by columns, and behind the one cut by rows each device adds up its own slice; going back the other way round.
Bytes in layers are the same. Of the embedding's sum the second half is the head's, so that an embedding which is run
again takes half a sum less. Kept stage inputs are 1/p on each device, and so is what norms keep. Norms have their scale
on every device, and a part of its gradient.

A sum of parts rounds differently from one product, so no bit of the whole model can be asked for. What is checked bit
for bit is plain training of the same shares in one process; beside it stands the difference from the whole layers, of
each step's gradient on the same weights (`whole_grad_max_rel_diff`, rounding alone: 1e-12 and less in float64). Heads,
heads of keys and values, and the inner width must divide by the number of devices.

Source: Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism", arXiv
1909.08053, section 3; `sequence_parallel`: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer
Models", MLSys'23, section 4.2.2.
"""

from dataclasses import replace

from baselines.data_parallel.data_parallel import with_steps
from rpbench.ir.action import Action, Kind
from rpbench.ir.schedule import Row, Schedule, Shape
from rpbench.registry import schedule

_SUM_OF = {Kind.F: Kind.SUM_F, Kind.B: Kind.SUM_B}


def _lower(order: Schedule, *, prefetch: int, sequence_parallel: bool = False) -> Schedule:
    stepped = with_steps(order)
    rows = [
        {**lanes, "net": tuple(_sum(action) for action in lanes["compute"] if action.kind in _SUM_OF)}
        for lanes in stepped.lanes
    ]
    return replace(stepped, rows=tuple(rows))


def _sum(action: Action) -> Action:
    return action._replace(kind=_SUM_OF[action.kind])


@schedule(
    "megatron_tp",
    source="Shoeybi et al., arXiv 1909.08053, section 3",
    looped=True,
    tensor_parallel=True,
    lower=_lower,
    searched={"sequence_parallel": (False, True)},
)
def megatron_tp(shape: Shape, *, sequence_parallel: bool = False) -> Schedule:
    """All devices run the same actions, each its share of them, a microbatch forth and back before the next.

    Args:
        sequence_parallel: norms and residuals are cut along the sequence.

    Raises:
        ValueError: if that is neither true nor false.
    """
    if not isinstance(sequence_parallel, bool):
        raise ValueError(
            f"schedule.sequence_parallel={sequence_parallel}: whether norms and residuals are cut along the sequence; "
            "take true or false"
        )
    joint = replace(shape, num_parts=shape.num_ranks, tensor_parallel=True, sequence_parallel=sequence_parallel)
    everywhere = (tuple(range(shape.num_ranks)),) * shape.num_stages
    rows = tuple(_row(shape, device) for device in range(shape.num_ranks))
    return Schedule(joint, rows, name="megatron_tp", placement=everywhere)


def _row(shape: Shape, device: int) -> Row:
    stages = range(shape.num_stages)
    both_ways = [(Kind.F, stage) for stage in stages] + [(Kind.B, stage) for stage in reversed(stages)]
    return tuple(
        Action(kind, stage, microbatch, device)
        for microbatch in range(shape.total_microbatches)
        for kind, stage in both_ways
    )
