"""ZeRO-Offload: the optimizer runs on the host; gradients go there as they are made, new weights come back.

The order is that of `data_parallel`, sharded as in `zero_2`: each device keeps 16-bit weights, stores its shard of a
stage's gradient after every backward, and loads its shard of the new weights before the next step, when all devices
gather them. With 1 device, 3 stages and 1 microbatch a step:

    compute   0F0 1F0 2F0 2B0 1B0 0B0                         0F1 1F1 2F1 ...
    d2h                       2STORE:G 1STORE:G 0STORE:G
    host                               2STEP@1 1STEP@1 0STEP@1
    h2d                                                 0LOAD:P@1 1LOAD:P@1 2LOAD:P@1

`delayed_update` (section 5.2): step t + 1 begins on the weights of step t - 1 while the host works on step t.

Source: Ren et al., "ZeRO-Offload: Democratizing Billion-Scale Model Training", ATC'21, sections 4 and 5; `share` as in
DeepSpeed's ZeRO-Offload++ (ratio).
"""

from baselines.data_parallel.data_parallel import whole_microbatches, with_steps
from rpbench.ir.policy import Policy
from rpbench.ir.schedule import Schedule, Shape
from rpbench.passes.offload import offload, shard
from rpbench.registry import schedule


def _lower(order: Schedule, *, prefetch: int, delayed_update: bool, share: float) -> Schedule:
    stages = order.shape.num_stages
    on_host = range(stages - round(share * stages), stages)
    sharded = with_steps(order, on_host)
    if order.shape.num_ranks > 1:
        sharded = shard(sharded, parameters="step", gradients="visit")
    return offload(sharded, gradients="visit", parameters="step", stages=on_host) if on_host else sharded


@schedule(
    "zero_offload",
    source="Ren et al., ATC'21, sections 4 and 5",
    looped=True,
    lower=_lower,
    searched={"share": (1.0, 0.75, 0.5, 0.25)},
    late={"delayed_update": True},
    whole_microbatches=True,
)
def zero_offload(shape: Shape, *, delayed_update: bool = False, share: float = 1.0) -> Schedule:
    """The order of data parallelism, one step stale if asked for.

    Args:
        delayed_update: the optimizer's work overlaps the next step, which reads weights one step old.
        share: of the stages whose optimizer lives on the host, from 0 (none: ZeRO-2) to 1.
    """
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
        raise ValueError(f"schedule.share={share}: the part whose optimizer is on the host, from 0 to 1; 1 is all")
    if delayed_update and share < 1:
        raise ValueError(
            f"schedule.delayed_update=true with schedule.share={share}: what the devices update themselves is never "
            "late; take schedule.share=1, or schedule.delayed_update=false"
        )
    return whole_microbatches(shape, "zero_offload", Policy.DELAYED if delayed_update else Policy.FLUSH)
