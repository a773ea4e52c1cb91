"""Moved objects: the weights, gradients, optimizer states or activations that each action moves over a link."""

from fractions import Fraction
from functools import cache, partial
from operator import itemgetter
from typing import NamedTuple

from rpbench.ir.action import RECV, SEND, SUMS, Kind
from rpbench.ir.policy import share_moved
from rpbench.ir.schedule import LANES as LANE_NAMES
from rpbench.ir.schedule import Schedule, kinds_of
from rpbench.ir.waits.moves import LANES, Moves
from rpbench.ir.waits.saved_inputs import What

LINKS = ("h2d", "d2h", "net")  # lanes whose actions use a link
# All-reduces of a layer: two of its forward; two of its recomputation and two of its backward.
SUMS_A_LAYER = {Kind.SUM_F: 2, Kind.SUM_B: 4}

_kind_stage_object = itemgetter(0, 1, 5)


def carries(schedule: Schedule) -> bool:
    """Whether a lane other than compute exists, so that actions may use a link or the host's memory."""
    return any(lane != "compute" for lanes in schedule.lanes for lane in lanes)


class Payload(NamedTuple):
    """The object that an action moves over a link, and the fraction of it."""

    # P, G, O or A; "boundary" for a boundary tensor; "sum" for all-reduces of boundary tensors; O on lane host is the
    # optimizer state a STEP there works on
    object: str
    stage: int
    backward: bool  # whether backward stages are counted
    share: Fraction  # the fraction of the object that goes over the link of this device
    lane: str  # h2d, d2h or net: the link; host: the memory of the host


def payloads_of(schedule: Schedule, moves: Moves | None) -> dict[int, Payload]:
    """The object that each action with a link moves, by number.

    With n replicas, a gather brings (n - 1) / n of a stage to each and a reduce-scatter moves as much of its gradient;
    a REDUCE_GRAD without gathers is an all-reduce and moves both. A load before a gather brings a shard. A move from
    device to device counts once, on lane net; one through the host is sent and received. `moves` is None for a schedule
    without transfers of weights, gradients or saved activations.
    """
    if moves is None:
        return _others(schedule)
    return _brought(moves) | _others(schedule) | _rest(schedule, moves)


def _brought(moves: Moves) -> dict[int, Payload]:
    """The weights and gradients that actions move, by number."""
    found, handovers = dict[int, Payload](), moves.handovers
    between_devices = bool(handovers.origins or handovers.carried or handovers.grouped)
    for what, transfers in moves.transfers.items():
        payload = cache(partial(_of_weights, moves, what))  # fractions are slow to make and to compare
        for pieces, visits, _ in transfers:
            _, backward, stage, *_ = visits[0]
            carried = payload(stage, backward, len(pieces))
            for number in pieces:
                found[number] = carried
                if between_devices and handovers.peer(number) is not None:
                    found[number] = payload(stage, backward, len(pieces), handovers.is_local(number))
    return found


def _of_weights(
    moves: Moves, what: What, stage: int, backward: bool, num_pieces: int, is_local: bool | None = None
) -> Payload:
    """The payload of one piece of a transfer; `is_local`: whether a move between ranks stays on one, or None."""
    name = "P" if what in ((Kind.LOAD, "P"), (Kind.UNSHARD, None)) else "G"
    share = Fraction(0) if is_local else _share(moves, what, stage) / num_pieces
    return Payload(name, stage, backward, share, LANES[what[0]][0] if is_local is None else "net")


def _rest(schedule: Schedule, moves: Moves) -> dict[int, Payload]:
    """Under a late rest, the gradients, weights and steps of the columns that the host steps."""
    rule, index = schedule.late_rest, moves.index
    if rule is None or not index.steps:
        return {}
    found = dict[int, Payload]()
    for transfer in moves.transfers[Kind.STORE, "G"]:
        visit = transfer.visits[-1]
        share = _share(moves, (Kind.STORE, "G"), visit.stage) * share_moved(rule, visit.step + 1)
        found[transfer.pieces[0]] = Payload("G", visit.stage, True, share, "d2h")
    for (_, stage), numbers in moves.rest_loads.items():
        # DeepSpeed sends all columns, although a device uses only the late ones, of the weights that train, which are
        # as large as their gradients.
        for number in numbers:
            found[number] = Payload("G", stage, True, Fraction(1, moves.replicas.get(stage, 1)), "h2d")
    for (stage, _), number in index.rests.items():
        found[number] = Payload("O", stage, True, rule.rest, "host")
    return found


