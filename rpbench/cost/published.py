"""Published costs: the per-layer timings and partitions of the RoundPipe artifact, and what its simulator assumes.

Measured by its authors on an RTX 4090 with four sequences of 2,048 tokens per microbatch; they are the input of
figure 17. Data: `analysis/published/layer_timings.csv`, `partitions.csv`.
"""

import csv
from functools import cache
from pathlib import Path

from rpbench.cost.table import LayerTimes
from rpbench.ir.partition import Partition, symmetric

TIMED_ON = "8x-rtx4090-24gb"  # the machine of the timings, as the artifact's tables name it
DATA = Path(__file__).parents[2] / "analysis" / "published"


@cache
def published_times(model: str) -> LayerTimes:
    """Layer times of a model in milliseconds, by published name (`qwen3-1.7b`); ValueError where there are none."""
    row = _row("layer_timings.csv", model)
    num_layers = int(row["layers"])
    forward = float(row["fwd_ms_per_layer"])
    return LayerTimes(
        forward=[forward] * num_layers,
        recompute=[forward] * num_layers,
        backward=[float(row["bwd_ms_per_layer"])] * num_layers,
        head_forward=float(row["lmhead_fwd_ms"]),
        head_backward=float(row["lmhead_bwd_ms"]),
        hop=float(row["comm_ms"]),
        units_per_second=1000,
    )


def published_tokens_per_microbatch(model: str) -> int:
    """Tokens in one microbatch of the published timings."""
    row = _row("layer_timings.csv", model)
    return int(row["microbatch_sequences"]) * int(row["seq_len_tokens"])


def published_partition(schedule: str, model: str) -> Partition:
    """The partition the artifact's simulator was given for a schedule and model; ValueError if it gives none."""
    cuts = {
        row["direction"]: tuple(int(count) for count in row["layers_per_stage"].split("-"))
        for row in published_rows("partitions.csv")
        if (row["scheduler"], row["model"]) == (schedule.replace("_", "-"), model)
    }
    if not cuts:
        raise ValueError(
            f"partition=published: the artifact has no partition for schedule {schedule} and model {model or 'none'}; "
            "use partition=search, even or greedy"
        )
    if "forward" in cuts:  # RoundPipe's backward cut is listed from the head downwards
        return Partition(cuts["forward"], cuts["backward"][::-1], fused=True)
    return symmetric(cuts["forward_and_backward"])


def _row(file: str, model: str) -> dict[str, str]:
    for row in published_rows(file):
        if row["model"] == model:
            return row
    known = ", ".join(row["model"] for row in published_rows(file))
    raise ValueError(f"cost=published: no published timings for model {model or 'none'!r}; there are: {known}")


@cache
def published_rows(file: str) -> tuple[dict[str, str], ...]:
    """The rows of a table of `analysis/published/`."""
    with (DATA / file).open(newline="", encoding="utf-8") as source:
        return tuple(csv.DictReader(source))
