"""ACCO: data parallelism whose sums and steps hide behind compute; each update takes two rounds, the first a trial.

A round runs half of an update's microbatches. While round h runs, lane net sums the gradients of round h - 1, steps,
and gathers the new weights, which round h + 1 reads. The gradient of a first half estimates that of the whole update,
so its step is a trial: its weights are gathered and read, and then weights, moments and step count are restored.

    trial     theta~_{t+1} = Opt(theta_t, g~_t)              g~_t: first half of update t, at theta~_t
    step      theta_{t+1}  = Opt(theta_t, g~_t + g_t)        g_t: second half of update t, at theta_t

Versions count rounds: odd ones are trials, even ones stay, and round h reads version h - 1 (policy `trial`). With 2
devices, 2 stages and two updates of 4 microbatches, device 0:

    compute   0F0 1F0 1B0 0B0 0F2 1F2 1B2 0B2 0F4 1F4 1B4 0B4 0F6 1F6 1B6 0B6
    net       0UNSHARD@0 1UNSHARD@0 0UNSHARD@0 1UNSHARD@0 | 1REDUCE_GRAD 1RESHARD 0REDUCE_GRAD 0RESHARD
              0STEP@1 0UNSHARD@1 1UNSHARD@1 | ... 0STEP@2 0UNSHARD@2 1UNSHARD@2 | ... 0STEP@3 | ... 0STEP@4

Each half is the mean over its own microbatches, and the step takes the mean of the two.

Source: Nabli et al., "ACCO: Accumulate while you Communicate" (arXiv 2406.02613), after a description of its released
code.
"""

from collections.abc import Iterator

from baselines.data_parallel.data_parallel import own_stages, whole_microbatches
from rpbench.ir.action import Action, Kind
from rpbench.ir.policy import Policy
from rpbench.ir.schedule import Schedule, Shape
from rpbench.ir.waits.edges import version_read
from rpbench.passes.lower import with_rows
from rpbench.registry import schedule

ROUNDS = 2  # of an update


def _lower(order: Schedule, *, prefetch: int) -> Schedule:
    """The order with the actions of lane net."""
    devices = range(order.shape.num_ranks)
    return with_rows(order, ({"compute": order.compute(device), "net": _net(order, device)} for device in devices))


@schedule(
    "acco", source="Nabli et al., arXiv 2406.02613", looped=True, rounds=ROUNDS, lower=_lower, whole_microbatches=True
)
def acco(shape: Shape) -> Schedule:
    """The order of data parallelism, of one round after another; the shape's steps are rounds."""
    p, m = shape.num_ranks, shape.num_microbatches
    if m % p:
        more = m + -m % p
        raise ValueError(
            f"acco deals the {m} microbatches of each half of an update to {p} devices: they must be a multiple of "
            f"{p}; take num_microbatches={ROUNDS * more}, two halves of {more}"
        )
    return whole_microbatches(shape, "acco", Policy.TRIAL)


def _net(order: Schedule, device: int) -> Iterator[Action]:
    """Gather weights for two rounds; after each round sum, step, and gather for the round after the next."""
    stages, num_rounds = range(order.shape.num_stages), order.shape.num_steps
    yield from _gathers(order, 0)
    for number in range(num_rounds):
        if number == 0 and num_rounds > 1:
            yield from _gathers(order, 1)
        for stage in reversed(stages):
            yield Action(Kind.REDUCE_GRAD, stage)
            yield Action(Kind.RESHARD, stage)
        yield from (Action(Kind.STEP, stage, version=number + 1) for stage in own_stages(order.shape, device))
        if number + ROUNDS < num_rounds:
            yield from _gathers(order, number + ROUNDS)


def _gathers(order: Schedule, number: int) -> Iterator[Action]:
    """The weights that a round reads of every stage, in the order in which they are used."""
    version = version_read(order.policy, order.shape, number * order.shape.num_microbatches)
    yield from (Action(Kind.UNSHARD, stage, version=version) for stage in range(order.shape.num_stages))
