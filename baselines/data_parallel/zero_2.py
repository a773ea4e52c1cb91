"""ZeRO-2: data parallelism in which each replica keeps a shard of the gradients and of the optimizer state.

The order is that of `data_parallel`. A stage's gradient is reduce-scattered after every backward, so that a device
keeps only its shard. It updates its shard of the weights, and the weights are gathered again for the next step. With 2
devices, 2 stages and 2 microbatches:

    device 0   compute   0F0 1F0 1B0 0B0 0STEP@1
               net       0UNSHARD@0 1UNSHARD@0 | 1REDUCE_GRAD 1RESHARD 0REDUCE_GRAD 0RESHARD

A step with one microbatch a device moves 2 (n - 1) / n elements a parameter, each further microbatch (n - 1) / n more.
`reduce_each_microbatch=false` sums gradients on the device and scatters them once a step, which is ZeRO-1.

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
    """The order of data parallelism; gradients are scattered after every backward, as in DeepSpeed, or once a step."""
    return whole_microbatches(shape, "zero_2")
