"""Passes that move weights, gradients and activations: streaming, sharding, offloading.

Each takes a schedule with its compute lanes, and its STEPs if it has any, and adds transfers in the lanes h2d, d2h and
net. `rpbench.ir.waits.moves` says what they mean.

    stream    weights follow the work: RoundPipe, Mobius, ZeRO-Infinity
    shard     replicas keep a shard each: FSDP and ZeRO-3, or ZeRO-1 and -2, or plain data parallel
    offload   gradients go to the host, new weights come back: ZeRO-Offload
    keep_on_ssd   the host's state lives on its SSDs: ZeRO-Infinity, GreedySnake

A visit is an unbroken run of one stage on a device. With prefetch 1, two buffers for weights, visits 0, 1, 2, ...:

    h2d       LOAD:P(0) a a LOAD:P(1) a a | FREE:P(0) LOAD:P(2) a a | FREE:P(1) LOAD:P(3) a a | ...
    compute                 visit 0                 visit 1                      visit 2

where a is an activation loaded for a microbatch of the visit. The weights of the next visit are cut into as many pieces
as there are activations, and a piece follows each: activations go first and weights fill the gaps (priority of
transfers in RoundPipe, arXiv 2604.27085).
"""

from collections import defaultdict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, Literal, get_args

from rpbench.ir.action import MOVES, Action, Kind, from_fields
from rpbench.ir.communication import hops, local_hops
from rpbench.ir.index import Index
from rpbench.ir.policy import STEPS_BEHIND
from rpbench.ir.schedule import ON_SSD, Schedule, ScheduleError
from rpbench.ir.waits.edges import versions_by_step
from rpbench.ir.waits.moves import TRANSFERS
from rpbench.ir.waits.saved_inputs import keeping_stage
from rpbench.ir.waits.visits import Visit, visits_of
from rpbench.passes.lower import with_rows

_FROM_SAVED = (Kind.B, Kind.I)  # they recompute from a saved input
ACTIVATION_BUFFERS = 2  # for what is loaded for recomputation, on every device

After = list[tuple[int, Sequence[Action]]]  # (place of a visit on its device, what follows it)


class WeightLanes:
    """Makes lanes that load weights and free them again."""

    def __init__(self, index: Index, arrive: Kind, leave: Kind, what: str | None, prefetch: int) -> None:
        self._index, self.prefetch, self._versions = index, prefetch, versions_by_step(index.schedule)
        self._arrive, self._leave, self._what = arrive, leave, what
        # Each once: there are as many of them as visits.
        self._arrivals: dict[tuple[int, int, int | None], Action] = {}
        self._departures: dict[int, Action] = {}
        self._alike: tuple[Any, list[Action]] = (None, [])  # visits and what follows them, and their lane

    def per_visit(
        self, visits: Sequence[Visit], uploads: Mapping[int, list[Action]], after: After | None = None
    ) -> list[Action]:
        """A lane that loads weights for every visit, and `uploads` for the actions of their numbers."""
        key = [visit[2:4] for visit in visits], after  # stage and step
        if not uploads and key == self._alike[0]:  # devices with the same model do the same
            return self._alike[1]
        due: dict[int, list[int]] = defaultdict(list)  # visit -> visits whose weights come while it runs
        for place in range(len(visits)):
            due[self._earliest(visits, place)].append(place)
        lane = _Lane(self, visits, deque(after or []))
        for place, visit in enumerate(visits):
            if place in due[place]:  # nothing can come ahead of it
                lane.follow(place - 1)
                lane.bring(place, 1)
            coming = [other for other in due[place] if other != place]
            groups = [uploads[number] for number in visit.numbers if number in uploads] if uploads else []
            lane.interleave(place, groups or [[]], coming)
            lane.follow(place - 1)
        lane.follow(len(visits) - 1)
        lane.free(len(visits) - 1)
        self._alike = (None if uploads else key), lane.row
        return lane.row

    def per_step(self, visits: Sequence[Visit], after: After) -> list[Action]:
        """A lane that loads the weights of a step as it begins, and frees each after its last visit; steps overlap."""
        follows, row, begun = dict(after), list[Action](), set[int]()
        last = {(visit.step, visit.stage): place for place, visit in enumerate(visits)}
        for place, visit in enumerate(visits):
            if visit.step not in begun:
                begun.add(visit.step)
                first = {each.stage: each for each in reversed(visits) if each.step == visit.step}
                row += [self.arrival(each) for each in sorted(first.values(), key=lambda each: each.first)]
            row += follows.get(place, [])
            row += [self.departure(visit)] * (last[visit.step, visit.stage] == place)
        return row

    def arrival(self, visit: Visit, part: int = 0) -> Action:
        """The transfer that brings the weights of a visit, or one part of them."""
        version = self._versions[visit.step] if self._index.steps else None
        key = visit.stage, part, version
        if key not in self._arrivals:
            self._arrivals[key] = Action(self._arrive, visit.stage, None, part, version, self._what)
        return self._arrivals[key]

    def departure(self, visit: Visit) -> Action:
        """The action that frees the weights of a visit."""
        stage = visit.stage
        if stage not in self._departures:
            self._departures[stage] = Action(self._leave, stage, object=self._what)
        return self._departures[stage]

    def pieces(self, visit: Visit, number: int) -> list[Action]:
        """The transfers of a visit's weights in pieces; a gather is one, which comes with the first activation."""
        return [self.arrival(visit, part) for part in range(number if self._what else 1)]

    def _earliest(self, visits: Sequence[Visit], place: int) -> int:
        """The first visit during which another's weights may come: `prefetch` before it, but after the work on this
        device that makes their version."""
        earliest = max(0, place - self.prefetch)
        if self._index.steps:
            version = self._versions[visits[place].step]
            for before in range(place, earliest, -1):
                if visits[before - 1].step < version:
                    return before
        return earliest


