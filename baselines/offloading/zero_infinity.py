"""ZeRO-Infinity: shards of weights, gradients and optimizer state live on the host and are loaded when needed.

The order is that of `data_parallel`, the traffic that of `zero_3` with `offload`: every device loads its own shard of a
stage over its own link (bandwidth-centric partitioning: n links at once), all gather it, and gradients go back the same
way. With 2 devices (row of device 0), `prefetch` stages ahead of the current one:

    h2d       0LOAD:P 1LOAD:P 0FREE:P 2LOAD:P ...          1/n of a stage each
    net               0UNSHARD 1UNSHARD 0RESHARD ...       (n - 1)/n of it
    compute                    0F0 1F0 ...
    d2h                                      1STORE:G 1FREE:G 0STORE:G 0FREE:G
    host                                                           1STEP@1 0STEP@1

A device holds only the gathered stages; each microbatch loads 2/n elements a parameter over its device's link.

With `ssd` the optimizer state lives on the host's SSDs, which all devices share: a STEP reads its 12 bytes a parameter,
computes and writes them back, all three at the same time (section 6.2). With `ssd=all` every load reads weights there,
and every STEP writes them.

Source: Rajbhandari et al., "ZeRO-Infinity: Breaking the GPU Memory Wall for Extreme Scale Deep Learning", SC'21,
sections 4 to 6.
"""

from functools import partial

from baselines.data_parallel.data_parallel import whole_microbatches
from baselines.data_parallel.zero_3 import fully_sharded
from rpbench.ir.schedule import ON_SSD, Schedule, Shape
from rpbench.registry import schedule

_lower = partial(fully_sharded, offload=True)


@schedule(
    "zero_infinity",
    source="Rajbhandari et al., SC'21, section 5",
    looped=True,
    lower=_lower,
    searched={"reduce_each_microbatch": (True, False), "ssd": tuple(ON_SSD)},
    whole_microbatches=True,
    gathers={},
)
def zero_infinity(shape: Shape, *, reduce_each_microbatch: bool = True, ssd: str = "none") -> Schedule:
    """The order of data parallelism.

    Args:
        reduce_each_microbatch: scatter gradients and store them after every backward; otherwise once a step.
        ssd: what lives on the host's SSDs: none, optimizer (its state), or all (weights as well).
    """
    return whole_microbatches(shape, "zero_infinity")
