"""ZenFlow: the device steps the columns with the largest gradients at once; the host steps the rest some steps late.

As in `zero_offload`, masters and moments are on the host, and gradients go there. But a device keeps masters and
moments of the fraction `topk` of the columns of each matrix, those with the largest sums of absolute gradients, and of
every parameter that is not a matrix. It steps these as soon as a step's gradient is complete. The gradients of the
other columns go to the host, which sums them over `update_interval` steps (S) and steps once, beside the next S steps.
The new weights reach the device at the end of those. With 1 device, 2 stages, 1 microbatch a step and S = 2:

    compute   0F0 1F0 1B0 0B0 1STEP@1 0STEP@1 | 0F1 1F1 1B1 0B1 1STEP@2 0STEP@2 | ... | 0F3 1F3 1B3 0B3 1STEP@4 0STEP@4
    d2h                     1STORE:G 0STORE:G                 1STORE:G 0STORE:G
    host                                                                          1STEP_REST@2 0STEP_REST@2 ...
    h2d                                                                                           0LOAD:P@4 1LOAD:P@4

So important columns are never late, and the rest is S to 2 S - 1 steps late. `overlap=false` waits for the host at the
end of every S steps: 0 to S - 1 steps late. The first `num_warmup_steps` steps are those of `zero_offload`. With
`select_interval` columns are chosen anew every so many steps: then the device's moments start at 0, and masters are
made from the 16-bit weights.

Beside its weights and gradients a device holds 12 topk bytes a parameter, divided over all devices.

Source: ZenFlow in DeepSpeed (runtime/zenflow), after a description of that code. Ours: the boundaries at which the
device waits, before a choice of columns and at the end of a run (`rpbench.ir.policy`).
"""

from dataclasses import replace

from baselines.data_parallel.data_parallel import own_stages, whole_microbatches, with_steps
from rpbench.ir.action import Action, Kind
from rpbench.ir.policy import LateRest, Policy, boundaries, versions_stored
from rpbench.ir.schedule import Schedule, Shape
from rpbench.passes.lower import each_row
from rpbench.passes.offload import shard
from rpbench.registry import schedule


def _lower(
    order: Schedule,
    *,
    prefetch: int,
    topk: float,
    update_interval: int,
    select_interval: int,
    overlap: bool,
    num_warmup_steps: int,
) -> Schedule:
    """The order with the steps of devices and host, and what moves between them."""
    rule = order.late_rest
    assert rule is not None
    first = 1 + rule.num_warmup_steps  # in the warm-up the host steps all columns
    stepped = each_row(
        with_steps(order),
        lambda _, row: (each for each in row if each.kind is not Kind.STEP or (each.version or 0) >= first),
    )
    if order.shape.num_ranks > 1:
        stepped = shard(stepped, parameters="step", gradients="visit")
    rows = []
    for device, lanes in enumerate(stepped.lanes):
        moved = {
            "h2d": tuple(
                Action(Kind.LOAD, stage, version=end.version, object="P")
                for end in boundaries(rule, order.shape.num_steps)
                if end.brings is not None
                for stage in range(order.shape.num_stages)
            ),
            "d2h": tuple(
                Action(Kind.STORE, stage, object="G")
                for _ in versions_stored(rule, order.shape.num_steps)
                for stage in reversed(range(order.shape.num_stages))
            ),
            "host": tuple(
                Action(Kind.STEP if end.version < first else Kind.STEP_REST, stage, version=end.version)
                for end in boundaries(rule, order.shape.num_steps)
                for stage in own_stages(order.shape, device)
            ),
        }
        rows.append({**lanes, **{lane: row for lane, row in moved.items() if row}})
    return replace(stepped, rows=tuple(rows))


@schedule("zenflow", source="DeepSpeed, runtime/zenflow", looped=True, lower=_lower, whole_microbatches=True)
def zenflow(
    shape: Shape,
    *,
    topk: float = 0.1,  # the fraction of the columns that devices step, from 0 to 1
    update_interval: int = 4,  # steps of which the host adds up gradients before it steps
    select_interval: int = 0,  # steps between two choices of columns, a multiple of `update_interval`; 0 for one choice
    overlap: bool = True,  # the host steps beside the next steps of the device
    num_warmup_steps: int = 0,  # first steps that the host makes of all columns, and that are waited for
) -> Schedule:
    """The order of data parallelism."""
    rule = LateRest(topk, update_interval, select_interval, overlap, num_warmup_steps)
    return replace(whole_microbatches(shape, "zenflow", Policy.SELECTIVE), late_rest=rule)
