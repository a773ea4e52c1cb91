"""Data parallelism: every device holds the whole model and runs its part of the microbatches; gradients are summed.

A device runs a microbatch forward and backward before the next one. It sums the gradients of its own microbatches, and
an all-reduce after the last one of a step sums those of all devices in device order. With 3 devices, 2 stages and 6
microbatches:

    device 0   0F0 1F0 1B0 0B0 0F1 1F1 1B1 0B1      net   1REDUCE_GRAD 0REDUCE_GRAD
    device 1   0F2 1F2 1B2 0B2 0F3 1F3 1B3 0B3      net   1REDUCE_GRAD 0REDUCE_GRAD
    device 2   0F4 1F4 1B4 0B4 0F5 1F5 1B5 0B5      net   1REDUCE_GRAD 0REDUCE_GRAD

A stage is the unit of reduction (a bucket); its all-reduce runs beside the backward of the stages below. One STEP
stands for the steps of all replicas, which are equal bit for bit.

Every method whose devices run whole microbatches has this order: `zero_2`, `zero_3`, `zero_offload` and `zero_infinity`
only move other things beside it.

Source: Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB'20, section 3.
"""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace

from rpbench.ir.action import Action, Kind
from rpbench.ir.policy import Policy
from rpbench.ir.schedule import Row, Schedule, Shape, check_even, step_rows
from rpbench.passes.offload import shard
from rpbench.registry import schedule


def whole_microbatches(shape: Shape, name: str, policy: Policy = Policy.FLUSH) -> Schedule:
    """Device d of p runs microbatches d m/p to (d + 1) m/p - 1 of every step, each through all stages and back;
    ValueError if they cannot be dealt evenly.
    """
    check_even(name, shape, "replicas")
    everywhere = (tuple(range(shape.num_ranks)),) * shape.num_stages
    rows = step_rows(shape, lambda device, batch: through_all(shape.num_stages, own_part(shape, device, batch)))
    return Schedule(shape, rows, name=name, policy=policy, placement=everywhere)


def own_part(shape: Shape, device: int, batch: range) -> range:
    """A device's microbatches of a step: as many in a row as every other device has."""
    each = shape.num_microbatches // shape.num_ranks
    return batch[device * each : (device + 1) * each]


def through_all(num_stages: int, microbatches: Iterable[int], part: int = 0) -> Iterator[Action]:
    """Each microbatch in turn: its forwards through all stages, then its backwards."""
    stages = range(num_stages)
    both_ways = [(Kind.F, stage) for stage in stages] + [(Kind.B, stage) for stage in reversed(stages)]
    return (Action(kind, stage, microbatch, part) for microbatch in microbatches for kind, stage in both_ways)


def with_steps(order: Schedule, on_host: Collection[int] = ()) -> Schedule:
    """The order with a STEP of every stage: on device s mod p after its work of the step, or on its host lane.

    Each device updates its own shard of the optimizer state; one STEP stands for all shards. A device has 1/p of
    the stages' steps in its lane, which is as much work as its own shard of every stage.
    """
    shape = order.shape
    rows: list[dict[str, Row]] = []
    for device in range(shape.num_ranks):
        own = own_stages(shape, device)
        per_step = len(order.compute(device)) // shape.num_steps
        compute, host = list[Action](), list[Action]()
        for step in range(shape.num_steps):
            compute += order.compute(device)[step * per_step : (step + 1) * per_step]
            for stage in own:
                (host if stage in on_host else compute).append(Action(Kind.STEP, stage, version=step + 1))
        rows.append({"compute": tuple(compute), **({"host": tuple(host)} if host else {})})
    return replace(order, rows=tuple(rows))


def own_stages(shape: Shape, device: int) -> list[int]:
    """The stages whose steps stand on a device's lanes, last first."""
    return [stage for stage in reversed(range(shape.num_stages)) if stage % shape.num_ranks == device]


@schedule(
    "data_parallel",
    source="Li et al., VLDB'20, section 3",
    looped=True,
    lower=lambda order, *, prefetch: shard(with_steps(order), parameters=None, gradients="step"),
    whole_microbatches=True,
)
def data_parallel(shape: Shape) -> Schedule:
    """A device holds the inputs of all stages of one microbatch."""
    return whole_microbatches(shape, "data_parallel")
