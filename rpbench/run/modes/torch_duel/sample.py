"""Sample: what one step of an entrant took, and what its graph explains of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rpbench.run.modes.duel.runs import DECIMALS
from rpbench.run.modes.duel.runs import columns_of as plain_columns
from rpbench.run.modes.duel.sample import Sample

if TYPE_CHECKING:
    from rpbench.run.modes.duel.turns import Run  # which needs torch; whoever reads records does not

# Rank-seconds of a step that its replay does not explain (`rpbench.torch_runtime.replay.unexplained`).
MISSING = ("late", "messages", "after", "between", "outside")


@dataclass(frozen=True)
class StepSample(Sample):
    """One forward and backward of all microbatches, without the optimizer.

    `replay_s` is the graph timed with the step's own durations, by the clock on the wall; `cpu_s` is what all threads
    of the processes that ran it used.

    Args:
        predicted_s: the simulator's, from the median durations in this entrant's step before; None for the first.
        missing: rank-seconds that the replay does not explain, by name.
    """

    predicted_s: float | None = None
    missing: Mapping[str, float] = field(default_factory=dict)


def columns_of(names: Sequence[str], runs: "Sequence[Run]") -> dict[str, dict[str, list[Any]]]:
    """Entrant -> its runs, column by column, as records hold them."""
    found = plain_columns(names, runs)
    for own in found.values():
        own |= {"predicted_s": [], **{f"missing_{part}_s": [] for part in MISSING}}
    for name, _, sample in runs:
        if isinstance(sample, StepSample):
            predicted = sample.predicted_s
            found[name]["predicted_s"].append(None if predicted is None else round(predicted, DECIMALS))
            for part in MISSING:
                found[name][f"missing_{part}_s"].append(round(sample.missing.get(part, 0.0), DECIMALS))
    return found
