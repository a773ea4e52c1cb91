"""MegaTrain: a model in host memory streams through one device layer by layer, and few stage inputs are kept.

The forward keeps the input of every K-th layer (`checkpoint_interval`). The backward goes through blocks of K layers,
the last block first: the layers of a block run forward again from the kept input, each making the input of the next (R,
without a graph); then each layer, from the last, runs forward once more with a graph and then backward. Every run of a
layer loads it, while the next layer arrives in a second buffer. With 4 layers, K = 2 and 1 microbatch:

    h2d       0LOAD:P 1LOAD:P 2LOAD:P 3LOAD:P 2LOAD:P 3LOAD:P 3LOAD:P         2LOAD:P         0LOAD:P ...
    compute   0F0     1F0     2F0     3F0     2R0     3R0     3B0             2B0             0R0 1R0 1B0 0B0
    d2h                                                           3STORE:G        2STORE:G        1STORE:G 0STORE:G
    host                                                                                            1STEP@1 ... 0STEP@1

Host memory holds master weights, optimizer state and the sum of gradients. The work is F + R + (R + B).

The output of the last R of a block is never read. The released code runs it, so it runs here as well.

The host steps layer 1 first and layer 0 last, so that the first step waits for the backward of layer 1, not of layer 0;
the next forward waits for all steps. Several devices stream the one copy of the host, each for its own microbatches.

Source: "MegaTrain", arXiv 2604.05091, after its released code and README; counts of bytes are derived from that order.
"""

from collections.abc import Iterator
from dataclasses import replace

from baselines.data_parallel.data_parallel import own_part
from baselines.offloading.greedysnake import with_host_steps
from rpbench.ir.action import Action, Kind
from rpbench.ir.schedule import Schedule, Shape, Weights, check_even, step_rows
from rpbench.passes.offload import stream
from rpbench.registry import schedule


def _lower(order: Schedule, *, prefetch: int, checkpoint_interval: int) -> Schedule:
    """The order with host steps and weights. Of each version, layer 0 is stepped last: its gradient comes last."""
    stepped = with_host_steps(order, lambda step: (step.version or 0, step.stage == 0, step.stage))
    return stream(stepped, prefetch=prefetch, activations=False)


@schedule(
    "megatrain", source="arXiv 2604.05091", looped=True, lower=_lower, searched={"checkpoint_interval": (4, 2, 8)}
)
def megatrain(shape: Shape, *, checkpoint_interval: int = 4) -> Schedule:
    """One microbatch after another, forward, then backward by blocks: every 2 or more layers keep their input."""
    if type(checkpoint_interval) is not int or checkpoint_interval < 2:
        raise ValueError(
            f"schedule.checkpoint_interval={checkpoint_interval}: layers of which one has its input kept, 2 or more, "
            "or there is nothing to make again; try 4"
        )
    check_even("megatrain", shape)
    rows = step_rows(
        shape,
        lambda device, batch: (
            action
            for microbatch in own_part(shape, device, batch)
            for action in _microbatch(microbatch, shape.num_stages, checkpoint_interval)
        ),
    )
    kept = replace(shape, keeps_every=checkpoint_interval)
    return Schedule(kept, rows, name="megatrain", weights=Weights.STREAMED)


def _microbatch(microbatch: int, num_stages: int, interval: int) -> Iterator[Action]:
    yield from (Action(Kind.F, stage, microbatch) for stage in range(num_stages))
    for first in reversed(range(0, num_stages, interval)):
        block = range(first, min(first + interval, num_stages))
        yield from (Action(Kind.R, stage, microbatch) for stage in block)
        yield from (Action(Kind.B, stage, microbatch) for stage in reversed(block))
