"""Moves: what LOAD, STORE, FREE, UNSHARD, RESHARD and REDUCE_GRAD wait for, and what waits for them.

A schedule stores no edges; they follow from the actions in its lanes:

    LOAD:P UNSHARD       after the STEP that publishes the version read; before the first action of its visit
    UNSHARD              after the LOAD:P of every device whose shard it gathers
    FREE:P RESHARD       after the last action of its visit; FREE:P also after every UNSHARD that gathers its shard
    REDUCE_GRAD          after the last weight gradient of its visit on every device that reduces with it
    STORE:G              after the last weight gradient of its visit, or after its REDUCE_GRAD; FREE:G after STORE:G
    STEP                 after every STORE:G and REDUCE_GRAD of its window, and after LOAD:O; STORE:O after STEP
    VALIDATE             after every STORE:G and REDUCE_GRAD of its step
    ROLLBACK             after the LOAD:P that brings the version of its step; UNSHARD and later LOAD:P after ROLLBACK
    STORE:A              after the forward that makes the activations a backward stage needs for a microbatch
    LOAD:A               after STORE:A; before the recomputation or backward that reads it
    FREE:A               after STORE:A on that lane, after the backward on the lane of LOAD:A; one that only makes room:
                         `rpbench.ir.waits.saved_inputs`
    LOAD:P>q STORE:G>q   go from device to device: `rpbench.ir.waits.handovers`
    STEP_REST            and its transfers: `rpbench.ir.waits.late_rest`

A buffer is free for the next LOAD when its FREE has run. Both stand in one lane, in that order, so the number of LOADs
that a lane runs ahead of its FREEs is the number of buffers. Double buffering needs no other rule.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, partial
from itertools import chain, product
from operator import itemgetter

from rpbench.ir.action import MOVES, SUMS, Kind
from rpbench.ir.checks.excerpt import broken
from rpbench.ir.index import Index
from rpbench.ir.policy import KNOWN, STEPS_BEHIND, versions_stored
from rpbench.ir.schedule import Schedule, Weights
from rpbench.ir.waits.edges import version_read, versions_by_step
from rpbench.ir.waits.handovers import Handovers
from rpbench.ir.waits.late_rest import rest_edges
from rpbench.ir.waits.saved_inputs import What, activation_edges
from rpbench.ir.waits.visits import Transfer as Transfer
from rpbench.ir.waits.visits import Visit, first_of

TRANSFERS = MOVES | {Kind.UNSHARD, Kind.RESHARD, Kind.REDUCE_GRAD}
CARRIERS = TRANSFERS | SUMS  # kinds that go over a link whenever they stand in a schedule
LANES = {
    Kind.LOAD: ("h2d",),
    Kind.STORE: ("d2h",),
    Kind.UNSHARD: ("net",),
    Kind.REDUCE_GRAD: ("net",),
    Kind.FREE: ("compute", "h2d", "d2h"),
    Kind.RESHARD: ("compute", "net"),
}

_ARRIVALS: tuple[tuple[What, What], ...] = (
    ((Kind.LOAD, "P"), (Kind.FREE, "P")),
    ((Kind.UNSHARD, None), (Kind.RESHARD, None)),
)
_LEAVERS: tuple[What, ...] = ((Kind.REDUCE_GRAD, None), (Kind.STORE, "G"))

_kind_object_stage = itemgetter(0, 5, 1)
_transfer_of = partial(tuple.__new__, Transfer)  # of all fields in their order: there are thousands


def has_transfers(schedule: Schedule) -> bool:
    """Whether a schedule has actions that go over a link, SEND and RECV apart."""
    return not CARRIERS.isdisjoint(schedule.kinds)


def moves_activations_alone(schedule: Schedule) -> bool:
    """Whether a schedule moves only activations, apart from boundary tensors."""
    return schedule.kinds & CARRIERS <= MOVES and all(what == "A" for _, what in schedule.moves)


class Moves:
    """The transfers of a schedule, matched with the visits they serve.

    ScheduleError for a transfer on a wrong lane, of nothing, too often, or never ended.
    """

    def __init__(self, index: Index, visits_of_devices: Callable[[], Iterable[Iterable[Visit]]]) -> None:
        self.index, self._visits_of_devices = index, visits_of_devices
        self.edges: list[tuple[int, int]] = []  # (producer, consumer) by number, for the whole schedule
        self.transfers: dict[What, list[Transfer]] = defaultdict(list)  # devices and stages ascending
        # stage that is gathered or reduced -> the number of devices that share it, also outside the schedule
        self.replicas: dict[int, int] = {}
        # number of an UNSHARD -> device -> the LOAD:P of the shard it gathers from there, if loaded
        self.sources: dict[int, dict[int, Transfer]] = {}
        self._numbers: dict[tuple[What, int, int], list[int]] = defaultdict(list)  # (what, device, stage)
        self._moved: set[tuple[What, int]] = set()  # what has transfers, and of which stages
        self._by_place: dict[What, dict[tuple[int, int], list[int]]] = defaultdict(dict)  # the same, (device, stage)
        # by direction, stage and version, what `_steps_before` returns
        self._before: dict[tuple[bool, int, int], list[tuple[int, int | None, int]]] = {}
        for lane in index.lanes:
            row = index.actions[lane.start : lane.stop]
            if TRANSFERS.isdisjoint(map(itemgetter(0), row)):
                continue
            alike: dict[tuple[Kind, str | None, int], list[int]] = defaultdict(list)
            for number, key in enumerate(map(_kind_object_stage, row), start=lane.start):
                alike[key].append(number)
            for (kind, moved, stage), numbers in alike.items():
                if kind not in TRANSFERS:
                    continue
                if lane.name not in LANES[kind]:
                    where = " or ".join(LANES[kind])
                    rule = f"{index.actions[numbers[0]]} stands on lane {lane.name}, it belongs on lane {where}"
                    raise broken(index.schedule, rule, numbers[:1])
                self._numbers[(kind, moved), lane.device, stage] += numbers
        late = index.schedule.late_rest is not None
        brought = [key for key in self._numbers if key[0] == (Kind.LOAD, "P")] if late else []  # the host's columns
        self.rest_loads = {(device, stage): self._numbers.pop((what, device, stage)) for what, device, stage in brought}
        for number in chain.from_iterable(self.rest_loads.values()):
            if index.actions[number].part:
                raise broken(index.schedule, f"{index.actions[number]} is a piece: a late rest comes whole", [number])
        for (found, device, stage), numbers in self._numbers.items():
            self._by_place[found][device, stage] = numbers
        for arrive, leave in _ARRIVALS:
            self._match_weights(arrive, leave)
        for what in _LEAVERS:
            self._match_gradients(what)
        self._join()
        self._join_shards()
        self.handovers = Handovers(index, self.transfers[Kind.LOAD, "P"], self.transfers[Kind.STORE, "G"])
        self._check_whole()
        self.edges += self.handovers.edges
        self._match_states()
        self.edges += activation_edges(index, self._numbers)
        if late and index.steps:
            around = (self.transfers[what] for what in (*reversed(_LEAVERS), (Kind.UNSHARD, None)))
            self.edges += rest_edges(index, self.rest_loads, self._visits, *around)
        del self._visits_of_devices  # it refers to the owner of these moves: a cycle, which keeps both in memory

    def moves(self, what: What, stage: int) -> bool:
        """Whether a stage has transfers of a kind."""
        return (what, stage) in self._moved

    @cached_property
    def _visits(self) -> dict[tuple[int, int], list[Visit]]:
        """(device, stage) -> visits; made on first use, because moves of activations and states need none."""
        found: dict[tuple[int, int], list[Visit]] = defaultdict(list)
        for visits in self._visits_of_devices():
            for visit in visits:
                found[visit[0], visit[2]].append(visit)  # device and stage
        return defaultdict(list, sorted(found.items()))

    # --- weights and gradients ---

    def _match_weights(self, arrive: What, leave: What) -> None:
        self._check_used(arrive)
        self._check_used(leave)
        self._check_known(arrive)
        arrivals, ends_of = self._by_place[arrive], self._by_place[leave]
        stages = {stage for _, stage in chain(arrivals, ends_of)}
        if stages and arrive == (Kind.LOAD, "P") and self.index.schedule.weights is Weights.STREAMED:
            stages = {stage for _, stage in self._visits}
        for (device, stage), visits in self._visits.items() if stages else ():
            if stage in stages:
                loads = self._pieces(arrivals.get((device, stage), ()))
                ends = ends_of.get((device, stage), ())
                if not loads and not ends and self._keeps(device, stage):
                    continue
                groups = self._served(visits, loads, arrive)
                self._match_ends(loads, ends, groups, arrive, leave)
                self.transfers[arrive] += map(_transfer_of, zip(loads, groups, ends, strict=True))
                self._moved.add((arrive, stage))
                brought = set[int]()
                for pieces, group in zip(loads, groups, strict=True):
                    if len(group) > 1:
                        self._check_serves(pieces, group)
                    self.edges.append((pieces[-1], group[0].numbers[0]))
                    for step, end, version in self._steps_before(group[0], pieces[0]):
                        if end is None:
                            self.edges.append((step, pieces[0]))
                        elif arrive[0] is Kind.LOAD and version not in brought:
                            self.edges += [(step, pieces[0]), (pieces[-1], end)]
                            brought.add(version)
                        else:
                            self.edges.append((end, pieces[0]))
        if arrive[0] is Kind.UNSHARD:
            self._count_replicas(arrive)

    def _keeps(self, device: int, stage: int) -> bool:
        """Whether a device steps a stage on lane compute, and so keeps the weights of which others take copies."""
        step = self.index.steps.get((stage, 1))
        if step is None or stage not in self._handed_on:
            return False
        lane = self.index.lanes[self.index.lane_of[step]]
        return (lane.device, lane.name) == (device, "compute")

    @cached_property
    def _handed_on(self) -> set[int]:
        """The stages of which a device takes a copy from another one."""
        actions, loads = self.index.actions, self._by_place[Kind.LOAD, "P"]
        return {
            stage
            for (_, stage), numbers in loads.items()
            if any(isinstance(actions[number].peer, int) for number in numbers)
        }

    def _check_whole(self) -> None:
        """Refuse transfers from device to device of a stage in shards, because they move whole stages."""
        index, shared = self.index, {Kind.UNSHARD, Kind.REDUCE_GRAD}
        shards = {stage: own[0] for ((kind, _), _, stage), own in self._numbers.items() if kind in shared and own}
        for ((_, what), _, stage), numbers in self._numbers.items() if shards else ():
            asked = numbers if what in ("P", "G") and stage in shards else ()
            handed = [number for number in asked if isinstance(index.actions[number].peer, int)]
            if handed:
                sharing = index.actions[shards[stage]]
                rule = f"{index.actions[handed[0]]} goes from rank to rank, and {sharing} says that ranks share it"
                shown = sorted((handed[0], shards[stage]))
                raise broken(index.schedule, rule, shown, way_out="one of both for a stage")

    def _check_known(self, arrive: What) -> None:
        """Refuse transfers of weights under a policy whose versions do not follow from microbatch and stage."""
        index = self.index
        if index.steps and index.schedule.policy not in KNOWN:
            for numbers in self._by_place[arrive].values():
                rule = f"{index.actions[numbers[0]]}: policy {index.schedule.policy.value} reads what is newest"
                way_out = f"take a policy whose versions are known: {', '.join(known.value for known in KNOWN)}"
                raise broken(index.schedule, rule, numbers[:1], way_out=way_out)

    def _check_serves(self, pieces: Sequence[int], visits: Sequence[Visit]) -> None:
        """Check that all visits of one transfer read the layers and the version that it brings."""
        index = self.index
        first, known = visits[0], self._versions
        if known and not index.shape.separate_cuts and len({known[visit.step] for visit in visits}) == 1:
            return
        for visit in visits[1:]:
            if index.shape.separate_cuts and visit.backward != first.backward:
                rule = f"{index.actions[pieces[0]]} serves stage {visit.stage} both ways, whose layers differ"
                raise broken(index.schedule, rule, [pieces[0], visit.first], way_out="bring weights to every visit")
            if index.steps and self._version(visit) != self._version(first):
                rule = (
                    f"{index.actions[pieces[0]]} brings version {self._version(first)}, and "
                    f"{index.actions[visit.first]} reads version {self._version(visit)}"
                )
                raise broken(index.schedule, rule, [pieces[0], visit.first], way_out="bring weights once a step")

    def _version(self, visit: Visit) -> int:
        """The version that a visit reads."""
        if self._versions:
            return self._versions[visit.step]
        shape, microbatch = self.index.shape, first_of(self.index, visit).microbatch
        return version_read(self.index.schedule.policy, shape, microbatch or 0, visit.stage) or 0

    @cached_property
    def _versions(self) -> list[int]:
        """By step, the version read, under policies that read one version in a step; empty under others."""
        schedule = self.index.schedule
        return versions_by_step(schedule) if schedule.policy in STEPS_BEHIND else []

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
        lasts = [group[-1].numbers[-1] for group in groups]
        self.edges += zip(lasts, ends, strict=True)
        for end, last, pieces in zip(ends, lasts, loads, strict=True):
            if end > last and end > pieces[-1]:
                continue
            lane = self.index.lanes[self.index.lane_of[end]]
            if end < last < lane.stop and lane.name == "compute":
                rule = f"{self.index.actions[last]} uses what {self.index.actions[end]} has freed"
                raise broken(self.index.schedule, rule, [end, last], way_out="free it after its last use")
            if lane.start <= end < pieces[-1] < lane.stop:
                rule = f"{self.index.actions[end]} stands before {self.index.actions[pieces[-1]]}, which it is to end"
                raise broken(self.index.schedule, rule, [end, pieces[-1]])

    def _match_gradients(self, what: What) -> None:
        self._check_used(what)
        leaving, goes = self._by_place[what], self._versions_that_go(what)
        stages = {stage for _, stage in leaving}
        together: dict[tuple[int, int, int], list[Transfer]] = defaultdict(list)  # (stage, step, k) -> one of a device
        for (device, stage), visits in self._visits.items() if stages else ():
            if stage not in stages:
                continue
            made = [visit for visit in visits if visit.last_gradient >= 0 and (goes is None or visit.step + 1 in goes)]
            if made:
                numbers = leaving.get((device, stage), ())
                groups = self._served(made, [(number,) for number in numbers], what)
                self._moved.add((what, stage))
                num_of: dict[int, int] = defaultdict(int)  # step -> transfers so far
                for number, group in zip(numbers, groups, strict=True):
                    transfer, step = _transfer_of(((number,), group, -1)), group[-1].step
                    self.transfers[what].append(transfer)
                    together[stage, step, num_of[step]].append(transfer)
                    num_of[step] += 1
                self._match_steps(what, stage, numbers, groups)
                self._match_freed_gradients(device, stage, numbers)
        if what[0] is Kind.REDUCE_GRAD:
            self._check_equally_often(together.values())
            self._count_replicas(what)
        # A sum over replicas is complete when the last replica has added its part.
        pairs = product if what[0] is Kind.REDUCE_GRAD else zip
        for transfers in together.values():
            made_by = [transfer.visits[-1].last_gradient for transfer in transfers]
            self.edges += pairs(made_by, [transfer.pieces[0] for transfer in transfers])

    def _check_equally_often(self, sums: Iterable[Sequence[Transfer]]) -> None:
        """Check that each REDUCE_GRAD belongs to one step, and that every replica takes part in each sum of a stage."""
        replicas: dict[int, dict[int, int]] = defaultdict(dict)  # stage -> device -> a REDUCE_GRAD there
        for transfer in (each for one in sums for each in one):
            number, (first, *others) = transfer.pieces[0], transfer.visits
            if others and any(visit.step != first.step for visit in others):
                rule = f"{self.index.actions[number]} adds up gradients of several steps, each used by itself"
                raise broken(self.index.schedule, rule, [number], way_out="take one for each step, or for each visit")
            replicas[first.stage].setdefault(first.device, number)
        for one in sums:
            there, stage = {each.visits[0].device for each in one}, one[0].visits[0].stage
            if replicas[stage].keys() - there:
                away = sorted(replicas[stage].keys() - there)
                number, step = one[0].pieces[0], one[0].visits[0].step
                rule = (
                    f"{self.index.actions[number]} on rank {min(there)} has no counterpart on rank {away[0]} in step "
                    f"{step}: a sum takes a part of every replica of stage {stage}"
                )
                shown = [number, replicas[stage][away[0]]]
                raise broken(self.index.schedule, rule, shown, way_out="reduce equally often on all of them")

    def _versions_that_go(self, what: What) -> range | None:
        """The versions whose gradients move; None: all. Under a late rest, those of which the host steps a part."""
        rule = self.index.schedule.late_rest
        if rule is None or what[0] is not Kind.STORE or not self.index.steps:
            return None
        return versions_stored(rule, self.index.shape.num_steps)

    def _match_steps(self, what: What, stage: int, numbers: Sequence[int], groups: Sequence[Sequence[Visit]]) -> None:
        if self.index.schedule.late_rest is not None and what[0] is Kind.STORE:
            return  # a device steps columns that never leave it
        steps, looks = self.index.steps, self.index.validations
        after = {
            version: [number for number in (steps.get((stage, version)), looks.get(version)) if number is not None]
            for version in range(1, self.index.shape.num_steps + 1)
        }
        self.edges += [
            (number, later)
            for number, group in zip(numbers, groups, strict=True)
            for version in ({visit.step + 1 for visit in group} if len(group) > 1 else (group[0].step + 1,))
            for later in after[version]
        ]

    def _match_freed_gradients(self, device: int, stage: int, stores: Sequence[int]) -> None:
        freed = self._by_place[Kind.FREE, "G"].get((device, stage), [])
        if freed and len(freed) != len(stores):
            rule = f"{len(freed)} FREE:G of stage {stage} on rank {device} for {len(stores)} gradients that leave it"
            raise broken(self.index.schedule, rule, freed[:1])
        self.edges += zip(stores, freed, strict=False)

    def _join(self) -> None:
        """Gathers wait for the loads of their shards; stores wait for the reduction of their gradients.

        `_join_shards` joins the load of a gather's first visit to all gathers of its stage.
        """
        for before, after, begin in (
            ((Kind.LOAD, "P"), (Kind.UNSHARD, None), 1),
            ((Kind.REDUCE_GRAD, None), (Kind.STORE, "G"), 0),
        ):
            if not self.transfers[before]:
                continue
            serves = {id(visit): pieces[-1] for pieces, visits, _ in self.transfers[before] for visit in visits}
            for pieces, visits, _ in self.transfers[after]:
                served = {serves[id(visit)] for visit in visits[begin:] if id(visit) in serves}
                self.edges += [(number, pieces[0]) for number in sorted(served)]

    def _join_shards(self) -> None:
        """The k-th gathers of a stage, one on each device, gather the shards that all devices have loaded for it."""
        loads = {id(visit): load for load in self.transfers[Kind.LOAD, "P"] for visit in load.visits}
        together: dict[tuple[int, int], list[Transfer]] = defaultdict(list)  # (stage, k) -> one of each device
        num_of: dict[tuple[int, int], int] = defaultdict(int)  # (device, stage) -> gathers so far
        for gather in self.transfers[Kind.UNSHARD, None] if loads else ():
            visit = gather.visits[0]
            together[visit.stage, num_of[visit.device, visit.stage]].append(gather)
            num_of[visit.device, visit.stage] += 1
        for gathers in together.values():
            firsts = [gather.visits[0] for gather in gathers]
            sources = {visit.device: loads[id(visit)] for visit in firsts if id(visit) in loads}
            if not sources:
                continue
            read = {self._version(visit): gather for visit, gather in zip(firsts, gathers, strict=True)}
            if self.index.steps and len(read) > 1:
                one, other = (gather.pieces[0] for gather in list(read.values())[:2])
                rule = f"{self.index.actions[one]} and {self.index.actions[other]} gather shards of different versions"
                raise broken(self.index.schedule, rule, [one, other])
            numbers = [gather.pieces[0] for gather in gathers]
            self.sources |= dict.fromkeys(numbers, sources)
            self.edges += product([load.pieces[-1] for load in sources.values()], numbers)
            self.edges += product(numbers, [load.end for load in sources.values()])

    def _steps_before(self, visit: Visit, load: int) -> Sequence[tuple[int, int | None, int]]:
        """The STEPs that make the weights a visit reads, the ROLLBACKs that end them, and the version, which its
        transfer may name.
        """
        index = self.index
        version, written = self._version(visit) if index.steps else 0, index.actions[load].version
        if written is not None and written != version:
            reader = index.actions[visit.first]
            rule = f"{index.actions[load]} brings version {written} to {reader}, which reads version {version}"
            raise broken(index.schedule, rule, [load, visit.first])
        if not version:
            return ()
        key = visit.backward, visit.stage, version
        if key not in self._before:
            updated = index.updated_by(Kind.B if visit.backward else Kind.F, visit.stage)
            steps = [(stage, version) for stage in updated if (stage, version) in index.steps]
            self._before[key] = [(index.steps[step], index.rollbacks.get(step), version) for step in steps]
        return self._before[key]

    def _served(self, visits: Sequence[Visit], loads: Sequence[Sequence[int]], what: What) -> list[tuple[Visit, ...]]:
        """By transfer of one stage, the visits that it serves."""
        if len(loads) == len(visits):
            return list(zip(visits, strict=True))
        steps = sorted({visit.step for visit in visits})
        if len(loads) == len(steps):
            return [tuple(visit for visit in visits if visit.step == step) for step in steps]
        if len(loads) == 1:
            return [tuple(visits)]
        rule = (
            f"stage {visits[0].stage} has {len(visits)} visits in {len(steps)} steps on rank {visits[0].device} and "
            f"{len(loads)} {_name(what)}: one for each visit, one for each step, or one for all"
        )
        raise broken(self.index.schedule, rule, [loads[0][0] if loads else visits[0].first])

    def _pieces(self, numbers: Sequence[int]) -> list[tuple[int, ...]]:
        """Transfers as their pieces: piece 0 begins a transfer, and the others follow in order."""
        actions, found = self.index.actions, list[list[int]]()
        if {actions[number][3] for number in numbers} <= {0}:  # nearly all come whole
            return list(zip(numbers, strict=True))
        for number in numbers:
            part = actions[number].part
            if part == 0:
                found.append([])
            if not found or part != len(found[-1]):
                rule = f"{self.index.actions[number]} is a piece out of order: pieces are 0, 1, 2, ... of one transfer"
                raise broken(self.index.schedule, rule, [number])
            found[-1].append(number)
        return [tuple(pieces) for pieces in found]

    def _check_used(self, what: What) -> None:
        """Check that the device of every transfer of this kind runs the stage, or makes a gradient of it."""
        gradient = what in _LEAVERS
        for (device, stage), numbers in self._by_place[what].items():
            visits = self._visits.get((device, stage), [])
            if not (any(visit.last_gradient >= 0 for visit in visits) if gradient else visits):
                use = "makes no gradient of" if gradient else "never runs"
                rule = f"{self.index.actions[numbers[0]]} is of no use: rank {device} {use} stage {stage}"
                raise broken(self.index.schedule, rule, [numbers[0]], way_out="take it out")

    def _count_replicas(self, what: What) -> None:
        devices: dict[int, set[int]] = defaultdict(set)
        for transfer in self.transfers[what]:
            devices[transfer.visits[0].stage].add(transfer.visits[0].device)
        outer = self.index.shape.outer_replicas
        self.replicas |= {stage: outer * len(found) for stage, found in devices.items()}

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


def all_producers(index: Index, edges: Iterable[tuple[int, int]]) -> list[tuple[int, ...]]:
    """`Index.producers` with the edges of transfers added: (producer, consumer), those of `Moves`."""
    if not edges:
        return index.producers
    found = [list(producers) for producers in index.producers]
    for producer, consumer in edges:
        lane = index.lanes[index.lane_of[consumer]]
        if producer not in range(lane.start, consumer):
            found[consumer].append(producer)
    return [tuple(producers) for producers in found]


def _name(what: What) -> str:
    return what[0].name + (f":{what[1]}" if what[1] else "")
