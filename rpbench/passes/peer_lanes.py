"""Peer lanes: every rank runs every slice of a model, and gets a slice from the rank that keeps it.

There is one slice for each rank. A rank keeps one for good, with its master weights and optimizer state; the others
come from rank to rank (`rpbench.ir.waits.handovers`) for one visit each, into buffers that are freed in turn:

    h2d       LOAD:P(0)>q LOAD:P(1)>q | FREE:P(0) LOAD:P(2)>q | FREE:P(1) LOAD:P(3)>q ...       with two buffers
    compute               visit 0       visit 1                 visit 2
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from rpbench.ir.action import Action, Kind
from rpbench.ir.index import Index
from rpbench.ir.schedule import Row, Schedule, Shape, check_even
from rpbench.ir.waits.visits import Visit, visits_of
from rpbench.passes.lower import with_rows


def check_slices(name: str, shape: Shape) -> None:
    """Refuse a shape without one slice for each rank, or whose microbatches cannot be dealt evenly."""
    if shape.num_stages != shape.num_ranks:
        raise ValueError(
            f"{name} has {shape.num_stages} slices for {shape.num_ranks} ranks: there must be one for each; "
            "set chunks_per_device=1"
        )
    check_even(name, shape, "ranks")


def step_at_home(order: Schedule, kept: Sequence[int], *, before_use: bool = False) -> Schedule:
    """The order with the STEP of each rank's own slice (`kept`, by rank) after its work of every step.

    With `before_use` a STEP comes as late as possible: right before the rank's first forward of its slice in the next
    step.
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


def with_peer_lanes(
    index: Index, comes: Callable[[int, Sequence[Visit]], Iterable[Action]], goes_to: Callable[[Visit], int]
) -> Schedule:
    """The schedule with the transfers of a rank: `comes(rank, visits)` on lane h2d, sums of gradients on lane d2h."""
    rows = []
    for rank, visits in enumerate(visits_of(index)):
        lanes = {"compute": index.schedule.compute(rank), "h2d": comes(rank, visits), "d2h": _sums(visits, goes_to)}
        rows.append({name: row for name, found in lanes.items() if (row := tuple(found))})
    return with_rows(index.schedule, rows)


def loads(visits: Sequence[Visit], buffers: int, comes_from: Callable[[Visit], int]) -> Iterator[Action]:
    """Transfers that load the slices of a rank's visits into so many buffers, from the rank `comes_from` names."""
    for place, visit in enumerate(visits):
        if place >= buffers:
            yield Action(Kind.FREE, visits[place - buffers].stage, object="P")
        yield Action(Kind.LOAD, visit.stage, version=visit.step, object="P", peer=comes_from(visit))
    yield from (Action(Kind.FREE, visit.stage, object="P") for visit in visits[-buffers:])


def _sums(visits: Sequence[Visit], goes_to: Callable[[Visit], int]) -> Iterator[Action]:
    """Transfers that send the gradient of each backward visit to the rank `goes_to` names."""
    for visit in visits:
        if visit.backward:
            yield Action(Kind.STORE, visit.stage, object="G", peer=goes_to(visit))
            yield Action(Kind.FREE, visit.stage, object="G")


def microbatch_of(index: Index, visit: Visit) -> int:
    """The first microbatch of a visit."""
    microbatch = index.actions[visit.first].microbatch
    assert microbatch is not None
    return microbatch
