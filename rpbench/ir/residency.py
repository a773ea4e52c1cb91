"""Residency: how many stage activations each device holds while a schedule runs that moves some of them elsewhere.

Found by a replay in which every computation takes one slot and transfers none: what is seen is the order's own doing.
Where a transfer is still under way when the next forward begins, its device holds one more.
"""

from rpbench.ir.action import COMPUTE, Kind, parts_of
from rpbench.ir.analysis import Analysis
from rpbench.ir.deadlock import in_rounds
from rpbench.ir.schedule import Schedule

_TAKE = frozenset({Kind.F, Kind.FB})
_RELEASE = frozenset({Kind.B, Kind.W, Kind.FB})


def moves_activations(schedule: Schedule) -> bool:
    """Whether activations of bound stages leave their device before their backward."""
    if Kind.STORE not in schedule.kinds:
        return False
    return any(action.kind is Kind.STORE and action.object == "A" for _, _, row in schedule.items() for action in row)


def peak_resident(analysis: Analysis) -> list[int]:
    """The most stage activations each device holds at once, its partners' included.

    A forward and a LOAD:A take room as they begin; a backward makes room as it ends, and so does the FREE:A behind a
    STORE:A. A partner named as peer holds them from the STORE:A to the LOAD:A.

    Raises:
        ScheduleError: if the schedule cannot run.
    """
    index, num_ranks = analysis.index, analysis.schedule.shape.num_ranks
    starts, ends = _slots(analysis)
    changes: list[tuple[int, int, int]] = []  # slot, change, device: what is let go in a slot makes room for others
    for number, action in enumerate(index.actions):
        begin, end, device = starts[number], ends[number], index.device(number)
        lane = index.lanes[index.lane_of[number]].name
        for part in parts_of(action):
            if part.kind in _TAKE:
                changes.append((begin, 1, device))
            if part.kind in _RELEASE:
                changes.append((end, -1, device))
        if action.object == "A":
            if action.kind is Kind.FREE and lane == "d2h":
                changes.append((begin, -1, device))
            elif action.kind is Kind.LOAD:
                changes.append((begin, 1, device))
            if isinstance(action.peer, int):
                changes.append((begin, 1 if action.kind is Kind.STORE else -1, action.peer))
    held, most = [0] * num_ranks, [0] * num_ranks
    for _, change, device in sorted(changes):
        held[device] += change
        most[device] = max(most[device], held[device])
    return most


def _slots(analysis: Analysis) -> tuple[list[int], list[int]]:
    """When each action begins and ends, if every computation takes a slot and nothing else takes time."""
    index = analysis.index
    starts, ends = [0] * len(index.actions), [0] * len(index.actions)
    for number in in_rounds(analysis.rounds):
        before = analysis.producers[number]
        lane = index.lanes[index.lane_of[number]]
        free = ends[number - 1] if number > lane.start else 0
        starts[number] = max([free, *(ends[producer] for producer in before)])
        ends[number] = starts[number] + (index.actions[number].kind in COMPUTE)
    return starts, ends
