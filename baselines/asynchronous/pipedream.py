"""PipeDream: 1F1B that is never flushed; every microbatch is a step, and microbatches in flight keep old weights.

Stage s of p starts with p - 1 - s forwards, then alternates one forward and one backward, and steps after every
backward. PipeDream's minibatch is a microbatch here, and the window of a step is one microbatch. With 3 ranks and 5
microbatches (without the step after every backward; @v is the version that a forward reads):

    rank 0   0F0@0 0F1@0 0F2@0 0B0 0F3@1 0B1 0F4@2 0B2 0B3 0B4
    rank 1   1F0@0 1F1@0 1B0 1F2@1 1B1 1F3@2 1B2 1F4@3 1B3 1B4
    rank 2   2F0@0 2B0 2F1@1 2B1 2F2@2 2B2 2F3@3 2B3 2F4@4 2B4

Weight stashing: a backward reads the version that its forward read. Forward i of stage s reads version max(0, i - (p -
1 - s)), so a gradient is p - 1 - s steps old and a stage keeps p - s versions. Vertical sync: a microbatch reads on
every stage the version that was newest on the first stage when it entered; then all gradients are p - 1 steps old.

Replicated stages (1F1B-RR): a stage with n replicas is on n ranks, and replica i mod n runs microbatch i, forward and
backward. A step sums the gradients of all replicas, so its window is the least common multiple of the replica counts. A
replica goes on with the new version once its own part of the window is done. With replicas=[2,1]:

    rank 0   0F0@0 0F2@0 0B0 0F4@1 0B2 ...      rank 2   1F0@0 1B0 1F1@0 1B1 1F2@1 1B2 ...
    rank 1   0F1@0 0F3@0 0B1 0F5@1 0B3 ...

Source: Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training", SOSP'19 (arXiv
1806.03377); warm-up of replicated stages as in the released runtime.
"""

from collections.abc import Sequence
from itertools import accumulate

from baselines.synchronous.one_f_one_b import alternate
from rpbench.ir.policy import Policy
from rpbench.ir.schedule import Row, Schedule, Shape, check_one_stage, looped_placement
from rpbench.registry import schedule


@schedule("pipedream", source="Narayanan et al., SOSP'19", steps_each_microbatch=True)
def pipedream(
    shape: Shape,  # `num_microbatches` is the window of a step; the paper's is 1
    *,
    weight_stashing: bool = True,  # backward reads what its forward read; or the newest, which the paper warns against
    vertical_sync: bool = False,  # all stages read the version that was newest on the first stage
    replicas: Sequence[int] | None = None,  # ranks of each stage; None for one each
) -> Schedule:
    """Rank r keeps at most p - r microbatches in flight, and as many versions of its weights."""
    if not weight_stashing and (vertical_sync or replicas is not None):
        raise ValueError(
            "schedule.weight_stashing=false: vertical_sync and replicas keep versions by name, which takes stashing; "
            "leave them out"
        )
    policy = Policy.VERTICAL if vertical_sync else Policy.STASH if weight_stashing else Policy.LATEST
    if replicas is None:
        return never_flushed(shape, "pipedream", policy)
    _check_replicas(shape, replicas)
    starts = [0, *accumulate(replicas)]
    holders = tuple(tuple(range(start, start + n)) for start, n in zip(starts, replicas, strict=False))
    rows = tuple(row for stage in range(shape.num_stages) for row in _replicated(shape, stage, holders[stage]))
    return Schedule(shape, rows, name="pipedream", policy=policy, placement=holders)


def never_flushed(shape: Shape, name: str, policy: Policy) -> Schedule:
    """1F1B over all microbatches of a run, drained only at its end; ValueError unless each rank has one stage."""
    check_one_stage(name, shape, "interleaved_1f1b")
    microbatches = range(shape.total_microbatches)
    rows = tuple(alternate(rank, microbatches, shape.num_ranks - 1 - rank) for rank in range(shape.num_ranks))
    return Schedule(shape, rows, name=name, policy=policy, placement=looped_placement(shape))


def _replicated(shape: Shape, stage: int, holders: Sequence[int]) -> list[Row]:
    """The rows of a stage's replicas, which share the forwards that fill the ranks downstream."""
    num_replicas, downstream = len(holders), shape.num_ranks - 1 - holders[0]
    return [
        alternate(stage, range(replica, shape.total_microbatches, num_replicas), downstream // num_replicas)
        for replica in range(num_replicas)
    ]


def _check_replicas(shape: Shape, replicas: Sequence[int]) -> None:
    given = ",".join(map(str, replicas))
    if not all(isinstance(count, int) and count >= 1 for count in replicas):
        raise ValueError(f"schedule.replicas=[{given}]: a stage has a whole number of replicas, 1 or more")
    if sum(replicas) != shape.num_ranks:
        raise ValueError(
            f"schedule.replicas=[{given}] takes {sum(replicas)} devices, there are {shape.num_ranks}: the replicas of "
            f"all stages use every device once; set num_devices={sum(replicas)}"
        )
    if len(replicas) != shape.num_stages:
        raise ValueError(
            f"schedule.replicas=[{given}] counts {len(replicas)} stages, the partition has {shape.num_stages}: "
            "give one number a stage"
        )
    uneven = [count for count in replicas if shape.num_microbatches % count]
    if uneven:
        raise ValueError(
            f"schedule.replicas=[{given}]: a step adds up {shape.num_microbatches} microbatches, which {uneven[0]} "
            "replicas cannot share evenly; take a multiple of every replica count"
        )
