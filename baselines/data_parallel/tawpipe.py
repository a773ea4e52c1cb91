"""TawPipe: every slice of the model stays on the rank that owns it; the others get a copy for one turn at a time.

The layers are cut into p slices, and every rank runs all of them for its own microbatches, r, r + p, r + 2p, ..., one
microbatch after another. Ranks form Q `groups` of q = p / Q ranks, one group a node. Rank (i mod Q) q + floor(i / Q)
owns slice i, so that successive slices are in successive groups. With 4 ranks, 2 groups and 4 microbatches (ranks 0, 2,
1, 3 own slices 0 to 3):

    rank 0   0F0   1F0 2F0 3F0 3B0 2B0 1B0 0B0
    rank 1   0F1   1F1 2F1 3F1 3B1 2B1 1B1 0B1
    rank 2   0WAIT0 0F2 1F2 2F2 3F2 3B2 2B2 1B2 0B2
    rank 3   0WAIT1 0F3 1F3 2F3 3F3 3B3 2B3 1B3 0B3

    weights     in the owner's group, from the owner (a broadcast); into another group, to the rank with the owner's
                place in it, and from there to the others of that group
    gradients   in the owner's group, to the owner; in another one, to its first rank, which sends the sum to the owner

The slice of the next turn arrives during this turn. An owner runs its own slice on the weights that it keeps. Ownership
and optimizer state never move.

Group g starts g turns later, so that in each turn the groups load from different groups. A rank waits (0WAIT0) once a
step for the first forward of the rank at its place in the group before, and then follows its own pace.

Source: Wu et al., "TawPipe: Topology-Aware Weight Pipeline Parallelism for Accelerating Long-Context Large Models
Training", AAAI'26, arXiv 2511.09741, and its released code; the closed forms are derived from that order.
"""

from collections.abc import Iterator, Sequence

from baselines.data_parallel.data_parallel import through_all
from rpbench.ir.action import Action, Kind
from rpbench.ir.index import Index
from rpbench.ir.partition import divisors
from rpbench.ir.schedule import Schedule, Shape, step_rows
from rpbench.ir.waits.visits import Visit
from rpbench.passes.peer_lanes import check_slices, loads, step_at_home, with_peer_lanes
from rpbench.registry import schedule


def owner(stage: int, num_ranks: int, groups: int) -> int:
    """The rank that keeps a slice."""
    return stage % groups * (num_ranks // groups) + stage // groups


def _comes_from(rank: int, stage: int, p: int, groups: int) -> int:
    """The rank that `rank` loads a slice from."""
    size, home = p // groups, owner(stage, p, groups)
    if rank // size == home // size:
        return home
    relay = rank // size * size + home % size
    return home if rank == relay else relay


def _goes_to(rank: int, stage: int, p: int, groups: int) -> int:
    """The rank that gets the gradient of a slice from `rank`."""
    size, home = p // groups, owner(stage, p, groups)
    first = rank // size * size
    return home if first == home // size * size or rank == first else first


def _lower(order: Schedule, *, prefetch: int, groups: int) -> Schedule:
    """The order with a step of every slice at its owner, LOAD:P>q (lane h2d) and STORE:G>q (d2h).

    So many slices are loaded ahead of the current one; a rank has one buffer more. ValueError for a negative number.
    """
    if prefetch < 0:
        raise ValueError(f"prefetch={prefetch}: slices that come ahead, 0 for none; take 1, as TawPipe does")
    p = order.shape.num_ranks
    kept = sorted(range(p), key=lambda stage: owner(stage, p, groups))

    def comes(rank: int, visits: Sequence[Visit]) -> Iterator[Action]:
        others = [visit for visit in visits if visit.stage != kept[rank]]
        return loads(others, prefetch + 1, lambda visit: _comes_from(visit.device, visit.stage, p, groups))

    index = Index(step_at_home(order, kept))
    return with_peer_lanes(index, comes, lambda visit: _goes_to(visit.device, visit.stage, p, groups))


@schedule(
    "tawpipe",
    source="Wu et al., AAAI'26",
    lower=_lower,
    searched={"groups": lambda num_ranks, _: divisors(num_ranks)},
    whole_microbatches=True,
    gathers={},
)
def tawpipe(shape: Shape, *, groups: int = 1) -> Schedule:
    """Rank r runs microbatches r, r + p, r + 2p, ... of every step, each forward and backward.

    A node has a group of ranks; with one group, slices are broadcast and nothing is relayed.
    """
    p = shape.num_ranks
    if type(groups) is not int or groups < 1 or p % groups:
        allowed = ", ".join(map(str, divisors(p)))
        raise ValueError(f"schedule.groups={groups}: {p} ranks form equal groups only in these numbers: {allowed}")
    check_slices("tawpipe", shape)
    rows = step_rows(shape, lambda rank, batch: _step(batch, rank, p, p // groups))
    return Schedule(shape, rows, name="tawpipe", placement=(tuple(range(p)),) * p)


def _step(batch: range, rank: int, p: int, size: int) -> Iterator[Action]:
    if rank >= size:
        yield Action(Kind.WAIT, 0, batch[rank - size])
    yield from through_all(p, batch[rank::p])
