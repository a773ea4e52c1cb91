"""Interlaced pipeline: the head is cut over all ranks, which run it together between their forwards and backwards.

S is what every rank does for a microbatch that has left the last stage: forward and backward of the logits of its part
of the vocabulary, in one go (HF and HB here). All ranks run it together, so the order is made around it: rank r begins
with floor(3p/2) - r forwards, half a pipeline more than 1F1B, so that it has heads to run while it waits for its first
gradient. With 3 ranks and 5 microbatches (S for HF, HB):

    rank 0   F0 F1 F2 F3 S0 S1 S2 B0 F4 S3 B1 S4 B2 B3 B4
    rank 1   F0 F1 F2 S0 S1 B0 S2 F3 B1 S3 F4 B2 S4 B3 B4
    rank 2   F0 F1 S0 B0 S1 B1 F2 S2 B2 F3 S3 B3 F4 S4 B4

Both waits for all ranks are in the row: no other work hides them, which is what `vocab_parallel` is for.

Source: Lin et al., "nnScaler: Constraint-Guided Parallelization Plan Generation for Deep Learning Training", OSDI'24,
for the idea; the order as in the code released with Yeung et al., "Balancing Pipeline Parallelism with Vocabulary
Parallelism", MLSys'25 (arXiv 2411.05288), where it is a baseline.
"""

from collections.abc import Iterator
from dataclasses import replace

from rpbench.ir.action import Action, Kind
from rpbench.ir.schedule import Schedule, Shape, check_one_stage, looped_placement, step_rows
from rpbench.registry import schedule


@schedule("interlaced", source="Lin et al., OSDI'24; Yeung et al., MLSys'25", shards_head=True)
def interlaced(shape: Shape) -> Schedule:
    """1F1B with room for heads; rank r runs min(3p div 2 - r, m) forwards before anything else."""
    check_one_stage("interlaced", shape)
    shape = replace(shape, num_head_shards=shape.num_ranks)
    rows = step_rows(shape, lambda rank, batch: _step(shape.num_ranks, rank, batch))
    return Schedule(shape, rows, name="interlaced", placement=looped_placement(shape))


def _step(p: int, rank: int, batch: range) -> Iterator[Action]:
    parts = {"F": (Kind.F,), "S": (Kind.HF, Kind.HB), "B": (Kind.B,)}
    following = {name: iter(batch) for name in parts}
    for name in letters(p, rank, len(batch)):
        microbatch = next(following[name])
        yield from (Action(kind, rank, microbatch) for kind in parts[name])


def letters(p: int, rank: int, m: int) -> str:
    """A rank's row of m microbatches on p ranks; S is HF and HB."""
    warmup, heads = min(3 * p // 2 - rank, m), min(p - rank, m)
    early = max(0, warmup - heads - (p - rank - 1) // 2)  # backwards before the first forward after the warm-up
    steady = "FBS" if rank % 2 == p % 2 else "BFS"
    late = warmup - heads - early
    return "F" * warmup + "S" * heads + "BS" * early + steady * (m - warmup) + "BS" * late + "B" * heads
