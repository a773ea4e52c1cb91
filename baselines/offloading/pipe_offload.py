"""PipeOffload: an interleaved order whose activations wait on the host for their backward.

The activations of a forward are stored as soon as it has run (STORE:A, lane d2h) and loaded shortly before they are
used (LOAD:A, lane h2d, at most two ahead). With several chunks on a rank, activations of the first chunks wait longest.
If only a share is offloaded, these go first: memory then falls faster than traffic grows. Activations that are needed
again too soon stay: a transfer both ways must fit into the time between. With 2 ranks, 4 microbatches and a least gap
of 2, on rank 0 with one chunk:

    compute  0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3
    d2h      0STORE:A1 0FREE:A1 0STORE:A2 0FREE:A2
    h2d      0LOAD:A1 0LOAD:A2 0FREE:A1 0FREE:A2

With recompute=none whole activations move, as in the paper; otherwise the inputs that a stage recomputes from.
`group_size` selects the paper's own orders (`gis`), in which activations live shorter: groups of p, of p/2, or fewer.

Source: Wan et al., "PipeOffload: Improving Scalability of Pipeline Parallelism with Memory Optimization" (arXiv
2503.01328): offloading, the selection by lifetime of activations, and the orders. Two devices that share a way to the
host take turns (`cluster.devices_per_root_complex`), where the released code uses a grid of slots.
"""

from baselines.synchronous.bpipe import with_moved_activations
from baselines.synchronous.gis import gis
from baselines.synchronous.interleaved_1f1b import interleaved_1f1b
from baselines.synchronous.one_f_one_b import one_f_one_b
from rpbench.ir.action import Kind, plain_of
from rpbench.ir.schedule import Row, Schedule, Shape
from rpbench.registry import schedule

# Activations that may be loaded but not used yet: one arrives while another is read.
BUFFERS = 2


@schedule(
    "pipe_offload", source="arXiv 2503.01328", looped=True, searched={"share": (1.0, 0.5, 0.0), "least_gap": (4, 2, 8)}
)
def pipe_offload(shape: Shape, *, share: float = 1.0, least_gap: int = 4, group_size: int | None = None) -> Schedule:
    """Interleaved 1F1B, or an order of groups, with activations on the host.

    Args:
        share: of the activations to offload, the longest-lived first.
        least_gap: actions that must stand between a forward and its backward, or its activations stay.
        group_size: microbatches of a group; None: interleaved 1F1B.
    """
    if not 0 <= share <= 1:
        raise ValueError(f"schedule.share={share}: a share of the activations, from 0 to 1; try 0.5")
    if least_gap < 1:
        raise ValueError(f"schedule.least_gap={least_gap}: at least 1 action must stand between; try 4")
    if group_size is not None:
        base = gis(shape, group_size=group_size)
    else:
        base = one_f_one_b(shape) if shape.num_stages == shape.num_ranks else interleaved_1f1b(shape)
    rows = tuple(
        with_moved_activations(row, _longest_lived(row, share, least_gap), peer=None, buffers=BUFFERS)
        for row in map(base.compute, range(shape.num_ranks))
    )
    return Schedule(shape, rows, name="pipe_offload", placement=base.placement)


def _longest_lived(row: Row, share: float, least_gap: int) -> list[int]:
    """Places of the forwards whose activations are offloaded."""
    kinds, stages, microbatches = plain_of(row).columns
    named = list(zip(stages, microbatches, strict=True))
    ends = {named[place]: place for place, kind in enumerate(kinds) if kind in (Kind.B, Kind.I)}
    lives = [(place - ends[named[place]], place) for place, kind in enumerate(kinds) if kind == Kind.F]
    lives.sort()  # the longest first
    return sorted(place for life, place in lives[: round(share * len(lives))] if -life > least_gap)
