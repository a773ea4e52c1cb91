"""Mobius: more stages than devices, all kept on the host and streamed to the devices in rotation.

Stage s runs on device s mod p for all microbatches of a step, first forward and later backward; meanwhile the weights
of the device's next stage are loaded. With 2 devices, 4 stages and 3 microbatches (weights of device 0 on lane h2d):

    h2d        0LOAD:P 2LOAD:P         0FREE:P 2LOAD:P         2FREE:P 0LOAD:P ...
    device 0           0F0 0F1 0F2     2F0 2F1 2F2             2B0 2B1 2B2     0B0 0B1 0B2
    device 1               1F0 1F1 1F2     3F0 3F1 3F2 3B0 3B1 3B2     1B0 1B1 1B2

The bubble is that of `looped_bfs`; a device holds the current stage and the next one. Cross mapping: neighbouring
devices share a root complex, and they load shortly after one another. With `num_root_complexes=c` consecutive stages go
to different root complexes, device order 0, p/c, 2p/c, ..., 1, p/c + 1, ... With p = 4 and c = 2: 0 2 1 3.

Boundary tensors and the inputs kept for recomputation go through the host. A separate program chooses the cut,
`partition=mobius` (`rpbench/plan/mobius.py`).

Source: Feng et al., "Mobius: Fine Tuning Large-Scale Models on Commodity GPU Servers", ASPLOS'23, from its abstract and
descriptions of it.
"""

from rpbench.ir.action import Action, Kind
from rpbench.ir.schedule import Row, Schedule, Shape, Weights
from rpbench.passes.lower import add_steps
from rpbench.passes.offload import stream
from rpbench.registry import schedule


def _lower(order: Schedule, *, prefetch: int, num_root_complexes: int) -> Schedule:
    return stream(add_steps(order, lane="host"), prefetch=prefetch, activations=True)


@schedule(
    "mobius",
    source="Feng et al., ASPLOS'23",
    looped=True,
    lower=_lower,
    searched={"num_root_complexes": lambda num_ranks, _: [n for n in (1, 2, 4) if num_ranks % n == 0]},
)
def mobius(shape: Shape, *, num_root_complexes: int = 1) -> Schedule:
    """Deal the stages to the devices in rotation, each for all microbatches of a step.

    Neighbouring devices of a root complex share a way to the host; with one, stages are dealt in device order.
    """
    p = shape.num_ranks
    if type(num_root_complexes) is not int or num_root_complexes < 1 or p % num_root_complexes:
        raise ValueError(
            f"schedule.num_root_complexes={num_root_complexes}: {p} devices must be a multiple of it; "
            "take 1 to deal stages in device order"
        )
    size = p // num_root_complexes
    devices = [first + number for number in range(size) for first in range(0, p, size)]
    rows = [_row(shape, devices.index(device)) for device in range(p)]
    return Schedule(shape, tuple(rows), name="mobius", weights=Weights.STREAMED)


def _row(shape: Shape, first_stage: int) -> Row:
    stages = range(first_stage, shape.num_stages, shape.num_ranks)
    return tuple(
        Action(kind, stage, microbatch)
        for microbatches in shape.batches
        for kind, order in ((Kind.F, stages), (Kind.B, reversed(stages)))
        for stage in order
        for microbatch in microbatches
    )
