"""Cargo: what every action of a schedule carries over the link of its device."""

from fractions import Fraction
from typing import NamedTuple

from rpbench.ir.action import RECV, SEND, SUMS, Action, Kind
from rpbench.ir.index import Index
from rpbench.ir.moves import LANES, Moves
from rpbench.ir.saved_inputs import What
from rpbench.ir.schedule import Schedule

LINKS = ("h2d", "d2h", "net")  # lanes on which things travel
# All-reduces a layer: two of its forward, two of its recomputation and two of its backward.
SUMS_A_LAYER = {Kind.SUM_F: 2, Kind.SUM_B: 4}


def carries(schedule: Schedule) -> bool:
    """Whether anything may use a link or the memory of the host."""
    return any(lane != "compute" for lanes in schedule.rows for lane, _ in lanes)


class Cargo(NamedTuple):
    """What an action carries over a link.

    Args:
        object: P, G, O or A, or "boundary" for what a stage hands to its neighbour, or "sum": all-reduces of as much;
            O on lane host is what a STEP there works on.
        stage, backward: whose; `backward` says that backward stages are counted.
        share: the part of it that goes over the link of this device.
        lane: h2d, d2h or net: the link; host: the memory of the host.
    """

    object: str
    stage: int
    backward: bool
    share: Fraction
    lane: str


def cargo_of(index: Index) -> dict[int, Cargo]:
    """What every action that uses a link carries, by number.

    Of n replicas, a gather brings (n - 1) / n of a stage to each and a reduce-scatter as much of its gradient; an
    all-reduce, which is one where nobody gathers, is both. What is gathered afterwards is loaded as a shard. What goes
    from device to device (lane net) is on its way once, what goes through the host is sent and received.
    """
    moves, found = index.moves, dict[int, Cargo]()
    for what, transfers in moves.transfers.items():
        for transfer in transfers:
            first = transfer.visits[0]
            share = _share(moves, what, first.stage) / len(transfer.pieces)
            name = "P" if what in ((Kind.LOAD, "P"), (Kind.UNSHARD, None)) else "G"
            for number in transfer.pieces:
                found[number] = Cargo(name, first.stage, first.backward, share, LANES[what[0]][0])
                if moves.handovers.peer(number) is not None:  # from device to device
                    share_sent = Fraction(0) if moves.handovers.is_local(number) else share
                    found[number] = found[number]._replace(share=share_sent, lane="net")
    part = Fraction(1, index.shape.num_parts)
    for number, action in enumerate(index.actions):
        lane = index.lanes[index.lane_of[number]].name
        if action.kind in (Kind.LOAD, Kind.STORE) and action.object in ("O", "A"):
            found[number] = Cargo(
                action.object, action.stage, True, part if action.object == "A" else Fraction(1), lane
            )
        elif (lane in LINKS and action.kind in SEND) or (lane in ("h2d", "d2h") and action.kind in RECV):
            found[number] = Cargo("boundary", action.stage, False, part, lane)
        elif action.kind in SUMS:
            found[number] = Cargo("sum", action.stage, False, _summed(index, action), lane)
        elif action.kind is Kind.STEP and lane == "host":
            found[number] = Cargo("O", action.stage, True, Fraction(1), lane)
    return found


def _summed(index: Index, action: Action) -> Fraction:
    """Boundary tensors that a device sends for the all-reduces of a stage: 2 (n - 1) / n each."""
    schedule, n = index.schedule, index.shape.num_parts
    layers = 1 if schedule.partition is None else schedule.partition.forward[action.stage]
    return Fraction(2 * (n - 1) * SUMS_A_LAYER[action.kind] * layers, n)


def _share(moves: Moves, what: What, stage: int) -> Fraction:
    replicas = moves.replicas.get(stage, 1)
    gathered, stored = (moves.moves(other, stage) for other in ((Kind.UNSHARD, None), (Kind.STORE, "G")))
    if what == (Kind.UNSHARD, None):
        return Fraction(replicas - 1, replicas)
    if what == (Kind.REDUCE_GRAD, None):
        return Fraction(replicas - 1, replicas) * (1 if gathered or stored else 2)
    return Fraction(1, replicas) if gathered or what == (Kind.STORE, "G") else Fraction(1)
