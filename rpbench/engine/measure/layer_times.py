"""Layer times: what each layer takes on this machine, measured on the engine itself.

Each layer is a stage of its own, so that its forward, recomputation, backward and step are actions of the engine. As
many threads run as there are devices, because devices share the machine in a run too. Times are processor time, to
which other programs add nothing.

No device waits: every dependency lies within one lane. Device d takes every p-th microbatch, stage after stage, and
every p-th optimizer step. With 2 devices, 2 stages and 4 microbatches:

    device 0   0F0 0F2 1F0 1F2 1B0 1B2 0B0 0B2 0STEP
    device 1   0F1 0F3 1F1 1F3 1B1 1B3 0B1 0B3 1STEP

Every device needs all weights: it is no pipeline, and shows what the same actions take without one.
"""

from collections.abc import Iterator
from dataclasses import replace
from statistics import median

from rpbench.cost.table import CostTable, LayerTimes
from rpbench.engine.backends.threads import CpuBackend
from rpbench.engine.executor import execute
from rpbench.engine.training import Settings, Training
from rpbench.engine.workload import Workload
from rpbench.ir.action import Action, Kind
from rpbench.ir.partition import Partition, symmetric
from rpbench.ir.schedule import Schedule, Shape
from rpbench.passes.lower import split_backward


def side_by_side(partition: Partition, num_devices: int, num_microbatches: int, num_steps: int) -> Schedule:
    """A schedule with the actions of a pipeline of this partition, steps included, and no waits between devices."""
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


# Steps of a profile; the first one warms up and is discarded.
NUM_STEPS = 4


def time_layers(
    workload: Workload, settings: Settings, num_devices: int, microbatches_per_device: int = 3
) -> LayerTimes:
    """Median seconds of one microbatch through each layer, over all steps but the first; the modules are not changed.

    The embedding is counted with the first layer. Gradients' sums are part of the backward.
    """
    head = len(workload.modules) - 2
    partition = symmetric((*[1] * head, 0))  # the head alone
    medians = time_stages(workload, settings, partition, num_devices, microbatches_per_device)
    layers = range(head)
    return LayerTimes(
        forward=tuple(medians[Kind.F, layer][1] for layer in layers),
        recompute=tuple(medians[Kind.B, layer][0] for layer in layers),
        backward=tuple(medians[Kind.B, layer][1] for layer in layers),
        head_forward=medians[Kind.F, head][1],
        head_backward=medians[Kind.B, head][1],
        step=tuple(medians[Kind.STEP, layer][1] for layer in layers),
        head_step=medians[Kind.STEP, head][1],
    )


def time_stages(
    workload: Workload,
    settings: Settings,
    partition: Partition,
    num_devices: int,
    microbatches_per_device: int,
    *,
    in_halves: bool = False,
) -> dict[tuple[Kind, int], tuple[float, float]]:
    """(kind, stage) -> median seconds of what runs ahead, and of the rest; backwards in halves if asked for."""
    num_microbatches = num_devices * microbatches_per_device
    schedule = side_by_side(partition, num_devices, num_microbatches, NUM_STEPS)
    if in_halves:
        schedule = split_backward(schedule)
    training = Training(replace(workload, num_microbatches=num_microbatches), schedule, settings)
    program = training.program(CostTable({}), real_time=True)
    with CpuBackend() as backend:
        execute(program, training.handlers, backend)
        samples: dict[tuple[Kind, int], list[tuple[float, float]]] = {}
        for action, pre, main in zip(program.actions, backend.pre_cpu_s, backend.main_cpu_s, strict=True):
            if (action.version or 0) > 1 or (action.microbatch or 0) >= num_microbatches:  # of a step after the first
                samples.setdefault((action.kind, action.stage), []).append((pre, main))
    return {
        place: (median(pre for pre, _ in found), median(main for _, main in found)) for place, found in samples.items()
    }
