"""RoundPipe: stages dealt to the devices in rotation, their weights following.

A job is one stage run for all microbatches of a round, in order. Forward stages, then the fused stage (forward,
loss and backward of the top layers), then the backward stages downwards are the jobs 0, 1, 2, ... of a round; job k
goes to device (c + k) mod p, and the rotation c is carried on: c grows by the number of jobs after every round,
over rounds, steps and accumulation. With 3 devices, 2 forward and 3 backward stages, 2 microbatches:

    device 0   0F0 0F1 1B0 1B1
    device 1   1F0 1F1 0B0 0B1
    device 2   2FB0 2FB1

Since no stage is bound to a device, the number of stages need not be a multiple of the number of devices, and
backward, which costs three times the forward with recomputation, is cut finer than forward.

Source: "Efficient Training on Multiple Consumer GPUs with RoundPipe", arXiv 2604.27085; dispatch rule of the
released library, rounds of at most p microbatches as in the artifact's simulator.
"""

from collections.abc import Iterator

from rpbench.ir.action import Action, Kind, actions
from rpbench.ir.policy import Policy
from rpbench.ir.schedule import Schedule, Shape, Weights
from rpbench.registry import schedule


@schedule(
    "roundpipe",
    source="arXiv 2604.27085",
    separate_cuts=True,
    looped=True,
    recompute_ahead=True,
    switch_after_last_forward=True,
    searched={  # one round first, as the library runs it: weights then move least often
        "round_size": lambda p, m: sorted({size for size in (p // 2, p, 2 * p, m) if 0 < size <= m}, reverse=True)
    },
    late={"asynchronous": True},
)
def roundpipe(shape: Shape, *, round_size: int | None = None, asynchronous: bool = False) -> Schedule:
    """Deal every round's jobs to the devices in rotation.

    Args:
        shape: forward and backward stages may differ in number; with `shape.fused` the last backward stage is fused.
        round_size: microbatches per round. None means the number of devices (the artifact's simulator); the
            library runs each call as one round, which is `round_size` = the microbatches of a call.
        asynchronous: the optimizer steps on the host while the next step begins, which reads weights one step old.
    """
    size = shape.num_ranks if round_size is None else round_size
    if size < 1:
        raise ValueError(f"schedule.round_size={round_size}: a round holds at least 1 microbatch; leave it out for p")
    rows: list[list[Action]] = [[] for _ in range(shape.num_ranks)]
    rotation = 0
    for microbatches in _rounds(shape, size):
        for job, (kind, stage) in enumerate(_jobs(shape)):
            rows[(rotation + job) % shape.num_ranks] += actions(kind, stage, microbatches)
        rotation += shape.num_stages + shape.num_backward_stages
    return Schedule(
        shape,
        tuple(tuple(row) for row in rows),
        name="roundpipe",
        policy=Policy.DELAYED if asynchronous else Policy.FLUSH,
        weights=Weights.STREAMED,
    )


def _rounds(shape: Shape, size: int) -> Iterator[range]:
    """The microbatches of each round; a round never reaches over the end of a step."""
    for batch in shape.batches:
        yield from (batch[first : first + size] for first in range(0, len(batch), size))


def _jobs(shape: Shape) -> list[tuple[Kind, int]]:
    """The jobs of one round in dispatch order."""
    top = shape.num_backward_stages - 1
    forwards = [(Kind.F, stage) for stage in range(shape.num_stages)]
    backwards = [(Kind.FB if shape.fused and stage == top else Kind.B, stage) for stage in range(top, -1, -1)]
    return forwards + backwards
