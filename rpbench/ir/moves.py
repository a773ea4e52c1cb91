"""Moves: what LOAD, STORE, FREE, UNSHARD, RESHARD and REDUCE_GRAD wait for, what waits for them, what they carry.

Nothing is stored in a schedule; as for computation, edges follow from what stands in the lanes:

    LOAD:P UNSHARD       after the STEP that publishes the version read; before the first action of its visit
    FREE:P RESHARD       after the last action of its visit
    REDUCE_GRAD          after the last weight gradient of its visit on every device that reduces with it
    STORE:G              after the last weight gradient of its visit, or after its REDUCE_GRAD; FREE:G after STORE:G
    STEP                 after every STORE:G and REDUCE_GRAD of its window, and after LOAD:O; STORE:O after STEP
    STORE:A              after the forward that makes what backward stage s keeps for microbatch m
    LOAD:A               after STORE:A; before the recomputation or backward that reads it
    FREE:A               after STORE:A where that stands, after the backward where LOAD:A stands

A buffer is free for the next LOAD when its FREE has run: both stand in one lane, in that order, so the number of
LOADs a lane runs ahead of its FREEs is the number of buffers. No other rule is needed for double buffering.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import NamedTuple

from rpbench.ir.action import COMPUTE, MOVES, RECV, SEND, Action, Kind, parts_of
from rpbench.ir.dependencies import version_read
from rpbench.ir.excerpt import broken
from rpbench.ir.index import Index
from rpbench.ir.schedule import Schedule, ScheduleError, Weights
from rpbench.ir.visits import Visit, served, visits_of

TRANSFERS = MOVES | {Kind.UNSHARD, Kind.RESHARD, Kind.REDUCE_GRAD}
LANES = {
    Kind.LOAD: ("h2d",),
    Kind.STORE: ("d2h",),
    Kind.UNSHARD: ("net",),
    Kind.REDUCE_GRAD: ("net",),
    Kind.FREE: ("compute", "h2d", "d2h"),
    Kind.RESHARD: ("compute", "net"),
}

LINKS = ("h2d", "d2h", "net")  # lanes on which things travel

What = tuple[Kind, str | None]  # kind and object
_ARRIVALS: tuple[tuple[What, What], ...] = (
    ((Kind.LOAD, "P"), (Kind.FREE, "P")),
    ((Kind.UNSHARD, None), (Kind.RESHARD, None)),
)
_LEAVERS: tuple[What, ...] = ((Kind.REDUCE_GRAD, None), (Kind.STORE, "G"))


class Cargo(NamedTuple):
    """What an action carries over a link.

    Args:
        object: P, G, O or A, or "boundary" for what a stage hands to its neighbour.
        stage, backward: whose; `backward` says that backward stages are counted.
        share: the part of it that goes over the link of this device.
        lane: h2d, d2h or net: the link.
    """

    object: str
    stage: int
    backward: bool
    share: Fraction
    lane: str


class Transfer(NamedTuple):
    """One transfer of weights or gradients: its pieces, and the visits it serves."""

    pieces: tuple[int, ...]
    visits: tuple[Visit, ...]


def has_transfers(schedule: Schedule) -> bool:
    """Whether a schedule moves anything between host, devices and shards."""
    return any(action.kind in TRANSFERS for _, _, row in schedule.items() for action in row)


class Moves:
    """The transfers of a schedule, matched with what they serve.

    Attributes:
        edges: (producer, consumer) by number, for the whole schedule.
        transfers: (kind, object) -> transfers of weights and gradients, devices and stages ascending.

    Raises:
        ScheduleError: for a transfer on a wrong lane, of nothing, too often, or never ended.
    """

    def __init__(self, index: Index) -> None:
        self.index = index
        self.edges: list[tuple[int, int]] = []
        self.transfers: dict[What, list[Transfer]] = defaultdict(list)
        self._replicas: dict[int, int] = {}  # stage -> devices that share it
        self._visits: dict[tuple[int, int], list[Visit]] = defaultdict(list)  # (device, stage)
        self._numbers: dict[tuple[What, int, int], list[int]] = defaultdict(list)  # (what, device, stage)
        for device in visits_of(index):
            for visit in device:
                self._visits[visit.device, visit.stage].append(visit)
        for number, action in enumerate(index.actions):
            if action.kind in TRANSFERS:
                self._check_lane(number)
                self._numbers[(action.kind, action.object), index.device(number), action.stage].append(number)
        for arrive, leave in _ARRIVALS:
            self._match_weights(arrive, leave)
        for what in _LEAVERS:
            self._match_gradients(what)
        self._join()
        self._match_states()
        self._match_activations()

    def cargo(self) -> dict[int, Cargo]:
        """What every action that uses a link carries, by number.

        Of n replicas, a gather brings (n - 1) / n of a stage to each and a reduce-scatter as much of its gradient; an
        all-reduce, which is one where nobody gathers, is both. What is gathered afterwards is loaded as a shard.
        """
        found: dict[int, Cargo] = {}
        for what, transfers in self.transfers.items():
            for transfer in transfers:
                first = transfer.visits[0]
                share = self._share(what, first.stage) / len(transfer.pieces)
                name = "P" if what in ((Kind.LOAD, "P"), (Kind.UNSHARD, None)) else "G"
                for number in transfer.pieces:
                    found[number] = Cargo(name, first.stage, first.backward, share, LANES[what[0]][0])
        part = Fraction(1, self.index.shape.num_parts)
        for number, action in enumerate(self.index.actions):
            lane = self.index.lanes[self.index.lane_of[number]].name
            if action.kind in (Kind.LOAD, Kind.STORE) and action.object in ("O", "A"):
                found[number] = Cargo(
                    action.object, action.stage, True, part if action.object == "A" else Fraction(1), lane
                )
            elif lane in LINKS and (action.kind in SEND or action.kind in RECV):
                found[number] = Cargo("boundary", action.stage, False, part, lane)
        return found

    def _share(self, what: What, stage: int) -> Fraction:
        replicas = self._replicas.get(stage, 1)
        gathered = any(transfer.visits[0].stage == stage for transfer in self.transfers[Kind.UNSHARD, None])
        if what == (Kind.UNSHARD, None):
            return Fraction(replicas - 1, replicas)
        if what == (Kind.REDUCE_GRAD, None):
            return Fraction(replicas - 1, replicas) * (1 if gathered or self._stored(stage) else 2)
        return Fraction(1, replicas) if gathered or what == (Kind.STORE, "G") else Fraction(1)

    def _stored(self, stage: int) -> bool:
        return any(transfer.visits[0].stage == stage for transfer in self.transfers[Kind.STORE, "G"])

    # --- weights and gradients ---

    def _match_weights(self, arrive: What, leave: What) -> None:
        self._check_used(arrive)
        self._check_used(leave)
        stages = {stage for what, _, stage in self._numbers if what in (arrive, leave)}
        if stages and arrive == (Kind.LOAD, "P") and self.index.schedule.weights is Weights.STREAMED:
            stages = {stage for _, stage in self._visits}
        for (device, stage), visits in sorted(self._visits.items()):
            if stage in stages:
                loads = self._pieces(self._numbers[arrive, device, stage])
                groups = self._served(visits, loads, arrive)
                self._match_ends(loads, self._numbers[leave, device, stage], groups, arrive, leave)
                for pieces, group in zip(loads, groups, strict=True):
                    self.transfers[arrive].append(Transfer(pieces, tuple(group)))
                    self.edges.append((pieces[-1], group[0].first))
                    self.edges += [(step, pieces[0]) for step in self._steps_before(group[0], pieces[0])]
        if arrive[0] is Kind.UNSHARD:
            self._count_replicas(arrive)

    def _match_ends(
        self,
        loads: Sequence[tuple[int, ...]],
        ends: Sequence[int],
        groups: Sequence[Sequence[Visit]],
        arrive: What,
        leave: What,
    ) -> None:
        if len(ends) != len(loads):
            if len(ends) < len(loads):
                number, rule = loads[len(ends)][0], f"is never freed: every {_name(arrive)} has one {_name(leave)}"
            else:
                number, rule = ends[len(loads)], "frees what is not there: there is one for each that comes"
            raise broken(self.index.schedule, f"{self.index.actions[number]} {rule}", [number])
        for end, group, pieces in zip(ends, groups, loads, strict=True):
            last = group[-1].last
            lane = self.index.lanes[self.index.lane_of[end]]
            if end < last < lane.stop and lane.name == "compute":
                rule = f"{self.index.actions[last]} uses what {self.index.actions[end]} has freed"
                raise broken(self.index.schedule, rule, [end, last], way_out="free it after its last use")
            if lane.start <= end < pieces[-1] < lane.stop:
                rule = f"{self.index.actions[end]} stands before {self.index.actions[pieces[-1]]}, which it is to end"
                raise broken(self.index.schedule, rule, [end, pieces[-1]])
            self.edges.append((last, end))

    def _match_gradients(self, what: What) -> None:
        self._check_used(what)
        stages = {stage for found, _, stage in self._numbers if found == what}
        together: dict[tuple[int, int], list[Transfer]] = defaultdict(list)  # (stage, place) -> one of each device
        for (device, stage), visits in sorted(self._visits.items()):
            made = [visit for visit in visits if visit.last_gradient >= 0]
            if stage in stages and made:
                numbers = self._numbers[what, device, stage]
                groups = self._served(made, [(number,) for number in numbers], what)
                for place, (number, group) in enumerate(zip(numbers, groups, strict=True)):
                    transfer = Transfer((number,), tuple(group))
                    self.transfers[what].append(transfer)
                    together[stage, place].append(transfer)
                    self._match_steps(number, stage, group)
                self._match_freed_gradients(device, stage, numbers)
        for transfers in together.values():
            # A sum over replicas is complete when the last of them has its part.
            sources = transfers if what[0] is Kind.REDUCE_GRAD else ()
            for transfer in transfers:
                for source in sources or (transfer,):
                    last = source.visits[-1].last_gradient
                    self._check_after(last, transfer.pieces[0])
                    self.edges.append((last, transfer.pieces[0]))
        if what[0] is Kind.REDUCE_GRAD:
            self._count_replicas(what)

    def _match_steps(self, number: int, stage: int, group: Sequence[Visit]) -> None:
        versions = sorted({visit.step + 1 for visit in group})
        self.edges += [
            (number, self.index.steps[stage, version]) for version in versions if (stage, version) in self.index.steps
        ]

    def _match_freed_gradients(self, device: int, stage: int, stores: Sequence[int]) -> None:
        freed = self._numbers.get(((Kind.FREE, "G"), device, stage), [])
        if freed and len(freed) != len(stores):
            rule = f"{len(freed)} FREE:G of stage {stage} on rank {device} for {len(stores)} gradients that leave it"
            raise broken(self.index.schedule, rule, freed[:1])
        self.edges += zip(stores, freed, strict=False)

    def _join(self) -> None:
        """A shard that is loaded is gathered afterwards; a gradient that is reduced is stored afterwards."""
        for before, after in (
            ((Kind.LOAD, "P"), (Kind.UNSHARD, None)),
            ((Kind.REDUCE_GRAD, None), (Kind.STORE, "G")),
        ):
            earlier: dict[int, list[Transfer]] = defaultdict(list)  # first action of a visit -> transfers
            for transfer in self.transfers[before]:
                for visit in transfer.visits:
                    earlier[visit.first].append(transfer)
            for transfer in self.transfers[after]:
                last = {found.pieces[-1] for visit in transfer.visits for found in earlier[visit.first]}
                self.edges += [(number, transfer.pieces[0]) for number in sorted(last)]

    def _steps_before(self, visit: Visit, load: int) -> Iterable[int]:
        """The STEPs that publish the weights a visit reads; the version written on its transfer must be that one."""
        index = self.index
        reader = index.actions[visit.first]
        part = next(part for part in parts_of(reader) if part.stage == visit.stage and part.kind in COMPUTE)
        assert part.microbatch is not None
        version = version_read(index.schedule.policy, index.shape, part.microbatch)
        written = index.actions[load].version
        if written is not None and version is not None and index.steps and written != version:
            rule = f"{index.actions[load]} brings version {written} to {part}, which reads version {version}"
            raise broken(index.schedule, rule, [load, visit.first])
        if not version:
            return []
        updated = index.updated_by(part.kind, visit.stage)
        return [index.steps[stage, version] for stage in updated if (stage, version) in index.steps]

    def _served(self, visits: Sequence[Visit], loads: Sequence[Sequence[int]], what: What) -> list[list[Visit]]:
        found = served(visits, len(loads))
        if found is None:
            device, stage = visits[0].device, visits[0].stage
            steps = len({visit.step for visit in visits})
            numbers = [loads[0][0]] if loads else [visits[0].first]
            raise broken(
                self.index.schedule,
                f"stage {stage} has {len(visits)} visits in {steps} steps on rank {device} and {len(loads)} "
                f"{_name(what)}: one for each visit, one for each step, or one for all",
                numbers,
            )
        return found

    def _pieces(self, numbers: Sequence[int]) -> list[tuple[int, ...]]:
        """Transfers as their pieces: piece 0 begins one, and the others follow in order."""
        found: list[list[int]] = []
        for number in numbers:
            part = self.index.actions[number].part
            if part == 0:
                found.append([])
            if not found or part != len(found[-1]):
                rule = f"{self.index.actions[number]} is a piece out of order: pieces are 0, 1, 2, ... of one transfer"
                raise broken(self.index.schedule, rule, [number])
            found[-1].append(number)
        return [tuple(pieces) for pieces in found]

    def _check_used(self, what: What) -> None:
        """Every transfer of this kind is of a stage that its device runs."""
        for (found, device, stage), numbers in self._numbers.items():
            if found == what and numbers:
                visits = self._visits.get((device, stage), [])
                gradient = what in _LEAVERS
                if not any(visit.last_gradient >= 0 or not gradient for visit in visits):
                    use = "makes no gradient of" if gradient else "never runs"
                    rule = f"{self.index.actions[numbers[0]]} is of no use: rank {device} {use} stage {stage}"
                    raise broken(self.index.schedule, rule, [numbers[0]], way_out="take it out")

    def _check_after(self, producer: int, number: int) -> None:
        lane = self.index.lanes[self.index.lane_of[number]]
        if number < producer < lane.stop:
            rule = f"{self.index.actions[number]} stands before {self.index.actions[producer]}, which it waits for"
            raise broken(self.index.schedule, rule, [number, producer])

    def _check_lane(self, number: int) -> None:
        action, lane = self.index.actions[number], self.index.lanes[self.index.lane_of[number]]
        if lane.name not in LANES[action.kind]:
            rule = f"{action} stands on lane {lane.name}, it belongs on lane {' or '.join(LANES[action.kind])}"
            raise broken(self.index.schedule, rule, [number])

    def _count_replicas(self, what: What) -> None:
        devices: dict[int, set[int]] = defaultdict(set)
        for transfer in self.transfers[what]:
            devices[transfer.visits[0].stage].add(transfer.visits[0].device)
        self._replicas |= {stage: len(found) for stage, found in devices.items()}

    # --- optimizer state and activations ---

    def _match_states(self) -> None:
        """LOAD:O@v before STEP@v, STORE:O@v and FREE:O@v after it."""
        for (what, _, stage), numbers in self._numbers.items():
            for number in numbers if what[1] == "O" else ():
                version = self.index.actions[number].version
                step = self.index.steps.get((stage, version or 0))
                if step is None:
                    rule = f"{self.index.actions[number]} is of no use: there is no {stage}STEP@{version}"
                    raise broken(self.index.schedule, rule, [number], way_out="write the version that the step makes")
                self.edges.append((number, step) if what[0] is Kind.LOAD else (step, number))

    def _match_activations(self) -> None:
        """A FREE:A on lane d2h ends what has been stored, one elsewhere what has been loaded."""
        index = self.index
        moved: dict[tuple[What, int, int], int] = {}  # what, stage, place of the microbatch
        ends: dict[tuple[Kind, int, int, int], int] = {}  # kind that is ended, stage, place, device
        for (what, device, stage), numbers in self._numbers.items():
            for number in numbers if what[1] == "A" else ():
                action = index.actions[number]
                place = index.place(0, action.microbatch or 0, action.part)
                if what[0] is Kind.FREE:
                    ended = Kind.STORE if index.lanes[index.lane_of[number]].name == "d2h" else Kind.LOAD
                    before = ends.setdefault((ended, stage, place, device), number)
                else:
                    before = moved.setdefault((what, stage, place), number)
                if before != number:
                    raise broken(index.schedule, f"{action} stands twice; it moves once", [before, number])
        for ((kind, _), stage, place), number in moved.items():
            other = moved.get(((Kind.LOAD if kind is Kind.STORE else Kind.STORE, "A"), stage, place))
            if other is None:
                way = "stored, but never loaded again" if kind is Kind.STORE else "loaded, but never stored"
                raise broken(index.schedule, f"{index.actions[number]}: these activations are {way}", [number])
            end = ends.pop((kind, stage, place, index.device(number)), None)
            if end is None:
                rule = f"{index.actions[number]} is never freed: what is on its rank has one FREE:A"
                raise broken(index.schedule, rule, [number])
            if kind is Kind.STORE:
                self.edges += [(self._maker(number), number), (number, end), (number, other)]
            else:
                reader, last = self._readers(number)
                self._check_after_use(end, last)
                self.edges += [(number, reader), (last, end)]
        for end in ends.values():
            raise broken(index.schedule, f"{index.actions[end]} frees what is not there", [end])

    def _maker(self, store: int) -> int:
        """The forward that makes what a backward stage keeps of a microbatch."""
        action = self.index.actions[store]
        stage = keeping_stage(self.index.schedule, action.stage)
        maker = self.index.find(Action(Kind.F, stage, action.microbatch, action.part))
        if maker < 0 or self.index.device(maker) != self.index.device(store):
            rule = f"{action} stores what no forward on rank {self.index.device(store)} makes"
            raise broken(self.index.schedule, rule, [store])
        return maker

    def _readers(self, load: int) -> tuple[int, int]:
        """The first and the last action that read loaded activations."""
        index, action = self.index, self.index.actions[load]
        found = [index.find(action._replace(kind=kind, object=None)) for kind in (Kind.R, Kind.B, Kind.I, Kind.W)]
        readers = [reader for reader in found if reader >= 0]
        if not readers or index.device(readers[0]) != index.device(load):
            rule = f"{action} is of no use: no backward of stage {action.stage} on rank {index.device(load)} reads it"
            raise broken(index.schedule, rule, [load], way_out="take it out")
        return readers[0], readers[-1]

    def _check_after_use(self, end: int, reader: int) -> None:
        lane = self.index.lanes[self.index.lane_of[end]]
        if lane.name == "compute" and end < reader < lane.stop:
            rule = f"{self.index.actions[reader]} uses what {self.index.actions[end]} has freed"
            raise broken(self.index.schedule, rule, [end, reader], way_out="free it after its last use")


def keeping_stage(schedule: Schedule, backward_stage: int) -> int:
    """The forward stage that comes past the first layer of a backward stage, and keeps its input.

    Raises:
        ScheduleError: if forward and backward are cut apart and the layers are not known.
    """
    if not schedule.shape.separate_cuts:
        return backward_stage
    if schedule.partition is None:
        raise ScheduleError("which forward keeps what a backward stage needs depends on the layers: give a partition")
    start = schedule.partition.backward_ranges()[backward_stage].start
    ranges = schedule.partition.forward_ranges()
    return next((stage for stage, layers in enumerate(ranges) if start in layers), len(ranges) - 1)


def all_producers(index: Index) -> list[tuple[int, ...]]:
    """`Index.producers`, and what transfers add to it."""
    edges = transfer_edges(index)
    if not edges:
        return index.producers
    found = [list(producers) for producers in index.producers]
    for producer, consumer in edges:
        lane = index.lanes[index.lane_of[consumer]]
        if producer not in range(lane.start, consumer):
            found[consumer].append(producer)
    return [tuple(producers) for producers in found]


def transfer_edges(index: Index) -> list[tuple[int, int]]:
    """(producer, consumer) of every dependency that transfers add; none for a schedule without."""
    return Moves(index).edges if any(action.kind in TRANSFERS for action in index.actions) else []


def _name(what: What) -> str:
    return what[0].name + (f":{what[1]}" if what[1] else "")
