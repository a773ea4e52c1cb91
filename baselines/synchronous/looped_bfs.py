"""Looped breadth-first pipeline: all microbatches go through a rank's first chunk, then through its next.

Stage s lives on rank s mod p; backward takes chunks and microbatches in reverse. With 2 ranks, 2 microbatches and 2
chunks:

    rank 0   0F0 0F1 2F0 2F1 2B1 2B0 0B1 0B0
    rank 1   1F0 1F1 3F0 3F1 3B1 3B0 1B1 1B0

A chunk's weights are needed only once in each direction, which suits sharded data parallelism.

Source: Lamy-Poirier, "Breadth-First Pipeline Parallelism", MLSys'23 (arXiv 2211.05953).
"""

from collections.abc import Iterator

from rpbench.ir.action import Action, Kind, actions
from rpbench.ir.schedule import Schedule, Shape, looped_placement, step_rows
from rpbench.registry import schedule


@schedule("looped_bfs", source="Lamy-Poirier, MLSys'23", looped=True)
def looped_bfs(shape: Shape) -> Schedule:
    """Every rank holds the activations of all microbatches on all its chunks at its peak."""
    shape.chunks_per_rank  # noqa: B018  refuses stages that cannot be dealt evenly
    rows = step_rows(shape, lambda rank, batch: _step(shape, rank, batch))
    return Schedule(shape, rows, name="looped_bfs", placement=looped_placement(shape))


def _step(shape: Shape, rank: int, batch: range) -> Iterator[Action]:
    stages = range(rank, shape.num_stages, shape.num_ranks)
    for stage in stages:
        yield from actions(Kind.F, stage, batch)
    for stage in reversed(stages):
        yield from actions(Kind.B, stage, reversed(batch))
