"""Side by side: the work of a partition with every dependency within one lane, so that nobody ever waits.

Device d takes every p-th microbatch, stage after stage as in a round; the optimizer's steps are dealt in turn. With
2 devices, 2 stages and 4 microbatches:

    device 0   0F0 0F2 1F0 1F2 1B0 1B2 0B0 0B2 0STEP
    device 1   0F1 0F3 1F1 1F3 1B1 1B3 0B1 0B3 1STEP

Every device needs all weights, which is why it is no pipeline: it shows what the same actions take without one.
"""

from collections.abc import Iterator

from rpbench.ir.action import Action, Kind
from rpbench.ir.partition import Partition
from rpbench.ir.schedule import Schedule, Shape


def side_by_side(partition: Partition, num_devices: int, num_microbatches: int, num_steps: int) -> Schedule:
    """The same actions as those of a pipeline with this partition, steps included."""
    shape = Shape(
        num_devices,
        len(partition.forward),
        num_microbatches,
        len(partition.backward),
        num_steps=num_steps,
        fused=partition.fused,
    )
    rows = tuple(tuple(_row(shape, device)) for device in range(num_devices))
    return Schedule(shape, rows, name="side_by_side").with_partition(partition)


def _row(shape: Shape, device: int) -> Iterator[Action]:
    top = shape.num_backward_stages - 1
    for step in range(shape.num_steps):
        window = range(step * shape.num_microbatches, (step + 1) * shape.num_microbatches)
        own = window[device :: shape.num_ranks]
        jobs = [(Kind.F, stage) for stage in range(shape.num_stages)]
        jobs.append((Kind.FB if shape.fused else Kind.B, top))
        jobs += [(Kind.B, stage) for stage in range(top - 1, -1, -1)]
        yield from (Action(kind, stage, microbatch) for kind, stage in jobs for microbatch in own)
        for stage in range(device, shape.num_backward_stages, shape.num_ranks):
            yield Action(Kind.STEP, stage, version=step + 1)
