"""Peer lanes: slices of a model that every rank runs, and takes from the ranks that keep them.

There is one slice for each rank. A rank keeps one for good, with its master weights and optimizer state; the others
come from rank to rank (`rpbench.ir.waits.handovers`) for a visit each, into buffers that are freed in turn:

    h2d       LOAD:P(0)>q LOAD:P(1)>q | FREE:P(0) LOAD:P(2)>q | FREE:P(1) LOAD:P(3)>q ...       with two buffers
    compute               visit 0       visit 1                 visit 2
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from rpbench.ir.action import Action, Kind
from rpbench.ir.index import Index
from rpbench.ir.schedule import Row, Schedule, Shape
from rpbench.ir.waits.visits import Visit


def check_slices(name: str, shape: Shape) -> None:
    """Refuse a shape without one slice for each rank, or whose microbatches cannot be dealt evenly."""
    p, m = shape.num_ranks, shape.num_microbatches
    if shape.num_stages != p:
        raise ValueError(
            f"{name} has {shape.num_stages} slices for {p} ranks: there must be one for each; set chunks_per_device=1"
        )
    if m % p:
        raise ValueError(
            f"{name} deals {m} microbatches to {p} ranks: they must be a multiple of {p}; "
            f"take num_microbatches={m + -m % p}"
        )


def step_at_home(order: Schedule, kept: Sequence[int], *, before_use: bool = False) -> Schedule:
    """The order with the step of a rank's own slice behind its work of every step.

    Args:
        kept: rank -> the slice that it keeps.
        before_use: step as late as can be, right before the rank runs its slice forward in the step after.
    """
    return replace(order, rows=tuple(_with_steps(order, rank, own, before_use) for rank, own in enumerate(kept)))


def _with_steps(order: Schedule, rank: int, own: int, before_use: bool) -> Row:
    row, num_steps = list(order.compute(rank)), order.shape.num_steps
    each = len(row) // num_steps
    for step in range(num_steps, 0, -1):  # the last first: what stands before it stays where it is
        place = step * each
        if before_use and step < num_steps:
            place = next(use for use in range(place, len(row)) if row[use][:2] == (Kind.F, own))
        row.insert(place, Action(Kind.STEP, own, version=step))
    return tuple(row)


def loads(visits: Sequence[Visit], buffers: int, comes_from: Callable[[Visit], int]) -> Iterator[Action]:
    """Transfers that bring the slices of some visits of a rank, into as many buffers.

    Args:
        comes_from: the rank that a visit's slice is taken from.
    """
    for place, visit in enumerate(visits):
        if place >= buffers:
            yield Action(Kind.FREE, visits[place - buffers].stage, object="P")
        yield Action(Kind.LOAD, visit.stage, version=visit.step, object="P", peer=comes_from(visit))
    yield from (Action(Kind.FREE, visit.stage, object="P") for visit in visits[-buffers:])


def sums(visits: Sequence[Visit], goes_to: Callable[[Visit], int]) -> Iterator[Action]:
    """Transfers that pass on the gradient of every backward visit of a rank.

    Args:
        goes_to: the rank that takes the gradient of a visit.
    """
    for visit in visits:
        if visit.backward:
            yield Action(Kind.STORE, visit.stage, object="G", peer=goes_to(visit))
            yield Action(Kind.FREE, visit.stage, object="G")


def microbatch_of(index: Index, visit: Visit) -> int:
    """The first microbatch of a visit."""
    microbatch = index.actions[visit.first].microbatch
    assert microbatch is not None
    return microbatch
