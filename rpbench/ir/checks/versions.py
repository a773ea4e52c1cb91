"""Versions: which weights each action reads, how stale they are and how many are kept, found by replaying an order.

`lane_reads` finds the same without a replay if every stage steps on the lane that computes it: the steps before an
action in its own lane tell the newest version there. It checks the replay, and an engine's run.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence, ValuesView
from dataclasses import dataclass, field
from itertools import accumulate, chain, product, repeat
from operator import sub
from typing import NamedTuple

from rpbench.ir.action import COMPUTE, Action, Kind, parts_of
from rpbench.ir.checks.deadlock import in_rounds
from rpbench.ir.checks.excerpt import broken
from rpbench.ir.index import GRADIENT, Index
from rpbench.ir.policy import ASYNCHRONOUS, KNOWN, STEPS_BEHIND, Policy, steps_late
from rpbench.ir.schedule import Row, Schedule, ScheduleError, kinds_of
from rpbench.ir.waits.edges import names_versions, version_read

_READ_NEWEST = frozenset({Policy.LATEST, Policy.PREDICT})  # in backward too
_SAME_AS_FORWARD = frozenset({Policy.STASH, Policy.VERTICAL})  # backward reads the version of its forward
# All parts of one backward read the version that the first of them reads: B goes through the graph that R makes, and W
# finishes what I leaves.
_BACKWARDS = frozenset({Kind.R, Kind.B, Kind.I, Kind.W})


@dataclass(frozen=True)
class Versions:
    """The result of a replay. A version is the number of optimizer steps the weights have seen."""

    # per action, in the order of `schedule.items()`, the version it reads (of an OVERLAP, the first part's); None for
    # actions that read no weights
    read: tuple[int | None, ...]
    published: tuple[int, ...]  # per backward stage, the version after the last step
    # per (backward stage, microbatch), the steps published between the version its forward reads and the step that adds
    # its gradient; with separate cuts, counted from its backward
    staleness_steps: Mapping[tuple[int, int], int]
    drift: Mapping[tuple[int, int], int]  # per the same, the version its backward reads less the one its forward read
    # per backward stage, the most versions that must be kept at one time: a version is kept from its publication until
    # the next one is out and it is read no more
    live: tuple[int, ...]
    together: Mapping[tuple[int, Action], int] = field(default_factory=dict)  # (number, part of an OVERLAP) -> version

    def of(self, number: int, part: Action) -> int | None:
        """The version that a plain action reads: the action of that number, or a part of that OVERLAP."""
        return self.together.get((number, part), self.read[number])

    @property
    def max_staleness(self) -> int:
        """The largest staleness of all, in steps."""
        return max(self.staleness_steps.values(), default=0)

    @property
    def max_live(self) -> int:
        """The most versions that any stage must keep at one time."""
        return max(self.live)


def replay_in(index: Index, rounds: Sequence[int]) -> Versions:
    """The versions that a schedule with steps reads if its actions run in these rounds.

    Other durations may give other versions if the policy reads the newest one and steps stand on a lane of their own.
    """
    return _Replay(index).run(in_rounds(rounds))


def implied_versions(schedule: Schedule) -> Versions:
    """The versions that a schedule without steps reads, from the policy's table."""
    shape, behind = schedule.shape, STEPS_BEHIND.get(schedule.policy)
    windows = [microbatch // shape.num_microbatches for microbatch in range(shape.total_microbatches)]
    reads = [0 if behind is None else max(0, window - behind) for window in windows]
    stale = [0] * len(reads) if behind is None else list(map(sub, windows, reads))
    if schedule.late_rest is not None:
        late = steps_late(schedule.late_rest, shape.num_steps)
        stale = [late[window] for window in windows]
    stages = range(shape.num_backward_stages)
    read: tuple[int | None, ...]
    if any(reads) or not schedule.kinds <= COMPUTE:
        read = tuple(chain.from_iterable(_implied_in(row, reads) for _, _, row in schedule.items()))
    else:
        read = (0,) * schedule.num_actions
    drift = _OfEveryStage([0] * len(stale), len(stages))
    of_stages, live = _OfEveryStage(stale, len(stages)), (1,) * len(stages)
    return Versions(read, (0,) * len(stages), of_stages, drift, live, _implied_together(schedule, reads))


def _implied_in(row: Row, reads: Sequence[int]) -> Iterable[int | None]:
    """The version that each action of a row reads; `reads` has the version of each microbatch."""
    kinds = kinds_of(row)
    if kinds.isdisjoint(COMPUTE):
        return repeat(None, len(row))
    if kinds <= COMPUTE - {Kind.OVERLAP} and not any(reads):
        return repeat(0, len(row))
    return [
        reads[microbatch] if microbatch is not None and kind in COMPUTE else None
        for kind, _, microbatch, _, _, _, _, _ in row
    ]


def _implied_together(schedule: Schedule, reads: Sequence[int]) -> dict[tuple[int, Action], int]:
    """(number, part) -> the version that a part of an OVERLAP reads; empty if all read version 0."""
    if Kind.OVERLAP not in schedule.kinds or not any(reads):
        return {}
    numbered = enumerate(action for _, _, row in schedule.items() for action in row)
    return {(number, part): reads[part.microbatch or 0] for number, action in numbered for part in action.sub}


class _OfEveryStage(Mapping[tuple[int, int], int]):
    """(stage, microbatch) -> a value that is the same for all stages."""

    def __init__(self, by_microbatch: list[int], num_stages: int) -> None:
        self._by_microbatch, self._num_stages = by_microbatch, num_stages

    def __getitem__(self, place: tuple[int, int]) -> int:
        stage, microbatch = place
        if not (0 <= stage < self._num_stages and 0 <= microbatch < len(self._by_microbatch)):
            raise KeyError(place)
        return self._by_microbatch[microbatch]

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return product(range(self._num_stages), range(len(self._by_microbatch)))

    def __len__(self) -> int:
        return self._num_stages * len(self._by_microbatch)

    def values(self) -> ValuesView[int]:
        return _Repeated(self._by_microbatch, self._num_stages)


class _Repeated(ValuesView[int]):
    """Values repeated, without a look-up for each of them."""

    def __init__(self, values: list[int], times: int) -> None:
        self._values, self._times = values, times

    def __iter__(self) -> Iterator[int]:
        return chain.from_iterable(repeat(self._values, self._times))

    def __len__(self) -> int:
        return len(self._values) * self._times


class _Replay:
    def __init__(self, index: Index) -> None:
        shape, policy = index.shape, index.schedule.policy
        if shape.separate_cuts and policy not in STEPS_BEHIND:
            raise ScheduleError(
                f"policy {policy.value} reads the newest version of a stage, but forward and backward are "
                f"cut apart here; take {', '.join(known.value for known in STEPS_BEHIND)}, or the same cut"
            )
        self.index = index
        self.policy = policy
        self.names_versions = names_versions(index.schedule)
        rule = index.schedule.late_rest
        self.late = None if rule is None else steps_late(rule, shape.num_steps)
        self.newest = [0] * shape.num_backward_stages
        self.admitted: dict[tuple[int, int], int] = {}  # (microbatch, part) -> version newest at stage 0
        self.predicted_from: dict[tuple[int, int], int] = {}  # (stage, step) -> version of its first forward
        self.forward: dict[tuple[int, int, int], int] = {}  # (stage, microbatch, part) -> version
        self.backward: dict[tuple[int, int, int], int] = {}  # the same, of its R, B, I and W
        self.published_at: list[list[int]] = [[-1] for _ in self.newest]
        self.last_read: list[dict[int, int]] = [{} for _ in self.newest]

    def run(self, order: Sequence[int]) -> Versions:
        num_microbatches = self.index.shape.num_microbatches
        read: list[int | None] = [None] * len(order)
        together: dict[tuple[int, Action], int] = {}
        staleness: dict[tuple[int, int], int] = {}
        drift: dict[tuple[int, int], int] = {}
        for tick, number in enumerate(order):
            for action in reversed(parts_of(self.index.actions[number])):
                kind, stage, microbatch, part, _, _, _, _ = action
                if kind is Kind.STEP:
                    assert action.version is not None
                    self.newest[stage] = action.version
                    self.published_at[stage].append(tick)
                if kind not in COMPUTE:
                    continue
                assert microbatch is not None
                version = read[number] = self._version(action)
                if self.index.actions[number].sub:
                    together[number, action] = version
                self._note_read(number, action, version, tick)
                if kind in (Kind.B, Kind.I, Kind.FB):
                    first = self.forward.get((stage, microbatch, part), version)
                    place = stage, microbatch
                    step = microbatch // num_microbatches
                    late = step - first if self.late is None else self.late[step]
                    staleness[place] = max(staleness.get(place, 0), late)
                    drift[place] = max(drift.get(place, 0), version - first)
        live = tuple(self._live(stage) for stage in range(len(self.newest)))
        return Versions(tuple(read), tuple(self.newest), staleness, drift, live, together)

    def _version(self, action: Action) -> int:
        """The version an action reads when it runs now (table in `rpbench.ir.policy`)."""
        kind, stage, microbatch, part, _, _, _, _ = action
        assert microbatch is not None
        fixed = version_read(self.policy, self.index.shape, microbatch, stage)
        if fixed is not None:
            version = fixed
        elif kind is Kind.F and action.version is not None and self.names_versions:
            version = action.version
        elif kind is Kind.F and self.policy is Policy.VERTICAL:
            version = self.admitted.setdefault((microbatch, part), self.newest[0])
        elif kind is Kind.F and self.policy is Policy.PREDICT:
            step = microbatch // self.index.shape.num_microbatches
            version = self.predicted_from.setdefault((stage, step), self.newest[stage])
        elif kind in _BACKWARDS and self.policy in _READ_NEWEST:
            version = self.backward.setdefault((stage, microbatch, part), self.newest[stage])
        elif kind is Kind.F or self.policy in _READ_NEWEST:
            version = self.newest[stage]
        else:
            version = self.forward.get((stage, microbatch, part), self.newest[stage])
        if kind is Kind.F and not self.index.shape.separate_cuts:
            self.forward[stage, microbatch, part] = version
        return version

    def _note_read(self, number: int, action: Action, version: int, tick: int) -> None:
        for stage in self.index.updated_by(action.kind, action.stage):
            self.last_read[stage][version] = tick
            if version > self.newest[stage] and action.kind in (Kind.F, Kind.FB):
                raise broken(
                    self.index.schedule,
                    f"{action} reads version {version} of stage {stage}, which has published "
                    f"{self.newest[stage]} (policy {self.policy.value})",
                    [number],
                )

    def _live(self, stage: int) -> int:
        """The most versions of a stage that are kept at one tick; a version dropped then makes room for a new one."""
        return max(accumulate(change for _, change in sorted(self._changes(stage))))

    def _changes(self, stage: int) -> Iterator[tuple[int, int]]:
        """(tick, +1) where a version appears, (tick, -1) where it may be dropped."""
        published = self.published_at[stage]
        for version, tick in enumerate(published):
            yield tick, 1
            if version + 1 < len(published):
                yield max(published[version + 1], self.last_read[stage].get(version, -1) + 1), -1


# --- versions by lane ---


class LaneReads(NamedTuple):
    """(stage, microbatch) -> the version read, of forward stages and of backward stages."""

    forward: dict[tuple[int, int], int]
    backward: dict[tuple[int, int], int]

    def of(self, action: Action) -> int:
        """The version that a plain action reads."""
        own = self.forward if action.kind is Kind.F else self.backward
        return own[action.stage, action.microbatch or 0]


def lane_reads(schedule: Schedule) -> LaneReads:
    """The versions every stage reads for every microbatch, found from each lane alone; ScheduleError if they depend on
    the progress of other lanes, or the schedule cuts sequences in parts.
    """
    found = LaneReads({}, {})
    stepped = Kind.STEP in schedule.kinds
    if schedule.policy in KNOWN or not stepped:
        plain = (part for _, _, row in schedule.items() for action in row for part in parts_of(action))
        for kind, stage, microbatch, _, _, _, _, _ in plain:
            if kind in COMPUTE:
                own = found.forward if kind is Kind.F else found.backward
                known = version_read(schedule.policy, schedule.shape, microbatch or 0, stage) if stepped else None
                own[stage, microbatch or 0] = known or 0
        return found
    _check_lanes_tell(schedule)
    for _, _, row in schedule.items():
        _read_row(schedule, row, found)
    if schedule.policy is Policy.PREDICT:  # the first microbatch of a step predicts for all of them
        for stage, microbatch in found.forward:
            first = microbatch - microbatch % schedule.shape.num_microbatches
            found.forward[stage, microbatch] = found.forward[stage, first]
    if schedule.policy is Policy.VERTICAL:
        for stage, microbatch in found.forward:
            found.forward[stage, microbatch] = found.forward[0, microbatch]  # the replay checks that it is published
    if schedule.policy in _SAME_AS_FORWARD:
        found.backward.update(found.forward)
    return found


def check_settled(schedule: Schedule, replayed: Versions) -> None:
    """Check that a policy which reads the newest version reads the same by lane and by replay.

    An action then reads the same version whatever the durations. Forwards of a stage with replicas wait for the version
    they name.
    """
    if schedule.policy not in ASYNCHRONOUS or Kind.STEP not in schedule.kinds:
        return
    found, named = lane_reads(schedule), names_versions(schedule)
    for number, action in enumerate(action for _, _, row in schedule.items() for action in row):
        for part in parts_of(action):
            if part.kind not in COMPUTE:
                continue
            own, read = found.of(part), replayed.of(number, part)
            if named and part.kind is Kind.F and part.version is None:
                rule = f"{part} names no version, and stage {part.stage} has replicas, which step elsewhere"
                raise broken(schedule, rule, [number], way_out=f"write {part}@{own}")
            if read != own:
                rule = f"{part} reads version {read} here, but by what its own lane has stepped it is to read {own}"
                raise broken(schedule, rule, [number])


def _check_lanes_tell(schedule: Schedule) -> None:
    shape, policy = schedule.shape, schedule.policy
    drifts = policy not in _SAME_AS_FORWARD  # backward reads other weights than forward did
    if shape.separate_cuts or shape.num_parts > 1 or (drifts and shape.num_head_shards):
        lacking = "stages that are the same both ways, whole sequences and a whole head"
    elif drifts and names_versions(schedule):
        lacking = "stages without replicas"
    elif _steps_elsewhere(schedule):
        lacking = "its steps on the compute lane that reads it"
    else:
        return
    raise ScheduleError(
        f"policy {policy.value} reads the newest version of a stage, which only time could tell here: it takes "
        f"{lacking}; or take policy flush or delayed"
    )


def _steps_elsewhere(schedule: Schedule) -> bool:
    """Whether a stage steps on a lane that is not compute, or that is not the one its readers stand on."""
    stepped: dict[int, set[int]] = {}
    reading: dict[int, set[int]] = {}
    for device, name, row in schedule.items():
        for part in (part for action in row for part in parts_of(action)):
            if part.kind is Kind.STEP:
                if name != "compute":
                    return True
                stepped.setdefault(part.stage, set()).add(device)
            elif part.kind in COMPUTE:
                reading.setdefault(part.stage, set()).add(device)
    return not names_versions(schedule) and any(len(reading[s] | lanes) > 1 for s, lanes in stepped.items())


def _read_row(schedule: Schedule, row: Row, found: LaneReads) -> None:
    """Note the newest version before each action of a lane: that of the last step before it.

    The step that adds up the gradients of all replicas may stand in another lane; a replica then has the step's version
    after its own last gradient.
    """
    newest: dict[int, int] = {}
    last_gradients = _last_gradients(schedule, row) if names_versions(schedule) else {}
    for place, action in enumerate(row):
        for part in parts_of(action):
            version = newest.get(part.stage, 0)
            if part.kind is Kind.STEP:
                newest[part.stage] = part.version or 0
            elif part.kind is Kind.F:
                found.forward[part.stage, part.microbatch or 0] = version
            elif part.kind in (Kind.R, Kind.B, Kind.I):  # a backward begins with its recomputation
                found.backward.setdefault((part.stage, part.microbatch or 0), version)
            if (place, part.stage) in last_gradients:
                newest[part.stage] = last_gradients[place, part.stage]


def _last_gradients(schedule: Schedule, row: Row) -> dict[tuple[int, int], int]:
    """Place in the row and stage of the last gradient for each step -> the version that step makes."""
    last = {
        (part.stage, (part.microbatch or 0) // schedule.shape.num_microbatches + 1): place
        for place, action in enumerate(row)
        for part in parts_of(action)
        if part.kind in GRADIENT
    }
    return {(place, stage): version for (stage, version), place in last.items()}
