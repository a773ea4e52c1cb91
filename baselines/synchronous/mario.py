"""Mario: activations are recomputed while a rank would wait for a gradient, on any schedule that flushes.

Compiler passes over the rows of another schedule (`rpbench.passes.recomputation`): every backward gets its
recomputation R just before it, and R does not wait for the gradient; where a backward directly follows its forward,
nothing is recomputed; forwards after a rank's first backward may move before it, since they keep only their inputs.
1F1B with 3 ranks and 4 microbatches:

    rank 0   0F0 0F1 0F2 0R0 0B0 0F3 0R1 0B1 0R2 0B2 0R3 0B3
    rank 1   1F0 1F1 1R0 1B0 1F2 1R1 1B1 1F3 1R2 1B2 1R3 1B3
    rank 2   2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3

Source: Liu et al., "Mario: Near Zero-cost Activation Checkpointing in Pipeline Parallelism", PPoPP'25, from its
abstract and descriptions of its passes.
"""

from collections.abc import Iterator
from dataclasses import replace

from rpbench.ir.analysis import Analysis
from rpbench.ir.costs import StageCosts
from rpbench.ir.policy import Policy
from rpbench.ir.schedule import Row, Schedule, ScheduleError, Shape
from rpbench.passes.recomputation import checkpoint, prepose
from rpbench.registry import entry, schedule


@schedule(
    "mario",
    source="Liu et al., PPoPP'25",
    looped=True,
    chunks=1,
    more_chunks=True,
    needs_costs=True,
    recompute_ahead=True,
)
def mario(shape: Shape, costs: StageCosts, *, base: str = "1f1b", preposed: int = 0) -> Schedule:
    """Another schedule with its recomputation where ranks wait.

    Args:
        base: the schedule whose rows are taken, with its default options.
        preposed: forwards that every rank runs ahead of its first backward more than the base does.
    """
    found = _base(base, shape, costs)
    if type(preposed) is not int or preposed < 0:
        raise ValueError(f"schedule.preposed={preposed}: forwards that go ahead of a first backward, from 0 on; try 1")
    rows = tuple(
        tuple(action for step in _steps(row, shape.num_steps) for action in checkpoint(prepose(step, preposed)))
        for row in map(found.compute, range(shape.num_ranks))
    )
    made = replace(found, rows=rows, name="mario")
    _check_runs(made, base, preposed)
    return made


def _base(name: str, shape: Shape, costs: StageCosts) -> Schedule:
    method = entry(name)
    if name == "mario" or method.separate_cuts or method.lower or method.compensation or method.recompute_ahead:
        raise ValueError(
            f"schedule.base={name}: its weights must stay where they are, and recomputation must be left to mario; "
            "take 1f1b, interleaved_1f1b or chimera"
        )
    found = method.build(shape, costs)
    if found.policy is not Policy.FLUSH or found.shape != shape or any(len(row) > 1 for row in found.rows):
        raise ValueError(
            f"schedule.base={name}: it must flush and run whole microbatches, with nothing beside computing; "
            "take 1f1b, interleaved_1f1b or chimera"
        )
    return found


def _steps(row: Row, num_steps: int) -> Iterator[Row]:
    """A row's part of each step; flushed schedules do the same in each."""
    each = len(row) // num_steps
    return (row[first : first + each] for first in range(0, len(row), each))


def _check_runs(made: Schedule, base: str, preposed: int) -> None:
    if preposed:
        try:
            _ = Analysis(made).rounds
        except ScheduleError:
            raise ValueError(
                f"schedule.preposed={preposed}: the rows of {base} then wait for each other; take fewer, such as 0"
            ) from None
