"""The turn: where microbatches come to the last stage and start on their way back.

In 1F1B the last stage's backward directly follows its forward. What the forward computes can then stay for the
backward, which holds no more than running the stage again would; elsewhere that would be one stage's activations
for every microbatch under way.

    device 0   0F0 0F1     0B0 0F2     0B1      0B2
    device 1       1F0 1B0     1F1 1B1      ...
"""

from rpbench.ir.action import Kind, parts_of
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
        for action, following in zip(row, (*row[1:], None), strict=True):
            if not any(part.kind is Kind.F and part.stage == last for part in parts_of(action)):
                continue
            if action.sub or following is None or following.kind not in (Kind.B, Kind.I):
                return False
            if (following.stage, following.microbatch) != (top, action.microbatch):
                return False
    return True
