"""Boundary lanes: boundary tensors as SEND and RECV on the links of the devices.

    through the host   SEND on lane d2h of the device that made it, RECV on lane h2d of the one that uses it
    directly           SEND on lane net, RECV on lane compute, right before the action that uses it

A device sends tensors in the order in which it makes them and receives them in the order in which it needs them, so
that no tensor waits for one that is needed later. Where copies of a stage sum their gradients over the same link, a sum
follows the boundary tensor of its last gradient. Offloaded activations share the link with boundary tensors. With 2
devices and through the host:

    device 0   compute   0F0 0F1                      0B0
               d2h           0SEND_F0 0SEND_F1
               h2d                                 0RECV_B0
    device 1   h2d                    0RECV_F0 ...
               compute                         1F0 1B0
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from operator import itemgetter

from rpbench.ir.action import RECV, SEND, Action, Kind
from rpbench.ir.communication import Hop, hops
from rpbench.ir.index import Index, Lane
from rpbench.ir.schedule import Schedule, ScheduleError
from rpbench.passes.lower import with_rows

Placed = list[tuple[int, Action]]  # each after the number of the computation it follows, in that order
Names = tuple[int, int, int]  # stage, microbatch and part of activations

AHEAD = 2  # computations between the LOAD of an activation and its backward
_READERS = (Kind.R, Kind.B, Kind.I, Kind.W)


def send_over_links(schedule: Schedule, *, direct: bool) -> Schedule:
    """Add the SEND and RECV of every tensor that crosses devices to the lanes of the links it goes over: directly, or
    through the host's memory. ScheduleError if the schedule holds some already, or something else uses the links.
    """
    index = Index(schedule)
    if any(map(index.holds, SEND | RECV)):
        raise ScheduleError("the schedule holds SEND or RECV already: add them once")
    moved = list(hops(index))
    leaving, coming = _by_lane(index, sorted(moved, key=itemgetter(0)), 0), _by_lane(index, moved, 1)
    rows: list[dict[str, Sequence[Action]]] = [dict(lanes) for lanes in schedule.rows]
    marked = map(index.actions.__getitem__, index.marked)
    stored = frozenset(_names(action) for action in marked if action.kind is Kind.STORE and action.object == "A")
    sends, receives = ("net", "compute") if direct else ("d2h", "h2d")
    for lane, sent, received in zip(index.lanes, leaving, coming, strict=True):
        if lane.name != "compute":
            continue
        links = rows[lane.device]
        if sent:
            boundaries = [(hop.producer, hop.send) for hop in sent]
            links[sends] = _merged(boundaries, _placed(links.get(sends, ()), index, lane, stored))
        if direct:
            row, done = list[Action](), lane.start
            for _, consumer, _, receive in received:
                row += index.actions[done:consumer]
                row.append(receive)
                done = consumer
            links["compute"] = [*row, *index.actions[done : lane.stop]]
        elif received:
            boundaries = [(hop.consumer - 1, hop.receive) for hop in received]
            links[receives] = _merged(boundaries, _placed(links.get(receives, ()), index, lane, stored))
    return with_rows(schedule, rows)


def _by_lane(index: Index, moved: Sequence[Hop], end: int) -> list[Sequence[Hop]]:
    """The hops by lane of the producer (`end` 0) or of the consumer (1), by whose number they are sorted."""
    starts = [bisect_left(moved, lane.start, key=itemgetter(end)) for lane in index.lanes]
    return [moved[first:last] for first, last in pairwise([*starts, len(moved)])]


def _merged(boundaries: Placed, others: Placed) -> list[Action]:
    """Boundary tensors among other transfers of a link; after the same computation they go first: they are small."""
    placed = sorted([*boundaries, *others], key=itemgetter(0)) if others else boundaries
    return [action for _, action in placed]


def _placed(row: Sequence[Action], index: Index, lane: Lane, stored: frozenset[Names]) -> Placed:
    """The transfers already on a device's link, each with the number of the action it follows.

    `stored` are the activations that go to the host. ScheduleError for transfers of other kinds than gradient sums and
    activations.
    """
    placed, version, away = Placed(), Counter[int](), set(stored)
    for action in row:
        if action.kind is Kind.REDUCE_GRAD:
            version[action.stage] += 1
            gradients = index.gradients(action.stage, version[action.stage])
            found = max((number for number in gradients if lane.start <= number < lane.stop), default=None)
        else:
            found = _beside_activation(action, away, index, lane)
        before = placed[-1][0] if placed else lane.start
        if found is None or (found < before and action.kind is Kind.REDUCE_GRAD):
            raise ScheduleError(
                f"{index.schedule.name} moves other things on the links of rank {lane.device}: which goes first there "
                "is not known"
            )
        placed.append((max(found, before), action))
    return placed


def _names(action: Action) -> Names:
    return action.stage, action.microbatch or 0, action.part


def _beside_activation(action: Action, away: set[Names], index: Index, lane: Lane) -> int | None:
    """The number of the action that a STORE:A, LOAD:A or FREE:A follows; None for any other kind.

    A STORE:A and its FREE:A follow the forward. A LOAD:A stands shortly before the backward; its FREE:A, and that of
    activations that never leave, follow the backward. `away` are the activations on the host, from which a LOAD:A
    removes its own.
    """
    if action.object != "A":
        return None
    place = _names(action)
    users = [number for kind in _READERS if (number := index.at(kind, *place)) >= 0]
    maker = index.at(Kind.F, *place)
    if maker < 0 or not users:
        return None
    if action.kind is Kind.LOAD:
        away.discard(place)
        return max(maker, min(users) - AHEAD, lane.start)
    return maker if place in away else max(users)
