"""Published costs: timings of layers and partitions from the RoundPipe artifact, the input of its figure 17.

Its authors measured on an RTX 4090 with four sequences of 2,048 tokens per microbatch. Data:
`analysis/published/layer_timings.csv`, `partitions.csv`.
"""

import csv
from functools import cache
from pathlib import Path

from rpbench.cost.table import LayerTimes
from rpbench.ir.partition import Partition, symmetric

TIMED_ON = "8x-rtx4090-24gb"  # the machine of the timings, by its name in the artifact's tables
DATA = Path(__file__).parents[2] / "analysis" / "published"


@cache
def published_times(model: str) -> LayerTimes:
    """Layer times of a model in milliseconds, by published name (`qwen3-1.7b`); ValueError where there are none."""
    row = _timings(model)
    num_layers = int(row["layers"])
    forward = [float(row["fwd_ms_per_layer"])] * num_layers
    return LayerTimes(
        forward=forward,
        recompute=forward,
        backward=[float(row["bwd_ms_per_layer"])] * num_layers,
        head_forward=float(row["lmhead_fwd_ms"]),
        head_backward=float(row["lmhead_bwd_ms"]),
        hop=float(row["comm_ms"]),
        units_per_second=1000,
    )


def published_tokens_per_microbatch(model: str) -> int:
    """Tokens in one microbatch of the published timings."""
    row = _timings(model)
    return int(row["microbatch_sequences"]) * int(row["seq_len_tokens"])


def published_partition(schedule: str, model: str) -> Partition:
    """The partition that the artifact's simulator gets for a schedule and model; ValueError if it has none."""
    cuts = {
        row["direction"]: tuple(int(count) for count in row["layers_per_stage"].split("-"))
        for row in published_rows("partitions.csv")
        if (row["scheduler"], row["model"]) == (schedule.replace("_", "-"), model)
    }
    if not cuts:
        raise ValueError(
            f"partition=published: the artifact has no partition for schedule {schedule} and {_said(model)}; "
            "use partition=search, even or greedy"
        )
    if "forward" in cuts:  # RoundPipe's; its backward cut is listed from the head downwards
        return Partition(cuts["forward"], cuts["backward"][::-1], fused=True)
    return symmetric(cuts["forward_and_backward"])


def _timings(model: str) -> dict[str, str]:
    rows = {row["model"]: row for row in published_rows("layer_timings.csv")}
    if model not in rows:
        known = ", ".join(rows)
        raise ValueError(
            f"cost=published: no published timings for {_said(model)}; there are those of {known}, as in "
            "model=qwen3_1p7b"
        )
    return rows[model]


def _said(model: str) -> str:
    return f"model {model!r}" if model else "a model without published_name"


@cache
def published_rows(file: str) -> tuple[dict[str, str], ...]:
    """The rows of a table of `analysis/published/`."""
    with (DATA / file).open(newline="", encoding="utf-8") as source:
        return tuple(csv.DictReader(source))
