"""Schedules for the engine's tests: any registered one, with a partition of few layers."""

import random

from nearby import nearby
from spared import spared

from rpbench.ir.partition import Partition, split_evenly, symmetric
from rpbench.ir.schedule import Schedule, Shape, Weights
from rpbench.passes.lower import add_steps
from rpbench.registry import entries, entry

# ZenFlow's optimizer is in two places, and no order alone trains: test_zenflow_training.py has it with all it moves.
NAMES = sorted(entries().keys() - {"zenflow"})
# One of each kind of order, placement and policy; the default suite looks at what all have in common on these alone.
KINDS = ("pipedream", "roundpipe", "seq1f1b", "zb_v", "zero_3")
SPARED = spared(NAMES, lambda name: name in KINDS)


def cut(num_layers: int, num_stages: int, rng: random.Random) -> tuple[int, ...]:
    """Layers in stages of any size, some of them empty."""
    places = sorted(rng.choices(range(num_layers + 1), k=num_stages - 1))
    return tuple(stop - start for start, stop in zip([0, *places], [*places, num_layers], strict=True))


def build(
    name: str,
    num_devices: int,
    num_microbatches: int,
    *,
    num_layers: int = 4,
    num_steps: int = 1,
    seed: int | None = None,
    chunks: int = 2,
    stages: tuple[int, int] | None = None,
    steps: bool | None = None,
    **options,
) -> Schedule:
    """A schedule with its partition: evenly cut, or at random places with a `seed`.

    Numbers that a schedule refuses are made larger. `stages` are the numbers of forward and backward stages where
    they differ. STEPs are there where several steps follow each other, or if asked for.
    """
    found, rng = entry(name), random.Random(seed)
    if found.separate_cuts:
        forward, backward = stages or (2, 4)
        top = rng.randint(0, num_layers) if seed is not None and backward > 1 else num_layers // 4
        if backward == 1:
            top = num_layers
        split = split_evenly if seed is None else lambda layers, number: cut(layers, number, rng)
        below = split(num_layers - top, backward - 1) if backward > 1 else ()
        partition = Partition(split(num_layers - top, forward), (*below, top), fused=True)
    else:
        num_devices, chunks, num_microbatches = nearby(name, num_devices, chunks, num_microbatches)
        number = num_devices * chunks
        partition = symmetric(split_evenly(num_layers, number) if seed is None else cut(num_layers, number, rng))
    shape = Shape(
        num_devices,
        len(partition.forward),
        num_microbatches,
        len(partition.backward),
        num_steps=num_steps,
        fused=partition.fused,
    )
    schedule = found.build(shape, **options).with_partition(partition)
    if steps or (steps is None and num_steps > 1):
        schedule = add_steps(schedule, lane="host" if schedule.weights is Weights.STREAMED else "compute")
    return schedule
