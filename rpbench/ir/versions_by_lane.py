"""Lane reads: the versions that forward and backward read, told from each lane by itself.

Where every stage steps on the lane that computes it, what is newest when an action runs is decided by what stands
before it in its own lane: no replay of the whole schedule is needed. That makes a second opinion on
`rpbench.ir.versions`, and on what an engine did.
"""

from collections.abc import Iterator
from typing import NamedTuple

from rpbench.ir.action import COMPUTE, Action, Kind, parts_of
from rpbench.ir.dependencies import names_versions
from rpbench.ir.index import GRADIENT
from rpbench.ir.policy import STEPS_BEHIND, Policy
from rpbench.ir.schedule import Row, Schedule, ScheduleError

_SAME_AS_FORWARD = frozenset({Policy.STASH, Policy.VERTICAL})


class LaneReads(NamedTuple):
    """(stage, microbatch) -> the version read.

    Args:
        forward: by forward stage.
        backward: by backward stage.
    """

    forward: dict[tuple[int, int], int]
    backward: dict[tuple[int, int], int]


def lane_reads(schedule: Schedule) -> LaneReads:
    """The versions every stage reads for every microbatch.

    Raises:
        ScheduleError: if that depends on when other lanes get where, or the schedule cuts sequences in parts.
    """
    behind = STEPS_BEHIND.get(schedule.policy)
    found = LaneReads({}, {})
    stepped = _has_steps(schedule)
    if behind is not None or not stepped:
        for action in _computing(schedule):
            own = found.forward if action.kind is Kind.F else found.backward
            step = (action.microbatch or 0) // schedule.shape.num_microbatches
            own[action.stage, action.microbatch or 0] = max(0, step - behind) if stepped and behind is not None else 0
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
            found.forward[stage, microbatch] = found.forward[0, microbatch]
    if schedule.policy in _SAME_AS_FORWARD:
        found.backward.update(found.forward)
    return found


def _has_steps(schedule: Schedule) -> bool:
    return Kind.STEP in schedule.kinds


def _computing(schedule: Schedule) -> Iterator[Action]:
    for _, _, row in schedule.items():
        for action in row:
            yield from (part for part in parts_of(action) if part.kind in COMPUTE)


def _check(schedule: Schedule) -> None:
    lanes = {name for _, name, row in schedule.items() if any(action.kind is Kind.STEP for action in row)}
    if schedule.shape.separate_cuts or schedule.shape.num_parts > 1 or lanes != {"compute"}:
        raise ScheduleError(
            f"policy {schedule.policy.value} reads the newest version of a stage, which only a stage that steps on its "
            "own compute lane, in one cut and whole sequences, settles by itself; take policy flush or delayed"
        )


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
            elif part.kind in (Kind.B, Kind.I):
                found.backward[part.stage, part.microbatch or 0] = version
            if place in shares:
                newest[part.stage] = shares[place]


def _last_gradients(schedule: Schedule, row: Row) -> dict[int, int]:
    """Place in the row of the last gradient for each step -> the version that step makes."""
    last = {
        (action.stage, (action.microbatch or 0) // schedule.shape.num_microbatches + 1): place
        for place, action in enumerate(row)
        if action.kind in GRADIENT
    }
    return {place: version for (_, version), place in last.items()}
