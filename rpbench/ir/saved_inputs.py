"""Kept activations: STORE:A, LOAD:A and FREE:A of what a backward stage recomputes from, matched with each other."""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TypeVar

from rpbench.ir.action import Kind
from rpbench.ir.excerpt import broken
from rpbench.ir.index import Index
from rpbench.ir.partition import Partition
from rpbench.ir.schedule import Schedule, ScheduleError, Weights

What = tuple[Kind, str | None]  # kind and object
Numbers = Mapping[tuple[What, int, int], Sequence[int]]  # (what, device, stage) -> actions
Moved = dict[tuple[Kind, int, int], int]  # STORE or LOAD, stage, place of the microbatch -> action
Ends = dict[tuple[Kind, int, int, int], int]  # kind that a FREE ends, stage, place, device -> the FREE
Key = TypeVar("Key")


def activation_edges(index: Index, transfers: Numbers) -> list[tuple[int, int]]:
    """(producer, consumer) of what STORE:A, LOAD:A and FREE:A add.

    A FREE:A on lane d2h ends what has been stored, one elsewhere what has been loaded. Where weights are bound, one
    more may stand on another lane and only say that there is room: what stands behind it waits until activations are
    gone. That is on lane compute before the backward, and on lane h2d before the LOAD:A, when they have been stored; on
    lane h2d, of activations that never move, when their backward has used them.

    Args:
        transfers: the numbers of all transfers by what they are, device and stage.

    Raises:
        ScheduleError: for one that stands twice, or alone.
    """
    moved, ends, edges = _matched(index, transfers)
    for (kind, stage, place), number in moved.items():
        other = moved.get((Kind.LOAD if kind is Kind.STORE else Kind.STORE, stage, place))
        spill = _spill(index, number) if kind is Kind.LOAD and other is None else -1
        if other is None and spill < 0:
            way = "stored, but never loaded again" if kind is Kind.STORE else "loaded, but never stored"
            raise broken(index.schedule, f"{index.actions[number]}: these activations are {way}", [number])
        end = ends.pop((kind, stage, place, index.device(number)), None)
        if end is None:
            rule = f"{index.actions[number]} is never freed: what is on its rank has one FREE:A"
            raise broken(index.schedule, rule, [number])
        if kind is Kind.STORE:
            assert other is not None  # or it has been refused
            edges += [(_maker(index, number), number), (number, end), (number, other)]
        else:
            reader, last = _readers(index, number)
            edges += [(spill, number), (_maker(index, number), number)] if other is None else []
            _check_after_use(index, end, last)
            edges += [(number, reader), (last, end)]
    for end in ends.values():
        raise broken(index.schedule, f"{index.actions[end]} frees what is not there", [end])
    return edges


def _matched(index: Index, transfers: Numbers) -> tuple[Moved, Ends, list[tuple[int, int]]]:
    """What moves, what ends it, and the edges of those FREE:A that end nothing."""
    moved: Moved = {}
    ends: Ends = {}
    rooms: dict[tuple[str, int, int, int], int] = {}  # lane, stage, place, device
    edges: list[tuple[int, int]] = []
    own = [
        (what[0], device, stage, number)
        for (what, device, stage), found in transfers.items()
        if what[1] == "A"
        for number in found
    ]
    for kind, _, stage, number in own:
        if kind is not Kind.FREE:
            _once(index, moved, (kind, stage, _place(index, number)), number)
    for kind, device, stage, number in own:
        if kind is Kind.FREE:
            lane, place = index.lanes[index.lane_of[number]].name, _place(index, number)
            awaited = _awaited_for_room(index, number, moved)
            if awaited is None:
                _once(index, ends, (Kind.STORE if lane == "d2h" else Kind.LOAD, stage, place, device), number)
            else:
                _once(index, rooms, (lane, stage, place, device), number)
                edges.append((awaited, number))
    return moved, ends, edges


def _place(index: Index, number: int) -> int:
    """The place of an action's microbatch."""
    action = index.actions[number]
    return index.place(0, action.microbatch or 0, action.part)


