"""Accumulation: the order in which a stage's gradients are added up, so that a sum never depends on timing.

A lane adds the gradients of a group of microbatches into one buffer, in the order of its row. The groups are then added
in the order of their first microbatch. A group is

    bound weights         a lane's microbatches of a step, or those whose gradients one STORE:G takes home
    streamed weights      a round: each visit of the stage to a device brings one sum home
    reduced every visit   a microbatch of each replica

Where a device has a shard of the head, a microbatch stands twice in a group: for the shard's gradient, then for that of
the stage.

Each replica of a stage adds up its own microbatches; a REDUCE_GRAD of all replicas adds up what they have. Where
gradients are reduced after every visit, a step has several such sums, which are then added in order:

    once a step       (0 + 1) + (2 + 3)        device 0 has microbatches 0 and 1, device 1 has 2 and 3
    every visit       (0 + 2) + (1 + 3)
"""

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Mapping
from itertools import groupby, zip_longest

from rpbench.ir.action import Kind, parts_of
from rpbench.ir.analysis import Analysis
from rpbench.ir.index import GRADIENT, Index
from rpbench.ir.schedule import Schedule, Weights
from rpbench.ir.waits.moves import Transfer
from rpbench.ir.waits.visits import actions_of

Reduction = Mapping[int, tuple[int, ...]]  # device -> its microbatches; both in the order they are added


def reductions_of(analysis: Analysis) -> dict[tuple[int, int], list[Reduction]]:
    """(backward stage, version) -> its sums over replicas, in order; ValueError for several sums of several visits."""
    if Kind.REDUCE_GRAD not in analysis.schedule.kinds:
        return {}
    found: dict[tuple[int, int], dict[int, list[tuple[int, ...]]]] = defaultdict(lambda: defaultdict(list))
    for transfer in analysis.moves.transfers[Kind.REDUCE_GRAD, None]:
        visit = transfer.visits[0]
        found[visit.stage, visit.step + 1][visit.device].append(microbatches_of(analysis.index, transfer))
    return {place: _sums(by_device) for place, by_device in found.items()}


def microbatches_of(index: Index, transfer: Transfer) -> tuple[int, ...]:
    """The microbatches whose gradients of its stage a transfer carries, in the order they are made."""
    return tuple(
        part.microbatch or 0 for visit in transfer.visits for part in actions_of(index, visit) if part.kind in GRADIENT
    )


def _sums(by_device: Mapping[int, list[tuple[int, ...]]]) -> list[Reduction]:
    """The n-th parts of all devices are one sum, in the order of their first microbatches."""
    together = next((own for parts in by_device.values() for own in parts if len(own) > 1), None)
    if together is not None and max(map(len, by_device.values())) > 1:
        raise ValueError(
            f"microbatches {list(together)} of a visit are reduced together, and others of the step "
            "by themselves: sums of sums of sums are not computed; reduce once a step"
        )
    sums = ([part for part in zip(by_device, one, strict=True) if part[1]] for one in zip_longest(*by_device.values()))
    return [dict(sorted(one, key=lambda part: min(part[1]))) for one in sums]


Groups = tuple[tuple[int, ...], ...]  # microbatches, by group


def gradient_groups(analysis: Analysis) -> dict[tuple[int, int], Groups]:
    """(backward stage, version) -> the groups of its gradient; ValueError if they cannot be added up."""
    schedule = analysis.schedule
    _check_moved(schedule)
    starts = sorted(_round_starts(schedule)) if schedule.weights is Weights.STREAMED else []
    found: dict[tuple[int, int], list[tuple[int, ...]]] = {}
    for _, _, row in schedule.items():
        own: dict[tuple[int, int], list[int]] = {}
        for part in (part for action in row for part in parts_of(action)):
            if schedule.shape.tensor_parallel and part.part:
                continue  # all devices do the same, each for its own share
            if part.kind in GRADIENT and part.microbatch is not None:
                version = part.microbatch // schedule.shape.num_microbatches + 1
                own.setdefault((part.stage, version), []).append(part.microbatch)
        for place, microbatches in own.items():  # of one round each, ascending or descending
            rounds = groupby(microbatches, key=lambda microbatch: bisect_right(starts, microbatch))
            found.setdefault(place, []).extend(tuple(group) for _, group in rounds)
    found |= _stored(analysis)
    for place, sums in reductions_of(analysis).items():
        if len(sums) == 1:
            found[place] = list(sums[0].values())
        else:
            found[place] = [tuple(own for microbatches in one.values() for own in microbatches) for one in sums]
    return {place: tuple(sorted(_distinct(place, groups), key=min)) for place, groups in found.items()}


def _check_moved(schedule: Schedule) -> None:
    """Refuse to move gradients to which a shard of the head adds, or to sum those of stages without shards."""
    actions = [action for _, _, row in schedule.items() for action in row]
    reduced = [action for action in actions if action.kind is Kind.REDUCE_GRAD]
    moved = [*(action for action in actions if action.object == "G"), *reduced]
    if schedule.shape.num_head_shards and moved:
        raise ValueError(
            f"{moved[0]}: {schedule.name} has a head in shards, whose gradients are stepped with those of a stage "
            "where they are made; take it out, or use mode=simulate"
        )
    if schedule.shape.separate_cuts and reduced:
        raise ValueError(
            f"{reduced[0]}: the stages of {schedule.name} are cut apart, and no replicas share them; take it out, or "
            "use mode=simulate"
        )


def _distinct(place: tuple[int, int], groups: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """The groups, each microbatch in one; ValueError if its parts are added up apart."""
    num_groups = Counter(microbatch for own in groups for microbatch in set(own))
    apart = next((microbatch for microbatch, number in num_groups.items() if number > 1), None)
    if apart is not None:
        raise ValueError(
            f"the gradient of stage {place[0]} for microbatch {apart} is made in parts that are added up apart: those "
            "of its segments, or of the head, are to be on one device and to leave it together; store gradients once "
            "a step"
        )
    return groups


def _stored(analysis: Analysis) -> dict[tuple[int, int], list[tuple[int, ...]]]:
    """The groups of gradients that STORE:G brings home where weights are bound, or sends on to another device."""
    schedule, index = analysis.schedule, analysis.index
    if Kind.STORE not in schedule.kinds:
        return {}
    window = schedule.shape.num_microbatches
    found: dict[tuple[int, int], list[tuple[int, ...]]] = {}
    for transfer in analysis.moves.transfers[Kind.STORE, "G"] if schedule.weights is Weights.BOUND else ():
        for version, own in groupby(microbatches_of(index, transfer), key=lambda number: number // window + 1):
            found.setdefault((transfer.visits[0].stage, version), []).append(tuple(own))
    for (stage, step), carriers in analysis.moves.handovers.carried.items():
        found[stage, step + 1] = [tuple(mb for transfer in carriers for mb in microbatches_of(index, transfer))]
    for (stage, step), sums in analysis.moves.handovers.grouped.items():
        found[stage, step + 1] = [
            tuple(microbatch for part in one.parts for microbatch in microbatches_of(index, part)) for one in sums
        ]
    return found


def _round_starts(schedule: Schedule) -> set[int]:
    """The first microbatch of every round: of a run of actions of one stage on a device."""
    return {
        min(action.microbatch or 0 for action in run)
        for _, lane, row in schedule.items()
        if lane == "compute"
        for (kind, _), run in groupby(row, key=lambda action: (action.kind, action.stage))
        if kind in (Kind.F, Kind.B, Kind.FB)
    }
