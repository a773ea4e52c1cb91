"""Reductions: the sums over replicas that a step's gradient is made of, found from REDUCE_GRAD.

Each replica of a stage adds up its own microbatches; a REDUCE_GRAD of all replicas adds up what they have. Where
gradients are reduced after every visit, a step has several such sums, which are then added in order:

    once a step       (0 + 1) + (2 + 3)        device 0 has microbatches 0 and 1, device 1 has 2 and 3
    every visit       (0 + 2) + (1 + 3)
"""

from collections import defaultdict
from collections.abc import Mapping

from rpbench.ir.action import Kind
from rpbench.ir.analysis import Analysis
from rpbench.ir.index import GRADIENT, Index
from rpbench.ir.waits.moves import Transfer
from rpbench.ir.waits.visits import actions_of

Reduction = Mapping[int, tuple[int, ...]]  # device -> its microbatches, in the order they are added; devices likewise


def reductions_of(analysis: Analysis) -> dict[tuple[int, int], list[Reduction]]:
    """(backward stage, version of the step) -> its sums over replicas, in order; none of what is not reduced.

    Raises:
        ValueError: if several of a step have more than a microbatch of a replica each.
    """
    if Kind.REDUCE_GRAD not in analysis.schedule.kinds:
        return {}
    found: dict[tuple[int, int], list[dict[int, tuple[int, ...]]]] = defaultdict(list)
    num_of: dict[tuple[int, int, int], int] = defaultdict(int)  # (stage, version, device) -> sums so far
    for transfer in analysis.moves.transfers[Kind.REDUCE_GRAD, None]:
        visit = transfer.visits[0]
        place = visit.stage, visit.step + 1
        number = num_of[(*place, visit.device)]
        num_of[(*place, visit.device)] += 1
        if number == len(found[place]):
            found[place].append({})
        found[place][number][visit.device] = microbatches_of(analysis.index, transfer)
    return {place: [_ordered(one, several=len(sums) > 1) for one in sums] for place, sums in found.items()}


def microbatches_of(index: Index, transfer: Transfer) -> tuple[int, ...]:
    """The microbatches whose gradients of its stage a transfer carries, in the order they are made."""
    return tuple(
        part.microbatch or 0 for visit in transfer.visits for part in actions_of(index, visit) if part.kind in GRADIENT
    )


def _ordered(parts: Mapping[int, tuple[int, ...]], *, several: bool) -> Reduction:
    if several and any(len(microbatches) > 1 for microbatches in parts.values()):
        raise ValueError(
            f"microbatches {list(next(iter(parts.values())))} of a visit are reduced together, and others of the step "
            "by themselves: sums of sums of sums are not computed; reduce once a step"
        )
    return dict(sorted(parts.items(), key=lambda part: min(part[1])))
