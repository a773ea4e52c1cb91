"""PipeDream-2BW: 1F1B that is never flushed, gradients summed over m microbatches, two versions of the weights.

A new version appears once all m microbatches of a batch are back. The microbatches of batch t read version t - 1 in
forward and backward, so every stage is one step late, and two versions are enough if m is at least p. With 3 ranks and
2 batches of 3 microbatches:

    rank 0   0F0@0 0F1@0 0F2@0 0B0 0F3@0 0B1 0F4@0 0B2 0STEP@1 0F5@0 0B3 0B4 0B5 0STEP@2
    rank 1   1F0@0 1F1@0 1B0 1F2@0 1B1 1F3@0 1B2 1STEP@1 1F4@0 1B3 1F5@0 1B4 1B5 1STEP@2
    rank 2   2F0@0 2B0 2F1@0 2B1 2F2@0 2B2 2STEP@1 2F3@0 2B3 2F4@0 2B4 2F5@0 2B5 2STEP@2

The paper's planner, which chooses depth and width of equally replicated pipelines, is left out.

Source: Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training", ICML'21 (arXiv 2006.09503).
"""

from baselines.asynchronous.pipedream import never_flushed
from rpbench.ir.policy import Policy
from rpbench.ir.schedule import Schedule, Shape
from rpbench.registry import schedule


@schedule("pipedream_2bw", source="Narayanan et al., ICML'21")
def pipedream_2bw(shape: Shape) -> Schedule:
    """Rank r keeps at most p - r microbatches in flight, and two versions."""
    if shape.num_microbatches < shape.num_ranks:
        raise ValueError(
            f"pipedream_2bw keeps two versions, so the {shape.num_microbatches} microbatches of a batch must be "
            f"as many as the {shape.num_ranks} ranks or more; take num_microbatches={shape.num_ranks} or more"
        )
    return never_flushed(shape, "pipedream_2bw", Policy.TWO_BW)
