"""Saved inputs: STORE:A, LOAD:A and FREE:A of the inputs that a backward stage recomputes from, and their edges."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import NamedTuple, TypeVar

from rpbench.ir.action import Kind
from rpbench.ir.checks.excerpt import broken
from rpbench.ir.index import Index, Lane
from rpbench.ir.schedule import Schedule, ScheduleError, Weights

What = tuple[Kind, str | None]  # kind and object
Numbers = Mapping[tuple[What, int, int], Sequence[int]]  # (what, device, stage) -> actions
Moved = dict[tuple[Kind, int], dict[int, int]]  # STORE or LOAD, stage -> place of the microbatch -> action
Ends = dict[tuple[Kind, int, int], dict[int, int]]  # kind that a FREE ends, stage, device -> place -> the FREE
Key = TypeVar("Key")


class _Group(NamedTuple):
    """The transfers of one kind of a stage on a device, and the places of their microbatches."""

    kind: Kind
    device: int
    stage: int
    numbers: Sequence[int]
    places: Sequence[int]


def activation_edges(index: Index, transfers: Numbers) -> list[tuple[int, int]]:
    """(producer, consumer) that STORE:A, LOAD:A and FREE:A add.

    A FREE:A on lane d2h ends a STORE:A, a FREE:A elsewhere a LOAD:A. If weights are bound, one more FREE:A may stand on
    another lane and only make room: the actions after it wait until the activations are gone. After a store it stands
    on lane compute before the backward, or on lane h2d before the LOAD:A. For activations that never move it stands on
    lane h2d, and waits for their backward. ScheduleError for a move that stands twice, or that lacks its counterpart.
    """
    parts, actions = index.shape.num_parts, index.actions
    groups = [
        _Group(what[0], device, stage, numbers, [(actions[n][2] or 0) * parts + actions[n][3] for n in numbers])
        for (what, device, stage), numbers in transfers.items()
        if what[1] == "A"
    ]
    moved = _moved(index, groups)
    ends, edges = _ended(index, groups, moved)
    for group in groups:
        if group.kind is not Kind.FREE:
            edges += _edges_of(index, group, moved, ends.get((group.kind, group.stage, group.device), {}))
    unused = {end for own in ends.values() for end in own.values()}
    for end in (number for group in groups for number in group.numbers if number in unused):
        raise broken(index.schedule, f"{index.actions[end]} frees what is not there", [end])
    return edges


def _moved(index: Index, groups: Sequence[_Group]) -> Moved:
    """The stores and loads by kind, stage and place."""
    moved: Moved = defaultdict(dict)
    for group in groups:
        if group.kind is not Kind.FREE:
            own = moved[group.kind, group.stage]
            for number, place in zip(group.numbers, group.places, strict=True):
                _once(index, own, place, number)
    return moved


def _ended(index: Index, groups: Sequence[_Group], moved: Moved) -> tuple[Ends, list[tuple[int, int]]]:
    """The FREE:A that ends each move, and the edges of those FREE:A that only make room."""
    ends: Ends = defaultdict(dict)
    rooms: dict[str, dict[tuple[int, int, int], int]] = defaultdict(dict)  # lane -> stage, place, device
    edges: list[tuple[int, int]] = []
    lanes, lane_of = index.lanes, index.lane_of
    for group in groups:
        if group.kind is not Kind.FREE:
            continue
        users = _Users(index, group)
        of_kind = {kind: ends[kind, group.stage, group.device] for kind in (Kind.STORE, Kind.LOAD)}
        stores, loads = (moved.get((kind, group.stage), {}) for kind in of_kind)
        for number, place in zip(group.numbers, group.places, strict=True):
            lane = lanes[lane_of[number]]
            awaited = None
            if lane.name != "d2h":
                awaited = _awaited_for_room(users, lane, number, place, stores.get(place), loads.get(place))
            if awaited is None:
                _once(index, of_kind[Kind.STORE if lane.name == "d2h" else Kind.LOAD], place, number)
            else:
                _once(index, rooms[lane.name], (group.stage, place, group.device), number)
                edges.append((awaited, number))
    return ends, edges


def _edges_of(index: Index, group: _Group, moved: Moved, ends: dict[int, int]) -> list[tuple[int, int]]:
    """The edges of the stores or loads of a stage on a device; removes their FREEs from `ends`."""
    edges: list[tuple[int, int]] = []
    stored = group.kind is Kind.STORE
    others, users = moved.get((Kind.LOAD if stored else Kind.STORE, group.stage), {}), _Users(index, group)
    for number, place in zip(group.numbers, group.places, strict=True):
        other = others.get(place)
        spill = _spill(index, number) if not stored and other is None else -1
        if other is None and spill < 0:
            way = "stored, but never loaded again" if stored else "loaded, but never stored"
            raise broken(index.schedule, f"{index.actions[number]}: these activations are {way}", [number])
        end = ends.pop(place, None)
        if end is None:
            rule = f"{index.actions[number]} is never freed: what is on its rank has one FREE:A"
            raise broken(index.schedule, rule, [number])
        if stored:
            assert other is not None  # or it has been refused
            edges += ((users.maker(number, place), number), (number, end), (number, other))
        else:
            reader, last = _readers(index, users, number, place)
            edges += [(spill, number), (users.maker(number, place), number)] if other is None else ()
            lane = index.lanes[index.lane_of[end]]
            if lane.name == "compute" and end < last < lane.stop:
                rule = f"{index.actions[last]} uses what {index.actions[end]} has freed"
                raise broken(index.schedule, rule, [end, last], way_out="free it after its last use")
            edges += ((number, reader), (last, end))
    return edges


def _once(index: Index, found: dict[Key, int], key: Key, number: int) -> None:
    """Note an action under a key; refuse a second one."""
    before = found.setdefault(key, number)
    if before != number:
        raise broken(index.schedule, f"{index.actions[number]} stands twice; it moves once", [before, number])


class _Users:
    """The makers and readers of a stage's activations on a device, by place of the microbatch."""

    def __init__(self, index: Index, group: _Group) -> None:
        self._index, self._device = index, group.device
        self.streamed = index.schedule.weights is not Weights.BOUND
        self._stage, self._first = group.stage, index.place(group.stage, 0)
        self._readers = [index.numbers(kind) for kind in (Kind.R, Kind.B, Kind.I, Kind.W) if index.holds(kind)]

    def of(self, place: int) -> list[int]:
        """The actions that read them, in order."""
        at = self._first + place
        return [readers[at] for readers in self._readers if readers[at] >= 0]

    def is_here(self, number: int) -> bool:
        """Whether an action stands on the device."""
        return self._index.device(number) == self._device

    def maker(self, number: int, place: int) -> int:
        """The forward that makes the activations a backward stage needs for a microbatch."""
        maker = self._makers[place]
        if maker < 0 or not self.is_here(maker):
            rule = f"{self._index.actions[number]} stores what no forward on rank {self._device} makes"
            raise broken(self._index.schedule, rule, [number])
        return maker

    @cached_property
    def _makers(self) -> list[int]:
        first = keeping_stage(self._index.schedule, self._stage)
        start, stop = self._index.place(first, 0), self._index.place(first + 1, 0)
        return self._index.numbers(Kind.F)[start:stop]


