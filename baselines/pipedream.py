"""PipeDream: 1F1B that is never flushed, every microbatch a step of its own, old weights kept for those under way.

A stage s of p admits p - 1 - s forwards, then one forward and one backward in turn; it steps after every backward.
What PipeDream calls a minibatch is a microbatch here, and a step's window is one of them. With 3 ranks and 5
microbatches (steps, which follow every backward, left out; @v is the version a forward reads):

    rank 0   0F0@0 0F1@0 0F2@0 0B0 0F3@1 0B1 0F4@2 0B2 0B3 0B4
    rank 1   1F0@0 1F1@0 1B0 1F2@1 1B1 1F3@2 1B2 1F4@3 1B3 1B4
    rank 2   2F0@0 2B0 2F1@1 2B1 2F2@2 2B2 2F3@3 2B3 2F4@4 2B4

Weight stashing: backward reads what its forward read. Forward i of stage s reads version max(0, i - (p - 1 - s)), so
a gradient is p - 1 - s steps old and a stage keeps p - s versions. Vertical sync: a microbatch reads on every stage
the version that was newest on the first stage when it was let in; then all are p - 1 steps old.

Source: Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training", SOSP'19 (arXiv
1806.03377), sections 3.2 and 3.3.
"""

from baselines.one_f_one_b import alternate
from rpbench.ir.policy import Policy
from rpbench.ir.schedule import Schedule, Shape, looped_placement
from rpbench.registry import schedule


@schedule("pipedream", source="Narayanan et al., SOSP'19, section 3", steps_each_microbatch=True)
def pipedream(shape: Shape, *, vertical_sync: bool = False) -> Schedule:
    """Rank r keeps at most p - r microbatches in flight, and as many versions of its weights.

    Args:
        shape: `num_microbatches` is the window of a step; the paper's is 1.
        vertical_sync: all stages read the version that was newest on the first one.
    """
    policy = Policy.VERTICAL if vertical_sync else Policy.STASH
    return never_flushed(shape, "pipedream", policy)


def never_flushed(shape: Shape, name: str, policy: Policy) -> Schedule:
    """1F1B over all microbatches of a run, drained only at its end.

    Raises:
        ValueError: unless there is one stage for each rank.
    """
    if shape.num_stages != shape.num_ranks:
        raise ValueError(
            f"{name} puts one stage on each rank, got {shape.num_stages} stages on {shape.num_ranks} ranks; "
            "set chunks_per_device=1 or try schedule=interleaved_1f1b"
        )
    microbatches = range(shape.total_microbatches)
    rows = tuple(alternate(rank, microbatches, shape.num_ranks - 1 - rank) for rank in range(shape.num_ranks))
    return Schedule(shape, rows, name=name, policy=policy, placement=looped_placement(shape))