def _others(schedule: Schedule) -> dict[int, Payload]:
    """The objects that are neither weights nor gradients, by number."""
    found, first = dict[int, Payload](), 0
    known: dict[str, dict[tuple[Kind, int, str | None], Payload | None]] = {lane: {} for lane in LANE_NAMES}
    carrying = SEND | RECV | SUMS | {Kind.STEP} | {kind for kind, what in schedule.moves if what in ("O", "A")}
    for _, lane, row in schedule.items():
        on_link = lane != "compute" or not SUMS.isdisjoint(schedule.kinds)
        if on_link and not carrying.isdisjoint(kinds_of(row)):
            alike, keys = known[lane], list[tuple[Kind, int, str | None]](map(_kind_stage_object, row))
            alike.update((key, other_payload(schedule, *key, lane)) for key in set(keys) - alike.keys())
            carried = enumerate(map(alike.__getitem__, keys), start=first)
            found |= {number: payload for number, payload in carried if payload is not None}
        first += len(row)
    return found


def other_payload(schedule: Schedule, kind: Kind, stage: int, moved: str | None, lane: str) -> Payload | None:
    """What an action of a kind and stage that names `moved` moves on a lane, if neither weights nor gradients."""
    if (name := _object_of(kind, moved, lane)) is None:
        return None
    share = Fraction(1) if name == "O" else Fraction(1, schedule.shape.num_parts)
    return Payload(name, stage, name in ("O", "A"), _summed(schedule, kind, stage) if name == "sum" else share, lane)


def _object_of(kind: Kind, moved: str | None, lane: str) -> str | None:
    """The object of an action that moves neither weights nor gradients; None for all other actions."""
    if kind in (Kind.LOAD, Kind.STORE):
        return moved if moved in ("O", "A") else None
    if (lane in LINKS and kind in SEND) or (lane in ("h2d", "d2h") and kind in RECV):
        return "boundary"
    if kind in SUMS:
        return "sum"
    return "O" if kind is Kind.STEP and lane == "host" else None


def sums_of_ends(kind: Kind, *, along_sequence: bool) -> tuple[Fraction, Fraction]:
    """Further all-reduces of a forward or a backward at embedding and head, which are cut over the devices.

    Those of the first stage are of the rows looked up, in the forward and in its recomputation; those of the last stage
    of the gradient of the head's input. The head's three numbers a token are left out. With sequence parallelism, half
    an all-reduce is a gather or a scatter: the rows looked up are scattered in the forward and in its recomputation,
    and their gradient is gathered; the head's input is gathered, and its gradient scattered.
    """
    none, half, one = Fraction(0), Fraction(1, 2), Fraction(1)
    if kind is Kind.SUM_F:
        return (half, half) if along_sequence else (one, none)
    return (one, half) if along_sequence else (one, one)


def _summed(schedule: Schedule, kind: Kind, stage: int) -> Fraction:
    """Boundary tensors that a device sends for the all-reduces of a stage: 2 (n - 1) / n each."""
    n = schedule.shape.num_parts
    layers = 1 if schedule.partition is None else schedule.partition.forward[stage]
    of_embedding, of_head = sums_of_ends(kind, along_sequence=schedule.shape.sequence_parallel)
    num_sums = SUMS_A_LAYER[kind] * layers + of_embedding * (stage == 0)
    num_sums += of_head * (stage == schedule.shape.num_stages - 1)
    return Fraction(2 * (n - 1), n) * num_sums


def _share(moves: Moves, what: What, stage: int) -> Fraction:
    replicas = moves.replicas.get(stage, 1)
    gathered, stored = (moves.moves(other, stage) for other in ((Kind.UNSHARD, None), (Kind.STORE, "G")))
    if what == (Kind.UNSHARD, None):
        return Fraction(replicas - 1, replicas)
    if what == (Kind.REDUCE_GRAD, None):
        return Fraction(replicas - 1, replicas) * (1 if gathered or stored else 2)
    return Fraction(1, replicas) if gathered or what == (Kind.STORE, "G") else Fraction(1)