def _awaited_for_room(
    users: _Users, lane: Lane, free: int, place: int, store: int | None, load: int | None
) -> int | None:
    """The action that a FREE:A waits for if it only makes room; None if it ends a move."""
    if users.streamed:
        return None
    if lane.name == "h2d" and load is not None and not free < load < lane.stop:
        return None  # nearly all end here
    found = users.of(place)
    if not found or not users.is_here(found[0]):
        return None
    if lane.name == "h2d" and store is None and load is None:
        return found[-1]
    following = load if lane.name == "h2d" else found[0]
    return store if following is not None and free < following < lane.stop else None


def _spill(index: Index, load: int) -> int:
    """The SEND to the host of a tensor that a forward here has read and its backward loads again; -1 without one."""
    action = index.actions[load]
    stage = keeping_stage(index.schedule, action.stage)
    if not stage or not index.holds(Kind.SEND_F):
        return -1
    number = index.at(Kind.SEND_F, stage - 1, action.microbatch or 0, action.part)
    return number if number >= 0 and index.actions[number].peer == index.device(number) == index.device(load) else -1


def _readers(index: Index, users: _Users, load: int, place: int) -> tuple[int, int]:
    """The first and the last action that read loaded activations."""
    readers = users.of(place)
    if not readers or not users.is_here(readers[0]):
        action, rank = index.actions[load], index.device(load)
        rule = f"{action} is of no use: no backward of stage {action.stage} on rank {rank} reads it"
        raise broken(index.schedule, rule, [load], way_out="take it out")
    return readers[0], readers[-1]


def keeping_stage(schedule: Schedule, backward_stage: int) -> int:
    """The forward stage that runs the first layer of a backward stage, and so keeps its input; ScheduleError if forward
    and backward are cut apart and the layers are not known.
    """
    if not schedule.shape.separate_cuts:
        return backward_stage
    if schedule.partition is None:
        raise ScheduleError("which forward keeps what a backward stage needs depends on the layers: give a partition")
    return schedule.partition.keeping_stages[backward_stage]