class _Lane:
    """A lane h2d or net as it grows."""

    def __init__(
        self, weights: WeightLanes, visits: Sequence[Visit], after: "deque[tuple[int, Sequence[Action]]]"
    ) -> None:
        self.row: list[Action] = []
        self._weights, self._visits, self._after = weights, visits, after
        self._num_freed = 0
        self._held: deque[tuple[int, Action]] = deque()  # (visit, activations that were loaded and not freed)

    def bring(self, place: int, num_pieces: int) -> None:
        """Free a buffer, and load the weights of a visit into it."""
        self.free(place - 1 - self._weights.prefetch)
        self.row += self._weights.pieces(self._visits[place], num_pieces)

    def interleave(self, place: int, groups: Sequence[Sequence[Action]], coming: Sequence[int]) -> None:
        """Load activations, and in the gaps the weights of later visits."""
        pieces = [piece for other in coming for piece in self._weights.pieces(self._visits[other], len(groups))]
        for number, group in enumerate(groups):
            self.take(place, group)
            if number == 0 and coming:
                self.free(coming[-1] - 1 - self._weights.prefetch)
            share = len(coming) if number < len(groups) - 1 else len(pieces)
            self.row += pieces[:share]
            pieces = pieces[share:]

    def take(self, place: int, group: Sequence[Action]) -> None:
        """Load activations, into two buffers."""
        for action in group:
            if action.kind is Kind.LOAD:
                if len(self._held) == ACTIVATION_BUFFERS:
                    self._free_held()
                self._held.append((place, action))
            self.row.append(action)

    def free(self, last: int) -> None:
        """Free the weights and activations of all visits up to one."""
        while self._num_freed <= last:
            while self._held and self._held[0][0] <= self._num_freed:
                self._free_held()
            self.row.append(self._weights.departure(self._visits[self._num_freed]))
            self._num_freed += 1

    def follow(self, last: int) -> None:
        """Add the actions that follow the visits up to one."""
        while self._after and self._after[0][0] <= last:
            self.row += self._after.popleft()[1]

    def _free_held(self) -> None:
        _, load = self._held.popleft()
        self.row.append(from_fields((Kind.FREE, *load[1:])))


Per = Literal["visit", "step"]
_PERS: tuple[Per, ...] = get_args(Per)
_SHARED = frozenset({Kind.UNSHARD, Kind.RESHARD, Kind.REDUCE_GRAD})


def stream(schedule: Schedule, *, prefetch: int = 1, activations: bool = True, spill: bool = False) -> Schedule:
    """The schedule with weights loaded for every visit, and gradients stored on the host after it.

    Lane h2d gets LOAD:P and FREE:P of every visit, lane d2h STORE:G and FREE:G of every visit with a weight gradient.

    Args:
        prefetch: visits whose weights come ahead of the one that runs; a device has one buffer more than that.
        activations: also move what passes between devices (SEND on d2h, RECV on h2d: all of it goes through the
            host) and what is kept for recomputation (STORE:A, and LOAD:A into two buffers).
        spill: boundary tensors that stay on their device go to the host as well, except those that the very next
            action uses. A backward then recomputes from the host's copy, and needs no STORE:A.

    ScheduleError if the schedule has transfers already, or a policy whose versions are not known beforehand; ValueError
    if prefetch is negative.
    """
    index = _index(schedule)
    _check_prefetch(prefetch)
    uploads, downloads = _activations(index, spill=spill) if activations else ({}, {})
    weights = WeightLanes(index, Kind.LOAD, Kind.FREE, "P", prefetch)
    rows: list[dict[str, list[Action]]] = []
    for visits in visits_of(index):
        row = weights.per_visit(visits, uploads)
        rows.append({"h2d": row, "d2h": _downloads(index, visits, downloads)})
    return _with_lanes(schedule, rows)


