"""Cyclic data parallelism: workers that run whole microbatches and start two slots apart; gradients are one step late.

There are as many workers as stages. A slot is a forward or a backward of one stage; worker i starts each microbatch two
slots after worker i - 1, so that only one worker runs a stage at a time. With 3 workers and 2 steps, in slots:

    worker 0   0F0 1F0 2F0 2B0 1B0 0B0 0F3 1F3 2F3 2B3 1B3 0B3
    worker 1           0F1 1F1 2F1 2B1 1B1 0B1 0F4 1F4 2F4 2B4 1B4 0B4
    worker 2                   0F2 1F2 2F2 2B2 1B2 0B2 0F5 1F5 2F5 2B5 1B5 0B5

A worker waits (`1WAIT0`) for the second forward of the worker before it, and for nothing else. If a backward takes as
long as k - 1 forwards, `stagger=k` keeps the workers evenly apart.

Worker 0 starts a step before worker N - 1 has ended the one before. So all gradients of a step use the weights of the
step before (CDP-v1): theta_{t+1} = theta_t - gamma / N sum_i grad f_i(theta_{t-1}). With `newest` (CDP-v2) worker i
reads theta_t of stage s if that is ready when the worker comes to it, which holds for s + i >= N - 1, and theta_{t-1}
otherwise: worker 0 has one new stage, worker N - 1 all. These weights come just before they are used.

Instead of an all-reduce, a stage's gradient goes from worker to worker, each adding its own, and from the last one to
the stage's home. The home of stage s is worker N - 1 - s, which has its master weights and optimizer state, steps it
just before its next forward, and sends it to worker 0; from there it goes from worker to worker (v2: to worker N - s,
and on round the ring). A worker always keeps a copy of all N stages: after a stage's backward it frees that copy and
loads the next step's. With m = k N microbatches a worker runs k of them a step, which sends N (N - 1) weights of a
stage and k N^2 - 1 sums over the links.

Source: after the abstract of Fournier and Oyallon, "Cyclic Data Parallelism for Efficient Parallelism of Deep Neural
Networks" (arXiv 2403.08837), and from memory: the stagger, the two rules. Counts are derived.
"""

from collections.abc import Iterator

from baselines.data_parallel.data_parallel import through_all
from baselines.data_parallel.weipipe import passed_on
from rpbench.ir.action import Action, Kind
from rpbench.ir.index import Index
from rpbench.ir.policy import Policy
from rpbench.ir.schedule import Schedule, Shape, step_rows
from rpbench.ir.waits.edges import version_read
from rpbench.passes.peer_lanes import check_slices, step_at_home, with_peer_lanes
from rpbench.registry import schedule


def home(stage: int, num_workers: int) -> int:
    """The worker that has a stage's master weights; likewise the stage whose home a worker is."""
    return num_workers - 1 - stage


def _lower(order: Schedule, *, prefetch: int, newest: bool, stagger: int) -> Schedule:
    """The order with every stage's STEP at its home, loads of weights (lane h2d) and stores of sums (lane d2h)."""
    p, loads = order.shape.num_ranks, _loads_before_use if newest else _loads
    stepped = step_at_home(order, [home(worker, p) for worker in range(p)], before_use=True)
    index = Index(stepped)
    return with_peer_lanes(index, lambda worker, _: loads(order, worker), lambda visit: passed_on(index, visit, home))


@schedule("cyclic_dp", source="Fournier and Oyallon, arXiv 2403.08837", lower=_lower, whole_microbatches=True)
def cyclic_dp(shape: Shape, *, newest: bool = False, stagger: int = 2) -> Schedule:
    """Worker i of N runs microbatches i, i + N, i + 2 N, ... of every step.

    Args:
        newest: a worker reads new weights of a stage if they are ready when it first comes there in a step (v2).
        stagger: a worker starts after this many forwards of the worker before it.
    """
    check_slices("cyclic_dp", shape)
    p = shape.num_ranks
    if not 1 <= stagger <= max(p, 2):
        raise ValueError(
            f"schedule.stagger={stagger}: a worker begins after 1 to {max(p, 2)} forwards of the one before, which has "
            f"{p} stages; try 2"
        )
    rows = step_rows(shape, lambda worker, batch: _step(p, worker, batch, stagger))
    policy = Policy.CYCLIC if newest else Policy.DELAYED
    return Schedule(shape, rows, name="cyclic_dp", policy=policy, placement=(tuple(range(p)),) * p)


def _step(p: int, worker: int, batch: range, stagger: int) -> Iterator[Action]:
    for microbatch in batch[worker::p]:
        if worker:
            yield Action(Kind.WAIT, stagger - 1, microbatch - 1)
        yield from through_all(p, [microbatch])


def _loads(order: Schedule, worker: int) -> Iterator[Action]:
    """Load a copy of every stage for every step; a copy that is freed makes room for one of the next step."""
    stages, num_steps = range(order.shape.num_stages), order.shape.num_steps
    yield from (_load(order, stage, worker, 0) for stage in stages)
    for step in range(1, num_steps + 1):
        for following, stage in enumerate(reversed(stages)):
            yield Action(Kind.FREE, stage, object="P")
            if step < num_steps:
                yield _load(order, following, worker, step)


def _loads_before_use(order: Schedule, worker: int) -> Iterator[Action]:
    """Load all copies of a step as it begins, because some weights are made only then."""
    stages, num_steps = range(order.shape.num_stages), order.shape.num_steps
    for step in range(num_steps):
        yield from (_load(order, stage, worker, step) for stage in stages if stage or not step)
        for stage in reversed(stages):
            if not stage and step + 1 < num_steps:  # which is needed at once
                yield _load(order, stage, worker, step + 1)
            yield Action(Kind.FREE, stage, object="P")


def _load(order: Schedule, stage: int, worker: int, step: int) -> Action:
    """Load from the worker before; the home, and the first worker unless weights go round (v2), from the home."""
    shape, at_home = order.shape, home(stage, order.shape.num_ranks)
    version = version_read(order.policy, shape, step * shape.num_microbatches + worker, stage)
    goes_round = order.policy is Policy.CYCLIC and step > 0
    peer = (worker - 1) % shape.num_ranks if worker or goes_round else at_home
    return Action(Kind.LOAD, stage, version=version, object="P", peer=at_home if worker == at_home else peer)
