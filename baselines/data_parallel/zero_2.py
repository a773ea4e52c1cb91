"""ZeRO-2: data parallelism whose replicas keep a shard each of the gradients and of the optimizer state.

The order is that of `data_parallel`. A stage's gradient is reduced and scattered after every backward, so that only a
shard of it stays; its owner updates its shard of the weights, which are gathered again for the next step. With 2
devices, 2 stages and 2 microbatches:

    device 0   compute   0F0 1F0 1B0 0B0 0STEP@1
               net       0UNSHARD@0 1UNSHARD@0 | 1REDUCE_GRAD 1RESHARD 0REDUCE_GRAD 0RESHARD

With n devices a device holds 2 + 14/n bytes a parameter and what is on its way; a step with one microbatch a device
moves 2 (n - 1) / n elements a parameter, each further microbatch (n - 1) / n more. `reduce_each_microbatch=false` adds
gradients up on the device and scatters once a step, which is ZeRO-1: 2 (n - 1) / n however many microbatches, but
4 + 12/n bytes.

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC'20, sections
5 and 7.
"""

from baselines.data_parallel.data_parallel import whole_microbatches, with_steps
from rpbench.ir.schedule import Schedule, Shape
from rpbench.passes.offload import shard
from rpbench.registry import schedule


def _lower(order: Schedule, *, prefetch: int, reduce_each_microbatch: bool) -> Schedule:
    gradients = "visit" if reduce_each_microbatch else "step"
    return shard(with_steps(order), parameters="step", gradients=gradients)  # type: ignore[arg-type]


@schedule(
    "zero_2",
    source="Rajbhandari et al., SC'20, section 5",
    looped=True,
    lower=_lower,
    searched={"reduce_each_microbatch": (True, False)},
    whole_microbatches=True,
)
def zero_2(shape: Shape, *, reduce_each_microbatch: bool = True) -> Schedule:
    """The order of data parallelism.

    Args:
        reduce_each_microbatch: scatter gradients after every backward, as DeepSpeed does.
    """
    return whole_microbatches(shape, "zero_2")
