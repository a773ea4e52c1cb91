"""Varuna: an order made once by a rule that recomputes just before a gradient arrives.

On slots of one forward, a rank takes the first of these that is ready: the second half of a backward, a backward, a
recomputation, a forward. The last stage runs its backward at once. A backward that is half done queues the
recomputation of the stage below, so that it has ended when the gradient arrives. A backward takes two slots, a
recomputation one. With 3 ranks and 4 microbatches:

    rank 0   0F0 0F1 0F2 0F3 0R0 0B0 0R1 0B1 0R2 0B2 0R3 0B3
    rank 1   1F0 1F1 1F2 1R0 1B0 1R1 1B1 1R2 1B2 1F3 1R3 1B3
    rank 2   2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3

A forward keeps only its input, so ranks may run far ahead: up to m microbatches are in flight. The order is fixed.

Source: Athlur et al., "Varuna: Scalable, Low-cost Training of Massive Deep Learning Models", EuroSys'22; the rule as in
its released code. Morphing, which chooses depth and width for the devices that are left, is a failure policy
(`rpbench.failures.morphing`).
"""

from collections import deque

from rpbench.ir.action import Kind
from rpbench.ir.schedule import Schedule, Shape, check_one_stage, looped_placement
from rpbench.ordering.list_order import Pass, Rows, repeat_steps
from rpbench.registry import schedule

SLOTS = {Kind.F: 1, Kind.R: 1, Kind.B: 2}


@schedule("varuna", source="Athlur et al., EuroSys'22", recompute_ahead=True)
def varuna(shape: Shape) -> Schedule:
    """Backwards first, then recomputations, then forwards."""
    check_one_stage("varuna", shape)
    rows = repeat_steps(shape, _by_rule(shape.num_ranks, shape.num_microbatches))
    return Schedule(shape, rows, name="varuna", placement=looped_placement(shape))


def _by_rule(p: int, m: int) -> Rows:
    """Every rank's passes of a step."""
    rows: list[list[Pass]] = [[] for _ in range(p)]
    queues = [{kind: deque[int]() for kind in (Kind.B, Kind.R, Kind.F)} for _ in range(p)]
    queues[0][Kind.F].extend(range(m))
    left = [0] * p  # slots that what a rank runs still takes
    while any(left) or any(queue for ready in queues for queue in ready.values()):
        for rank, ready in enumerate(queues):
            kind = next((kind for kind, queue in ready.items() if queue), None)
            if not left[rank] and kind is not None:
                rows[rank].append(Pass(kind, rank, ready[kind].popleft()))
                left[rank] = SLOTS[kind]
        working = [rank for rank in range(p) if left[rank]]
        for rank in working:
            left[rank] -= 1
            kind, _, microbatch = rows[rank][-1]
            if kind is Kind.B and left[rank]:  # half of it is over: time to recompute below
                queues[rank - 1][Kind.R].extend([microbatch] * (rank > 0))
            elif kind is Kind.F and rank < p - 1:
                queues[rank + 1][Kind.F].append(microbatch)
            elif kind is not Kind.B:
                queues[rank][Kind.B].append(microbatch)
    return rows
