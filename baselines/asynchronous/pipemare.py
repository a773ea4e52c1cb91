"""PipeMare: asynchronous, one copy of the weights, and three techniques that keep it stable.

1F1B that is never flushed. Forward and backward both read the newest weights, which may have changed in between:
nothing is stashed. A step has a window of N microbatches, 1 on the command line. With 3 ranks and N = 2:

    rank 0   0F0@0 0F1@0 0F2@0 0B0@0 0F3@0 0B1@0 0STEP@1 0F4@1 0B2@1 0F5@1 0B3@1 0STEP@2 0B4@2 0B5@2 0STEP@3
    rank 1   1F0@0 1F1@0 1B0@0 1F2@0 1B1@0 1STEP@1 1F3@1 1B2@1 1F4@1 1B3@1 1STEP@2 1F5@2 1B4@2 1B5@2 1STEP@3
    rank 2   2F0@0 2B0@0 2F1@0 2B1@0 2STEP@1 2F2@1 2B2@1 2F3@1 2B3@1 2STEP@2 2F4@2 2B4@2 2F5@2 2B5@2 2STEP@3

T1 (learning-rate rescheduling) divides a stage's learning rate by tau^p, where tau is its delay and p falls from 1 to 0
over the first steps. T2 (discrepancy correction) runs backward on an estimate of the weights that forward read. T3
(synchronous warm-up) flushes the first steps. The engine does T1 and T2 (`rpbench.engine.state.updates.compensation`),
the order T3. Without T1 a parabola of curvature L diverges above the rate (2 / L) sin(pi / (4 tau + 2)).

Source: Yang et al., "PipeMare: Asynchronous Pipeline Parallel DNN Training", MLSys'21 (arXiv 1910.05124).
"""

from itertools import chain

from baselines.synchronous.one_f_one_b import alternate
from rpbench.ir.policy import Policy
from rpbench.ir.schedule import Schedule, Shape, check_one_stage, looped_placement
from rpbench.registry import schedule


@schedule("pipemare", source="Yang et al., MLSys'21", steps_each_microbatch=True, compensation=dict)
def pipemare(
    shape: Shape, *, rescheduling_steps: int = 100, correction_decay: float | None = 0.135, num_sync_steps: int = 0
) -> Schedule:
    """Rank r keeps at most p - r microbatches in flight, and one version.

    Args:
        rescheduling_steps: T1, steps over which a late stage comes to learn at the full rate (K); 0: at once.
        correction_decay: T2, what is left of an old move after as many steps as a gradient is late (D); null: none.
        num_sync_steps: T3, steps that are flushed before the first that is not.
    """
    check_one_stage("pipemare", shape, "interleaved_1f1b")
    if num_sync_steps < 0:
        raise ValueError(f"schedule.num_sync_steps={num_sync_steps}: a number of steps, 0 for none")
    flushed = shape.batches[:num_sync_steps]
    rest = range(len(flushed) * shape.num_microbatches, shape.total_microbatches)
    rows = tuple(
        tuple(chain.from_iterable(alternate(rank, part, shape.num_ranks - 1 - rank) for part in (*flushed, rest)))
        for rank in range(shape.num_ranks)
    )
    return Schedule(shape, rows, name="pipemare", policy=Policy.LATEST, placement=looped_placement(shape))