def shard(
    schedule: Schedule, *, parameters: Per | None = "visit", gradients: Per | None = "step", prefetch: int = 1
) -> Schedule:
    """Replicas of a stage share its weights, gradients and optimizer state; all on lane net.

    Replicas are ranks of the schedule, devices outside of it (`Shape.outer_replicas`), or both.

    | method                | parameters | gradients | elements a step and device (n replicas, f = (n - 1) / n) |
    | data parallel         | None       | "step"    | 2 f: an all-reduce                                       |
    | ZeRO-1                | "step"     | "step"    | 2 f: reduce-scatter, then a gather of new weights        |
    | ZeRO-2                | "step"     | "visit"   | 2 f if a step has one backward visit                     |
    | ZeRO-3, FSDP          | "visit"    | "visit"   | 3 f if a step has one visit each way                     |

    Args:
        parameters: "visit": UNSHARD before and RESHARD after every visit; "step": UNSHARD once for all of a step;
            None: every replica keeps all.
        gradients: REDUCE_GRAD after every backward visit, or after the last of a step; None: never.
        prefetch: visits whose gather runs ahead.

    ScheduleError if there are UNSHARD, RESHARD or REDUCE_GRAD already, or weights are to be gathered where forward and
    backward are cut apart, or the head over the devices; ValueError for another word, or a negative prefetch.

    Source: Rajbhandari et al., "ZeRO", SC'20, section 7.
    """
    index = _index(schedule, _SHARED, cut_head=parameters is None)
    _check_prefetch(prefetch)
    _check_per(parameters=parameters, gradients=gradients)
    if schedule.shape.separate_cuts and parameters is not None:
        raise ScheduleError("shards are of stages that are the same both ways; here forward and backward are cut apart")
    weights = WeightLanes(index, Kind.UNSHARD, Kind.RESHARD, None, prefetch)
    rows = []
    for visits in visits_of(index):
        reduced = _after_gradients(visits, gradients, _reduced)
        if parameters == "visit":
            row = weights.per_visit(visits, {}, reduced)
        elif parameters == "step":
            row = weights.per_step(visits, reduced)
        else:
            row = [action for _, found in reduced for action in found]
        rows.append({"net": row})
    return _with_lanes(schedule, rows)


def offload(
    schedule: Schedule,
    *,
    gradients: Per = "visit",  # stored after every backward visit, or after the last of a step
    # "step": loaded once a step, and kept on the device for all of it; "visit": as `stream` does; None: kept on the
    # device, and never refreshed
    parameters: Per | None = "step",
    prefetch: int = 1,  # visits whose weights come ahead, where they come for every visit
    stages: Collection[int] | None = None,  # those whose optimizer works on the host; None for all
) -> Schedule:
    """The optimizer works on the host: gradients go there as they are made, new weights come back.

    Steps belong on lane host (`add_steps(schedule, lane="host")`). Lane d2h gets STORE:G and FREE:G, lane h2d
    LOAD:P and FREE:P. On a schedule that is sharded, both move shards. ScheduleError if the schedule has LOAD, STORE or
    FREE already, or a policy whose versions are not known; ValueError for another word, or a negative prefetch.

    Source: Ren et al., "ZeRO-Offload", ATC'21, section 4.
    """
    index = _index(schedule, MOVES)
    _check_prefetch(prefetch)
    _check_per(parameters=parameters, gradients=gradients)
    weights = WeightLanes(index, Kind.LOAD, Kind.FREE, "P", prefetch)
    rows = []
    for device in visits_of(index):
        visits = [visit for visit in device if stages is None or visit.stage in stages]
        row: dict[str, list[Action]] = {}
        if parameters:
            row["h2d"] = weights.per_visit(visits, {}) if parameters == "visit" else weights.per_step(visits, [])
        stored = _after_gradients(visits, gradients, _stored)
        row["d2h"] = [action for _, found in stored for action in found]
        rows.append(row)
    return _with_lanes(schedule, rows)


def keep_on_ssd(schedule: Schedule, what: str) -> Schedule:
    """The schedule with the host's state on its SSDs: every STEP reads it there and writes it back.

    It is `none`; `optimizer`: master weights and moments; or `all`: weights as well, which every load reads. ValueError
    for another word.
    """
    if what not in ON_SSD:
        raise ValueError(f"schedule.ssd={what}: what lives on SSDs, one of {', '.join(ON_SSD)}")
    return replace(schedule, on_ssd=ON_SSD[what])


# --- activations ---------------------------------------------------------------------------------------------


