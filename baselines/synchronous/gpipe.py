"""GPipe: all forwards, then all backwards, then one optimizer step.

With 3 ranks and 4 microbatches:

    rank 0   0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3
    rank 1   1F0 1F1 1F2 1F3 1B0 1B1 1B2 1B3
    rank 2   2F0 2F1 2F2 2F3 2B0 2B1 2B2 2B3

Source: Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism", NeurIPS'19.
Backward runs in ascending order here, as in torch and in the RoundPipe artifact.
"""

from rpbench.ir.action import Kind, joined, plain
from rpbench.ir.schedule import Schedule, Shape, check_one_stage, looped_placement
from rpbench.registry import schedule


@schedule("gpipe", source="Huang et al., NeurIPS'19")
def gpipe(shape: Shape) -> Schedule:
    """Every rank holds the activations of all microbatches at its peak."""
    check_one_stage("gpipe", shape, "looped_bfs")
    steps = [(kind, batch) for batch in shape.batches for kind in (Kind.F, Kind.B)]
    rows = tuple(joined([plain(kind, rank, batch) for kind, batch in steps]) for rank in range(shape.num_ranks))
    return Schedule(shape, rows, name="gpipe", placement=looped_placement(shape))
