"""DualPipe: microbatches enter at both ends of the pipeline, which holds every stage twice.

Rank r holds stage r for the first half of the microbatches and stage p - 1 - r for the second half, which goes the
other way: two copies of the weights, whose gradients are summed before the step. A forward of one direction runs
together with a backward of the other, `(F;B)`. With 4 ranks and 8 microbatches, of which 4 to 7 come from the end:

    rank 0   0F0 0F1 0F2 3F4 3I4 3W4 3F5 (0F3;3B5) (3F6;0B0) 3B6 (3F7;0B1) 3B7 0I2 0W2 0I3 0W3
    rank 1   1F0 2F4 1F1 2F5 1F2 2B4 (2F6;1B0) (1F3;2B5) (2F7;1B1) 2B6 1B2 2I7 1I3 2W7 1W3
    rank 2   1F4 2F0 1F5 2F1 1F6 2B0 (2F2;1B4) ...   rows 2 and 3 mirror 1 and 0
    rank 3   0F4 0F5 0F6 3F0 3I0 3W0 3F1 (0F7;3B1) ...

The rows are those of `dualpipe_v` with p/2 ranks between an end and the middle, and m/2 microbatches in each direction.
With F, B = I + W and F&B the times of one stage, the bubble is (p/2 - 1)(F&B + B - 3W); a rank holds at most p + 1
stage activations.

Source: DeepSeek-AI, "DeepSeek-V3 Technical Report" (arXiv 2412.19437).
"""

from baselines.bidirectional.dualpipe_v import rank_order
from rpbench.ir.schedule import Row, Schedule, Shape, step_rows
from rpbench.registry import schedule


@schedule("dualpipe", source="arXiv 2412.19437")
def dualpipe(shape: Shape) -> Schedule:
    """Microbatches 0 to m/2 - 1 of a step enter at rank 0, the others at rank p - 1."""
    _check_shape(shape)
    rows = step_rows(shape, lambda rank, batch: _step(shape.num_ranks, rank, batch))
    return Schedule(shape, rows, name="dualpipe", placement=bidirectional_placement(shape))


def _step(p: int, rank: int, batch: range) -> Row:
    end, half = min(rank, p - 1 - rank), len(batch) // 2
    down, up = batch[:half], batch[half:]
    return rank_order(p // 2, end, (end, p - 1 - end), (down, up) if rank == end else (up, down))


def _check_shape(shape: Shape) -> None:
    p, m = shape.num_ranks, shape.num_microbatches
    check_both_ways("dualpipe", shape, " or try schedule=dualpipe_v")
    if m % 2 or m < 2 * p:
        least = max(2 * p, m + m % 2)
        raise ValueError(
            f"dualpipe sends half of {m} microbatches from either end of {p} ranks: there must be an even number "
            f"of at least {2 * p}; take num_microbatches={least}"
        )


def check_both_ways(name: str, shape: Shape, other: str = "") -> None:
    """Raise ValueError unless every rank has one stage of each direction, and the number of ranks is even."""
    if shape.num_stages != shape.num_ranks:
        raise ValueError(
            f"{name} puts one stage of each direction on each rank, got {shape.num_stages} stages on "
            f"{shape.num_ranks} ranks; set chunks_per_device=1{other}"
        )
    check_even_ranks(name, shape, other)


def check_even_ranks(name: str, shape: Shape, other: str = "") -> None:
    """Raise ValueError for an odd number of ranks."""
    p = shape.num_ranks
    if p % 2:
        raise ValueError(
            f"{name}'s two pipelines meet in the middle: the {p} ranks must be an even number; "
            f"take num_devices={p + 1}{other}"
        )


def bidirectional_placement(shape: Shape) -> tuple[tuple[int, ...], ...]:
    """Stage s on rank s, and its copy on rank p - 1 - s."""
    last = shape.num_ranks - 1
    return tuple((stage, last - stage) for stage in range(shape.num_stages))
