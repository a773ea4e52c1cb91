"""Lane reads: the versions that forward and backward read, told from each lane by itself.

Where every stage steps on the lane that computes it, what is newest when an action runs is decided by what stands
before it in its own lane: no replay of the whole schedule is needed. That makes a second opinion on
`rpbench.ir.checks.versions`, and on what an engine did.
"""

from collections.abc import Iterator
from typing import NamedTuple

from rpbench.ir.action import COMPUTE, Action, Kind, parts_of
from rpbench.ir.checks.excerpt import broken
from rpbench.ir.checks.versions import Versions
from rpbench.ir.index import GRADIENT
from rpbench.ir.policy import ASYNCHRONOUS, KNOWN, Policy
from rpbench.ir.schedule import Row, Schedule, ScheduleError
from rpbench.ir.waits.dependencies import names_versions, version_read

_SAME_AS_FORWARD = frozenset({Policy.STASH, Policy.VERTICAL})


class LaneReads(NamedTuple):
    """(stage, microbatch) -> the version read.

    Args:
        forward: by forward stage.
        backward: by backward stage.
    """

    forward: dict[tuple[int, int], int]
    backward: dict[tuple[int, int], int]

    def of(self, action: Action) -> int:
        """The version that a plain action reads."""
        own = self.forward if action.kind is Kind.F else self.backward
        return own[action.stage, action.microbatch or 0]


def lane_reads(schedule: Schedule) -> LaneReads:
    """The versions every stage reads for every microbatch.

    Raises:
        ScheduleError: if that depends on when other lanes get where, or the schedule cuts sequences in parts.
    """
    found = LaneReads({}, {})
    stepped = _has_steps(schedule)
    if schedule.policy in KNOWN or not stepped:
        for action in _computing(schedule):
            own, microbatch = found.forward if action.kind is Kind.F else found.backward, action.microbatch or 0
            known = version_read(schedule.policy, schedule.shape, microbatch, action.stage) if stepped else None
            own[action.stage, microbatch] = known or 0
        return found
    _check(schedule)
    for _, _, row in schedule.items():
        _read_row(schedule, row, found)
    if schedule.policy is Policy.PREDICT:  # the first microbatch of a step predicts for all of them
        for stage, microbatch in found.forward:
            first = microbatch - microbatch % schedule.shape.num_microbatches
            found.forward[stage, microbatch] = found.forward[stage, first]
    if schedule.policy is Policy.VERTICAL:
        for stage, microbatch in found.forward:
            found.forward[stage, microbatch] = found.forward[0, microbatch]  # the replay sees that it is out by then
    if schedule.policy in _SAME_AS_FORWARD:
        found.backward.update(found.forward)
    return found


def check_settled(schedule: Schedule, versions: Versions) -> None:
    """Where a policy reads what is newest, the lanes say what that is, and a replay finds the same.

    Then an action reads the same version however long anything takes. Where a stage has replicas, its forwards wait
    for the version they name.

    Args:
        versions: as replayed.

    Raises:
        ScheduleError: where time would tell, or at the first action whose version is another.
    """
    if schedule.policy not in ASYNCHRONOUS or not _has_steps(schedule):
        return
    found, named = lane_reads(schedule), names_versions(schedule)
    for number, action in enumerate(action for _, _, row in schedule.items() for action in row):
        for part in parts_of(action):
            if part.kind not in COMPUTE:
                continue
            own, read = found.of(part), versions.of(number, part)
            if named and part.kind is Kind.F and part.version is None:
                rule = f"{part} names no version, and stage {part.stage} has replicas, which step elsewhere"
                raise broken(schedule, rule, [number], way_out=f"write {part}@{own}")
            if read != own:
                rule = f"{part} reads version {read} here, but by what its own lane has stepped it is to read {own}"
                raise broken(schedule, rule, [number])


def _has_steps(schedule: Schedule) -> bool:
    return Kind.STEP in schedule.kinds


def _computing(schedule: Schedule) -> Iterator[Action]:
    for _, _, row in schedule.items():
        for action in row:
            yield from (part for part in parts_of(action) if part.kind in COMPUTE)


def _check(schedule: Schedule) -> None:
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
    """Note what the actions of a lane read, whatever the policy makes of it: the steps that stand before them.

    A replica's lane may lack the step, which adds up what all replicas found; it has that version once its own share
    is done.
    """
    newest: dict[int, int] = {}
    shares = _last_gradients(schedule, row) if names_versions(schedule) else {}
    for place, action in enumerate(row):
        for part in parts_of(action):
            version = newest.get(part.stage, 0)
            if part.kind is Kind.STEP:
                newest[part.stage] = part.version or 0
            elif part.kind is Kind.F:
                found.forward[part.stage, part.microbatch or 0] = version
            elif part.kind in (Kind.R, Kind.B, Kind.I):  # a backward begins with its recomputation
                found.backward.setdefault((part.stage, part.microbatch or 0), version)
            if (place, part.stage) in shares:
                newest[part.stage] = shares[place, part.stage]


def _last_gradients(schedule: Schedule, row: Row) -> dict[tuple[int, int], int]:
    """Place in the row and stage of the last gradient for each step -> the version that step makes."""
    last = {
        (part.stage, (part.microbatch or 0) // schedule.shape.num_microbatches + 1): place
        for place, action in enumerate(row)
        for part in parts_of(action)
        if part.kind in GRADIENT
    }
    return {(place, stage): version for (stage, version), place in last.items()}
