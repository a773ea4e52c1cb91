"""The turn: where microbatches come to the last stage and start on their way back.

In 1F1B the last stage's backward directly follows its forward. What the forward computes can then stay for the
backward, which holds no more than running the stage again would; elsewhere that would be one stage's activations
for every microbatch under way.

    device 0   0F0 0F1     0B0 0F2     0B1      0B2
    device 1       1F0 1B0     1F1 1B1      ...
"""

from operator import itemgetter

from rpbench.ir.action import Kind
from rpbench.ir.schedule import Schedule


def turns_at_once(schedule: Schedule) -> bool:
    """Whether, on its lane, every forward of the last stage is followed by nothing but its own backward.

    Only where both directions have the same last stage and sequences are whole.
    """
    shape, partition = schedule.shape, schedule.partition
    if shape.fused or shape.num_parts > 1 or (partition and partition.forward[-1] != partition.backward[-1]):
        return False
    last, top = shape.num_stages - 1, shape.num_backward_stages - 1
    for _, _, row in schedule.items():
        for place in [place for place, pair in enumerate(map(itemgetter(0, 1), row)) if pair == (Kind.F, last)]:
            following = row[place + 1] if place + 1 < len(row) else None
            if following is None or following.kind not in (Kind.B, Kind.I):
                return False
            if (following.stage, following.microbatch) != (top, row[place].microbatch):
                return False
    return not any(
        part.kind is Kind.F and part.stage == last
        for _, _, row in (schedule.items() if Kind.OVERLAP in schedule.kinds else ())
        for action in row
        for part in action.sub
    )