def _once(index: Index, found: dict[Key, int], key: Key, number: int) -> None:
    """Note where something stands; refuse it if it stands somewhere already."""
    before = found.setdefault(key, number)
    if before != number:
        raise broken(index.schedule, f"{index.actions[number]} stands twice; it moves once", [before, number])


def _awaited_for_room(index: Index, free: int, moved: Moved) -> int | None:
    """What a FREE:A waits for that ends nothing, and only says that there is room; None for one that ends a move."""
    stage, lane = index.actions[free].stage, index.lanes[index.lane_of[free]]
    if lane.name == "d2h" or index.schedule.weights is not Weights.BOUND:
        return None
    store, load = (moved.get((kind, stage, _place(index, free))) for kind in (Kind.STORE, Kind.LOAD))
    users = _users(index, free)
    if not users or index.device(users[0]) != lane.device:
        return None
    if lane.name == "h2d" and store is None and load is None:
        return users[-1]
    following = load if lane.name == "h2d" else users[0]
    return store if following is not None and free < following < lane.stop else None


def _users(index: Index, number: int) -> list[int]:
    """What reads the activations that an action names, in order."""
    action = index.actions[number]
    place = action.stage, action.microbatch or 0, action.part
    found = [index.at(kind, *place) for kind in (Kind.R, Kind.B, Kind.I, Kind.W)]
    return [reader for reader in found if reader >= 0]


def _spill(index: Index, load: int) -> int:
    """The SEND that took to the host what a forward of this device then read, and its backward loads again; or -1."""
    action = index.actions[load]
    stage = keeping_stage(index.schedule, action.stage)
    if not stage or not index.holds(Kind.SEND_F):
        return -1
    number = index.at(Kind.SEND_F, stage - 1, action.microbatch or 0, action.part)
    return number if number >= 0 and index.actions[number].peer == index.device(number) == index.device(load) else -1


def _maker(index: Index, store: int) -> int:
    """The forward that makes what a backward stage keeps of a microbatch."""
    action = index.actions[store]
    stage = keeping_stage(index.schedule, action.stage)
    maker = index.at(Kind.F, stage, action.microbatch or 0, action.part)
    if maker < 0 or index.device(maker) != index.device(store):
        rule = f"{action} stores what no forward on rank {index.device(store)} makes"
        raise broken(index.schedule, rule, [store])
    return maker


def _readers(index: Index, load: int) -> tuple[int, int]:
    """The first and the last action that read loaded activations."""
    action, readers = index.actions[load], _users(index, load)
    if not readers or index.device(readers[0]) != index.device(load):
        rule = f"{action} is of no use: no backward of stage {action.stage} on rank {index.device(load)} reads it"
        raise broken(index.schedule, rule, [load], way_out="take it out")
    return readers[0], readers[-1]


def _check_after_use(index: Index, end: int, reader: int) -> None:
    lane = index.lanes[index.lane_of[end]]
    if lane.name == "compute" and end < reader < lane.stop:
        rule = f"{index.actions[reader]} uses what {index.actions[end]} has freed"
        raise broken(index.schedule, rule, [end, reader], way_out="free it after its last use")


def keeping_stage(schedule: Schedule, backward_stage: int) -> int:
    """The forward stage that comes past the first layer of a backward stage, and keeps its input.

    Raises:
        ScheduleError: if forward and backward are cut apart and the layers are not known.
    """
    if not schedule.shape.separate_cuts:
        return backward_stage
    if schedule.partition is None:
        raise ScheduleError("which forward keeps what a backward stage needs depends on the layers: give a partition")
    return _keeping_stages(schedule.partition)[backward_stage]


@lru_cache(maxsize=16)  # asked for every microbatch of a cut
def _keeping_stages(partition: Partition) -> list[int]:
    """By backward stage."""
    ranges = partition.forward_ranges()
    starts = [layers.start for layers in partition.backward_ranges()]
    return [next((at for at, layers in enumerate(ranges) if start in layers), len(ranges) - 1) for start in starts]
