"""Accumulation: in which order a stage's gradients are added up, so that a sum never depends on who was faster.

A group is a sequence of microbatches whose gradients one lane adds into one buffer, in the order of its row; the
groups are then added in the order of their first microbatch. Where weights are bound, a lane's microbatches of a
step are one group. Where they are streamed, a group is a round: each visit of the stage to a device brings one
sum home.
"""

from collections.abc import Iterator
from itertools import groupby

from rpbench.ir.action import Action, Kind, parts_of
from rpbench.ir.index import GRADIENT
from rpbench.ir.schedule import Schedule, Weights

Groups = tuple[tuple[int, ...], ...]  # microbatches, by group


def gradient_groups(schedule: Schedule) -> dict[tuple[int, int], Groups]:
    """(backward stage, version of the step) -> the groups that make the step's gradient."""
    cuts = _round_starts(schedule) if schedule.weights is Weights.STREAMED else frozenset()
    found: dict[tuple[int, int], list[tuple[int, ...]]] = {}
    for _, _, row in schedule.items():
        own: dict[tuple[int, int], list[int]] = {}
        for stage, microbatch in _gradients(row, schedule):
            own.setdefault((stage, microbatch // schedule.shape.num_microbatches + 1), []).append(microbatch)
        for place, microbatches in own.items():
            found.setdefault(place, []).extend(_cut(microbatches, cuts))
    return {place: tuple(sorted(groups, key=min)) for place, groups in found.items()}


def _gradients(row: tuple[Action, ...], schedule: Schedule) -> Iterator[tuple[int, int]]:
    for action in row:
        for part in parts_of(action):
            if schedule.shape.tensor_parallel and part.part:
                continue  # all devices do the same, each for its own share
            if part.kind in GRADIENT and part.microbatch is not None:
                yield part.stage, part.microbatch


def _round_starts(schedule: Schedule) -> frozenset[int]:
    """First microbatches of rounds: wherever the unbroken run of one stage on a device begins, for any stage."""
    return frozenset(
        next(run).microbatch or 0
        for _, lane, row in schedule.items()
        if lane == "compute"
        for (kind, _), run in groupby(row, key=lambda action: (action.kind, action.stage))
        if kind in (Kind.F, Kind.B, Kind.FB)
    )


def _cut(microbatches: list[int], starts: frozenset[int]) -> Iterator[tuple[int, ...]]:
    group: list[int] = []
    for microbatch in microbatches:
        if group and microbatch in starts:
            yield tuple(group)
            group = []
        group.append(microbatch)
    yield tuple(group)