def _activations(index: Index, *, spill: bool) -> tuple[dict[int, list[Action]], dict[int, list[Action]]]:
    """Transfers that come in for each action, and those that go out after it, by number."""
    uploads: dict[int, list[Action]] = defaultdict(list)
    downloads: dict[int, list[Action]] = defaultdict(list)
    crossing = [*hops(index), *(local_hops(index) if spill else ())]
    spilled = {hop.consumer for hop in crossing if hop.send.peer == index.device(hop.producer)}
    stages = range(index.shape.num_backward_stages)
    keeper = {stage: keeping_stage(index.schedule, stage) for stage in stages if _keeps(index.schedule, stage)}
    for number, action in enumerate(index.actions):
        for part in action.sub or (action,):
            if part[0] in _FROM_SAVED and part[1] in keeper:
                what = part[1:4]
                maker = index.at(Kind.F, keeper[part[1]], part[2] or 0, part[3])
                if maker not in spilled:
                    downloads[maker] += [_kept(Kind.STORE, *what), _kept(Kind.FREE, *what)]
                uploads[number].append(_kept(Kind.LOAD, *what))
    for producer, consumer, send, receive in crossing:
        downloads[producer].insert(0, send)
        uploads[consumer].append(receive)
    return uploads, downloads


def _kept(kind: Kind, stage: int, microbatch: int | None, part: int) -> Action:
    """An action that moves what a backward recomputes from."""
    return from_fields((kind, stage, microbatch, part, None, "A", None, ()))


def _keeps(schedule: Schedule, backward_stage: int) -> bool:
    """Whether a backward stage recomputes from an input that a forward saved; the first has the tokens."""
    layers = None if schedule.partition is None else schedule.partition.backward[backward_stage]
    return backward_stage > 0 and layers != 0


def _downloads(index: Index, visits: Sequence[Visit], downloads: Mapping[int, list[Action]]) -> list[Action]:
    row: list[Action] = []
    for visit in visits:
        for number in dict.fromkeys(visit.numbers):
            row += downloads.get(number, ())
        row += _stored(visit.stage) if visit.last_gradient >= 0 else ()
    return row


# --- gradients -----------------------------------------------------------------------------------------------


@cache  # the same objects for every visit: there are thousands, and to tell equal objects apart is slow
def _stored(stage: int) -> tuple[Action, ...]:
    return Action(Kind.STORE, stage, object="G"), Action(Kind.FREE, stage, object="G")


@cache
def _reduced(stage: int) -> tuple[Action, ...]:
    return (Action(Kind.REDUCE_GRAD, stage),)


def _after_gradients(visits: Sequence[Visit], per: Per | None, make: Callable[[int], Sequence[Action]]) -> After:
    """The actions of `make` after every visit with a weight gradient, or after a stage's last one in a step."""
    if per is None:
        return []
    made = [(place, visit) for place, visit in enumerate(visits) if visit.last_gradient >= 0]
    last = {(visit.stage, visit.step): place for place, visit in made}
    return [
        (place, make(visit.stage)) for place, visit in made if per == "visit" or last[visit.stage, visit.step] == place
    ]


# --- checks and lanes of all passes --------------------------------------------------------------------------


def _index(schedule: Schedule, refused: frozenset[Kind] = TRANSFERS, *, cut_head: bool = False) -> Index:
    index = Index(schedule)
    if not refused.isdisjoint(schedule.kinds):
        found = next(action for action in index.actions if action.kind in refused)
        raise ScheduleError(f"the schedule holds {found} already: add transfers of this kind once")
    if schedule.shape.num_head_shards and not cut_head:
        raise ScheduleError(f"the head of {schedule.name} is cut over the devices: its weights stay where they are")
    if index.steps and schedule.policy not in STEPS_BEHIND:
        raise ScheduleError(
            f"policy {schedule.policy.value} reads what is newest: which version a transfer brings is not known "
            f"beforehand; take {', '.join(known.value for known in STEPS_BEHIND)}"
        )
    return index


def _check_prefetch(prefetch: int) -> None:
    if prefetch < 0:
        raise ValueError(f"prefetch={prefetch}: visits whose weights come ahead, 0 for none; 1 is RoundPipe's")


def _check_per(**words: str | None) -> None:
    for name, word in words.items():
        if word is not None and word not in _PERS:
            raise ValueError(f"{name}={word!r}: one of {', '.join(_PERS)}, or None")


def _with_lanes(schedule: Schedule, rows: Sequence[Mapping[str, list[Action]]]) -> Schedule:
    """The schedule with rows appended to its lanes; empty lanes are left out."""
    lanes = []
    for row, more in zip(schedule.rows, rows, strict=True):
        found = {name: list(actions) for name, actions in row}
        for name, actions in more.items():
            if actions:
                found.setdefault(name, []).extend(actions)
        lanes.append(found)
    return with_rows(schedule, lanes)
