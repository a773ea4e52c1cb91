"""ZeRO-3, also FSDP: each replica keeps a shard of weights, gradients and optimizer state.

The order is that of `data_parallel`. The weights of a stage are gathered before each forward and backward and dropped
after it; the gather of the next stage runs meanwhile. With 2 devices, 3 stages and 2 microbatches (row of device 0):

    net       0UNSHARD 1UNSHARD 0RESHARD 2UNSHARD 1RESHARD 2UNSHARD 2RESHARD ...
    compute            0F0               1F0               2F0      2B0 ...

`reduce_each_microbatch=false` (no_sync) keeps gradients whole and scatters them once a step. With `offload` each shard
is loaded from the host before its gather, its gradient is stored after the reduce-scatter, and the optimizer runs
there.

Source: Rajbhandari et al., "ZeRO", SC'20, sections 5 and 7; Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully
Sharded Data Parallel", VLDB'23, sections 3 and 4.
"""

from baselines.data_parallel.data_parallel import whole_microbatches, with_steps
from rpbench.ir.schedule import Schedule, Shape
from rpbench.passes.offload import keep_on_ssd, shard
from rpbench.passes.offload import offload as move_to_host
from rpbench.registry import schedule


def fully_sharded(
    order: Schedule, *, prefetch: int, reduce_each_microbatch: bool, offload: bool, ssd: str = "none"
) -> Schedule:
    """The order with steps, gathers, reduce-scatters, and shards that come from the host if they live there, or from
    its SSDs (`rpbench.passes.offload.keep_on_ssd`).
    """
    per = "visit" if reduce_each_microbatch else "step"
    steps = with_steps(order, on_host=range(order.shape.num_stages) if offload else ())
    sharded = shard(steps, parameters="visit", gradients=per, prefetch=prefetch)  # type: ignore[arg-type]
    if not offload:
        return sharded
    moved = move_to_host(sharded, parameters="visit", gradients=per, prefetch=prefetch)  # type: ignore[arg-type]
    return keep_on_ssd(moved, ssd)


@schedule(
    "zero_3",
    source="Rajbhandari et al., SC'20, section 5",
    looped=True,
    lower=fully_sharded,
    searched={"reduce_each_microbatch": (True, False), "offload": (False, True)},
    whole_microbatches=True,
    gathers={},
)
def zero_3(shape: Shape, *, reduce_each_microbatch: bool = True, offload: bool = False) -> Schedule:
    """The order of data parallelism.

    Args:
        reduce_each_microbatch: scatter gradients after every backward; otherwise once a step.
        offload: shards live on the host, and the optimizer works there.
    """
    return whole_microbatches(shape, "zero_3")
