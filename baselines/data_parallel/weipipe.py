"""WeiPipe: weights go round a ring of ranks, activations stay where they are made.

The layers are cut into p slices. Every rank runs all of them for its own microbatches, r, r + p, r + 2p, ...; slices go
from rank r to rank r + 1 together with their gradients, to which each rank adds its own. A rank interleaves the
backward of a microbatch with the forward of its next one, backward first. With 3 ranks and 6 microbatches:

    rank 0   0F0 1F0 2F0 2B0 0F3 1B0 1F3 0B0 2F3 2B3 1B3 0B3
    rank 1       0F1 1F1 2F1 2B1 0F4 1B1 1F4 0B1 2F4 2B4 1B4 0B4
    rank 2           0F2 1F2 2F2 2B2 0F5 1B2 1F5 0B2 2F5 2B5 1B5 0B5

The home of slice s is rank -s mod p, which has its master weights and optimizer state. Two rings turn at once (turns t
= 1, 2, ... of the forward ring, u = 1, 2, ... of the backward ring):

    forward    rank r runs slice (t - 1 - r) mod p; where that is its own it copies it from its master weights
    backward   rank r runs slice (r - u) mod p, and hands it and its gradient to rank r + 1

The gradient of the last microbatch goes home. A rank holds at most p stage inputs, those of one microbatch. In a step
of G = m/p microbatches a rank receives G (p - 1) slices forward, G p backward, and G p gradient sums.

There is no barrier after a turn: rank r starts when the first slice reaches it, and all ranks are then at about the
same place of their rows, so that rank p - 1 must keep a slice until rank 0 comes to its next microbatch. The released
code has four `buffers`, two for each ring.

The released code turns its backward ring the other way, from r to r - 1, where with more than two ranks a rank gets a
slice that it should not run (`tests/schedules/test_weipipe.py` replays both).

Source: Lin et al., "WeiPipe: Weight Pipeline Parallelism for Communication-Effective Long-Context Large Model
Training", PPoPP'25: its interleaved variant, as in the released code except for the ring above.
"""

from collections.abc import Callable, Iterator
from itertools import pairwise

from rpbench.ir.action import Action, Kind
from rpbench.ir.index import Index
from rpbench.ir.schedule import Schedule, Shape, step_rows
from rpbench.ir.waits.visits import Visit
from rpbench.passes.peer_lanes import check_slices, loads, microbatch_of, step_at_home, with_peer_lanes
from rpbench.registry import schedule


def home(stage: int, num_ranks: int) -> int:
    """The rank that has the master weights of a slice."""
    return -stage % num_ranks


def _lower(order: Schedule, *, prefetch: int, buffers: int) -> Schedule:
    """The order with every slice's STEP at its home, and both rings: LOAD:P>q (lane h2d) and STORE:G>q (d2h)."""
    p = order.shape.num_ranks
    index = Index(step_at_home(order, [home(rank, p) for rank in range(p)]))  # `home` is its own inverse
    return with_peer_lanes(
        index,
        lambda _, visits: loads(visits, buffers, lambda visit: _comes_from(index, visit)),
        lambda visit: passed_on(index, visit, home),
    )


@schedule(
    "weipipe",
    source="Lin et al., PPoPP'25",
    lower=_lower,
    searched={"buffers": lambda num_ranks, _: [n for n in (4, 6, num_ranks, num_ranks + 2) if n >= 4]},
    whole_microbatches=True,
    gathers={},
)
def weipipe(shape: Shape, *, buffers: int = 4) -> Schedule:
    """Rank r runs microbatches r, r + p, r + 2p, ... of every step, with room for `buffers` slices beside its own."""
    if type(buffers) is not int or buffers < 4:
        raise ValueError(f"schedule.buffers={buffers}: room for two slices of each ring, 4, or more; try 4")
    check_slices("weipipe", shape)
    p = shape.num_ranks
    rows = step_rows(shape, lambda rank, batch: _step(p, batch[rank::p]))
    return Schedule(shape, rows, name="weipipe", placement=(tuple(range(p)),) * p)


def _step(p: int, own: range) -> Iterator[Action]:
    yield from (Action(Kind.F, stage, own[0]) for stage in range(p))
    for microbatch, following in pairwise(own):
        for stage in range(p):
            yield Action(Kind.B, p - 1 - stage, microbatch)
            yield Action(Kind.F, stage, following)
    yield from (Action(Kind.B, stage, own[-1]) for stage in reversed(range(p)))


def _comes_from(index: Index, visit: Visit) -> int:
    """The rank before; the slice's home, if no rank has loaded the slice yet or this rank is its home."""
    p = index.shape.num_ranks
    own_forward = not visit.backward and visit.device == home(visit.stage, p)
    is_first = microbatch_of(index, visit) == visit.step * index.shape.num_microbatches
    return home(visit.stage, p) if own_forward or is_first else (visit.device - 1) % p


def passed_on(index: Index, visit: Visit, home: Callable[[int, int], int]) -> int:
    """The rank that gets a sum of gradients: the next microbatch's; after the last microbatch the slice's home."""
    p, m = index.shape.num_ranks, index.shape.num_microbatches
    is_last = microbatch_of(index, visit) % m == m - 1
    return home(visit.stage, p) if is_last else (visit.device + 1) % p
