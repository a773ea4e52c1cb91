"""Communication: the tensors that cross devices, and the SEND and RECV that move each of them."""

from collections.abc import Iterable, Iterator
from functools import partial
from itertools import compress, count, repeat
from operator import itemgetter
from typing import NamedTuple

from rpbench.ir.action import RECV, SEND, Action, Kind, from_fields, receive_of
from rpbench.ir.checks.excerpt import broken
from rpbench.ir.index import Index
from rpbench.ir.waits.edges import edges_of

_USERS = frozenset({Kind.F, Kind.B, Kind.I, Kind.R, Kind.FB})  # kinds that use a tensor of another stage


class Hop(NamedTuple):
    """A tensor made on one device and used on another, with the actions that move it."""

    producer: int
    consumer: int
    send: Action
    receive: Action


_hop_of = partial(tuple.__new__, Hop)  # of all fields in their order: there are thousands


def hops(index: Index) -> Iterator[Hop]:
    """Every tensor that crosses devices, whether or not the schedule holds actions to move it."""
    return _hops(index, crosses=True)


def local_hops(index: Index) -> Iterator[Hop]:
    """Every tensor that stays on its device and may wait on the host: its user is not the next action."""
    return (
        hop
        for hop in _hops(index, crosses=False)
        if hop.producer != hop.consumer - 1 and not index.actions[hop.consumer].sub
    )


def _hops(index: Index, *, crosses: bool) -> Iterator[Hop]:
    """Tensors that cross devices, or those that do not: by consumer, and for one consumer in the order of its needs."""
    device_of = [device for device, _, start, stop in index.lanes for _ in range(start, stop)]
    overlaps, found = Kind.OVERLAP in index.schedule.kinds, list[Hop]()
    places = list[int]()  # of the user in an action with several, hop by hop
    for kind, stage, part, producers, consumers, moved in edges_of(index, receives=False):
        if kind not in _USERS or moved == "order":
            continue
        chosen = [
            number >= 0 <= producer and (device_of[producer] != device_of[number]) == crosses
            for producer, number in zip(producers, consumers, strict=True)
        ]
        if True not in chosen:
            continue
        microbatches, makers, users = (list(compress(own, chosen)) for own in (count(), producers, consumers))
        above = stage if kind is Kind.F else index.shape.num_stages
        ends = ((Kind.SEND_B, stage + 1), (Kind.RECV_B, stage))
        if moved != "gradient":
            ends = ((Kind.SEND_F, above - 1), (Kind.RECV_F, above))
        sent = _between(ends[0], microbatches, part, map(device_of.__getitem__, users))
        received = _between(ends[1], microbatches, part, map(device_of.__getitem__, makers))
        found += map(_hop_of, zip(makers, users, sent, received, strict=True))
        if overlaps:
            inside = ([each[:4] for each in index.actions[number].sub] for number in users)
            wanted = ((kind, stage, microbatch, part) for microbatch in microbatches)
            places += (held.index(what) if held else 0 for held, what in zip(inside, wanted, strict=True))
    if overlaps:
        found = [hop for _, hop in sorted(zip(places, found, strict=True), key=itemgetter(0))]
    return iter(sorted(found, key=itemgetter(1)))


def _between(what: tuple[Kind, int], microbatches: Iterable[int], part: int, peers: Iterable[int]) -> Iterator[Action]:
    """The SENDs or RECVs of a stage and part, one a microbatch."""
    kind, stage, none = repeat(what[0]), repeat(what[1]), repeat(None)
    return map(from_fields, zip(kind, stage, microbatches, repeat(part), none, none, peers, repeat(()), strict=False))


def check_communication(index: Index, *, required: bool = False) -> None:
    """Check that every tensor that crosses devices has one SEND and one RECV in the right places, and no others stand.

    A schedule without any is not lowered yet, and passes unless they are `required`.
    """
    kinds = [kind for kind in (*SEND, *RECV) if index.holds(kind)]
    if not kinds and not required:
        return
    present = {number for kind in kinds for number in index.numbers(kind) if number >= 0}
    for hop in hops(index):
        for action, user in ((hop.send, hop.producer), (hop.receive, hop.consumer)):
            number = index.find(action)
            if number < 0:
                source, target = index.device(hop.producer), index.device(hop.consumer)
                raise broken(
                    index.schedule,
                    f"{action} is missing: {index.actions[hop.consumer]} on rank {target} uses what "
                    f"{index.actions[hop.producer]} makes on rank {source}",
                    [hop.producer, hop.consumer],
                    way_out="lower_communication adds every SEND and RECV to a schedule without any",
                )
            found = index.actions[number]
            if index.device(number) != index.device(user) or found.peer != action.peer:
                raise broken(
                    index.schedule,
                    f"{found} on rank {index.device(number)} must be {action} on rank {index.device(user)}, "
                    f"the rank of {index.actions[user]}",
                    [number, user],
                )
            present.discard(number)
    present -= set(_waiting_on_host(index, present))
    if present:
        number = min(present)
        rule = f"{index.actions[number]} moves nothing: what it names does not cross from one rank to another"
        raise broken(index.schedule, rule, [number], way_out="take it out")


def _waiting_on_host(index: Index, numbers: set[int]) -> Iterator[int]:
    """The SENDs and RECVs whose tensors go to the host and come back to the same device."""
    for number in numbers:
        action, lane = index.actions[number], index.lanes[index.lane_of[number]]
        if action.kind in SEND and action.peer == lane.device and lane.name == "d2h":
            other = index.find(receive_of(action))
            place = None if other < 0 else index.lanes[index.lane_of[other]]
            if place and (place.device, place.name) == (lane.device, "h2d"):
                yield from (number, other)


def check_pair_order(index: Index) -> None:
    """Check that any two ranks receive tensors in the order they are sent; NCCL, for one, matches no names."""
    sent: dict[tuple[object, object], list[int]] = {}
    received: dict[tuple[object, object], list[int]] = {}
    for number, action in enumerate(index.actions):
        if action.kind in SEND:
            sent.setdefault((index.device(number), action.peer), []).append(number)
        elif action.kind in RECV:
            received.setdefault((index.device(number), action.peer), []).append(number)
    for (source, target), numbers in sent.items():
        for number, other in zip(numbers, received[target, source], strict=True):
            expected = receive_of(index.actions[number])
            if index.find(expected) != other:
                raise broken(
                    index.schedule,
                    f"rank {source} sends {index.actions[number]} while rank {target} waits to receive "
                    f"{index.actions[other]}: between two ranks tensors keep their order",
                    [number, other],
                )
