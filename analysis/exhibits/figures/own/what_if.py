"""The system with the best predicted throughput, over link and head, and over devices and microbatches."""

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any, NamedTuple

import pandas as pd
from matplotlib.figure import Figure

from analysis.exhibits import style
from analysis.exhibits.exhibit import Cell, Table, exhibit_of, label, ours, table
from analysis.records.experiments import Experiments, index
from rpbench.workload.architecture import Architecture

SYSTEMS = ("roundpipe", "megatron-pp", "fsdp")
COPY_RATES = (0.5e9, 2e9, 8e9, 21e9)
VOCABULARIES = (18992, 75968, 151936, 303872)
DEVICES = (2, 4, 6, 8)
MICROBATCHES = (4, 8, 16, 64)


class Map(NamedTuple):
    """The axes of a map; `read` returns (x, y) of a run's configuration."""

    experiment: str
    x_name: str
    x_values: tuple[Any, ...]
    y_name: str
    y_values: tuple[Any, ...]
    read: Callable[[dict[str, Any]], tuple[Any, Any]]


LINKS = Map(
    "what_if",
    "copies from host memory (GB/s)",
    COPY_RATES,
    "words in the vocabulary",
    VOCABULARIES,
    lambda config: (config["cluster"]["copy_bytes_per_s"], config["model"]["vocab"]),
)
SIZES = Map(
    "what_if_devices",
    "devices",
    DEVICES,
    "microbatches a step",
    MICROBATCHES,
    lambda config: (config["num_devices"], config["mode"]["microbatches"]),
)


def head_share(vocab: int) -> float:
    """The output matrix's fraction of a forward's FLOPs in Qwen3-1.7B with another vocabulary."""
    shape = Architecture("qwen3_1p7b", 28, 2048, 16, vocab, key_value_heads=8, head_dim=128, inner=6144)
    return shape.head_forward_flops(1) / shape.forward_flops(1, "causal")


def numbers(experiments: Experiments, wanted: Map) -> pd.DataFrame:
    """One row for each point and system: `x`, `y`, `system`, `rate` (NaN if it does not fit), `run_id`."""
    cells = experiments.cells(wanted.experiment)
    at = pd.DataFrame(map(wanted.read, cells["config"]), columns=["x", "y"], dtype=object, index=cells.index)
    rows = at.assign(system=cells["system"], rate=cells["tokens_per_s"].where(cells["status"] == "ok"))
    keys = [(x, y, system) for y, x, system in product(wanted.y_values, wanted.x_values, SYSTEMS)]
    return index(rows.assign(run_id=cells["run_id"]), ("x", "y", "system"), keys, wanted.experiment)


def winner(data: pd.DataFrame, x: Any, y: Any) -> tuple[str, float | None]:
    """The fastest system at a point and its lead over the next one, if there is one."""
    rows = data[(data["x"] == x) & (data["y"] == y)].dropna(subset="rate").sort_values("rate", ascending=False)
    lead = rows["rate"].iloc[0] / rows["rate"].iloc[1] if len(rows) > 1 else None
    return str(rows["system"].iloc[0]), lead


def answer(data: pd.DataFrame) -> str:
    lost = [
        f"{x / 1e9:g} GB/s with {y:,} words ({style.method_name(system)})"
        for y in VOCABULARIES
        for x in COPY_RATES
        if (system := winner(data, x, y)[0]) != "roundpipe"
    ]
    return f"On the left RoundPipe wins except at {', '.join(lost)}." if lost else "RoundPipe wins everywhere."


def tabulate(maps: dict[str, pd.DataFrame]) -> Table:
    rows = [row for wanted in (LINKS, SIZES) for row in _rows(maps[wanted.experiment], wanted)]
    return table(("where", *(f"{style.method_name(system)}, tokens/s" for system in SYSTEMS), "fastest"), rows)


def _rows(data: pd.DataFrame, wanted: Map) -> Iterator[list[Cell]]:
    found = data.set_index(["x", "y", "system"]).to_dict("index")
    for y, x in product(wanted.y_values, wanted.x_values):
        points = [found[x, y, system] for system in SYSTEMS]
        where = f"{_shown(x, wanted)} {wanted.x_name}, {y:,} {wanted.y_name}"
        cells = (
            Cell(None, "does not fit", (point["run_id"],))
            if pd.isna(point["rate"])
            else ours(point["rate"], ",.0f", point["run_id"])
            for point in points
        )
        yield [label(where), *cells, label(style.method_name(winner(data, x, y)[0]))]


def _shown(x: Any, wanted: Map) -> str:
    return f"{x / 1e9:g}" if wanted is LINKS else f"{x}"


def draw(maps: dict[str, pd.DataFrame]) -> Figure:
    with style.figure(9.5, 3.4) as figure:
        for axes, wanted in zip(figure.subplots(1, 2), (LINKS, SIZES), strict=True):
            for (row, y), (column, x) in product(enumerate(wanted.y_values), enumerate(wanted.x_values)):
                system, lead = winner(maps[wanted.experiment], x, y)
                colour = style.METHODS[system].colour
                axes.barh(row, 1, 1, left=column - 0.5, color=colour, alpha=0.7, edgecolor="white")
                text = f"{style.method_name(system)}\n" + (f"{lead:.2f} ×" if lead else "alone")
                axes.text(column, row, text, ha="center", va="center", fontsize=7)
            axes.set_xticks(range(len(wanted.x_values)), [_shown(x, wanted) for x in wanted.x_values])
            axes.set_yticks(range(len(wanted.y_values)), [f"{y:,}" for y in wanted.y_values])
            axes.set(xlabel=wanted.x_name, ylabel=wanted.y_name)
            axes.set(xlim=(-0.5, len(wanted.x_values) - 0.5), ylim=(-0.5, len(wanted.y_values) - 0.5))
            axes.grid(visible=False)
        figure.suptitle("Fastest system, and its tokens/s over those of the second (×)", fontsize=9.5)
        return figure


exhibit = exhibit_of(
    "what_if",
    lambda experiments: {each.experiment: numbers(experiments, each) for each in (LINKS, SIZES)},
    tabulate,
    draw,
    least_head=head_share(VOCABULARIES[0]),
    most_head=head_share(VOCABULARIES[-1]),
    answer=lambda maps: answer(maps["what_if"]),
)
