"""Every synchronous schedule on one page: what it leaves idle against what it keeps in memory."""

from itertools import product

import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.exhibits import style
from analysis.exhibits.cells import label, ours, table
from analysis.exhibits.exhibit import Cell, Table, exhibit_of
from analysis.exhibits.figures.labels import name_points
from analysis.records.experiments import Experiments, index, succeeded
from rpbench.config.configuration import swept

EXPERIMENT = "tradeoff"


def numbers(experiments: Experiments) -> pd.DataFrame:
    """One row a schedule and number of microbatches: `span`, `whole` (bubbles in %), `peak` and its `family`.

    Raises:
        MissingRuns: if a run behind it is not there.
    """
    keys = ("schedule", "num_microbatches")
    wanted = list(product(*(swept(EXPERIMENT, key) for key in keys)))
    rows = succeeded(experiments.cells(EXPERIMENT))
    found = index(rows, keys, wanted, EXPERIMENT)
    share = found["num_devices"] / found["num_backward_stages"]  # of a device's part of the model, in one stage
    return pd.DataFrame(
        {
            "schedule": found["schedule"],
            "num_microbatches": found["num_microbatches"],
            "family": found["schedule"].map(style.family_of),
            # A bubble of nothing may come out a hair below zero.
            "span": (100 * found["bubble_span"]).clip(lower=0),
            "whole": (100 * found["bubble_makespan"]).clip(lower=0),
            "peak": found["peak_in_flight"].map(max) * share,
            "run_id": found["run_id"],
        }
    ).reset_index(drop=True)


def answer(data: pd.DataFrame) -> str:
    """Which schedules no other beats in both, for the largest number of microbatches, in a sentence."""
    most = data["num_microbatches"].max()
    best = frontier(data[data["num_microbatches"] == most])
    names = ", ".join(
        f"{style.method_name(row.schedule)} ({row.span:.1f} % at {row.peak:.3g})" for row in best.itertuples()
    )
    return f"With {most} microbatches, no schedule beats these in both: {names}."


def frontier(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows that no other row is better than in one of bubble and memory and at least as good in the other."""
    ordered = rows.sort_values(["peak", "span"], kind="stable")
    return ordered[ordered["span"] < ordered["span"].cummin().shift(fill_value=float("inf"))]


def tabulate(data: pd.DataFrame) -> Table:
    """One row a schedule: peak and both bubbles for every number of microbatches."""
    counts = sorted(data["num_microbatches"].unique())
    columns = ["schedule"]
    for count in counts:
        columns += [f"m = {count}: peak", f"m = {count}: bubble of span (%)", f"m = {count}: bubble of makespan (%)"]
    found = data.set_index(["schedule", "num_microbatches"]).to_dict("index")
    return table(columns, (_row(found, name, counts) for name in data["schedule"].unique()))


def _row(found: dict, schedule: str, counts: list[int]) -> list[Cell]:
    row = [label(style.method_name(schedule))]
    for count in counts:
        numbers = found[schedule, count]
        row += [ours(numbers[key], ".2f", numbers["run_id"]) for key in ("peak", "span", "whole")]
    return row


def draw(data: pd.DataFrame) -> Figure:
    """One panel a number of microbatches; a point a schedule, its colour and marker its family."""
    counts = sorted(data["num_microbatches"].unique())
    with style.applied():
        figure = Figure(figsize=(12.5, 6.4), layout="constrained")
        panels = figure.subplots(1, len(counts), sharey=True, squeeze=False)[0]
        for count, axes in zip(counts, panels, strict=True):
            _draw_panel(axes, data[data["num_microbatches"] == count], legend=count == counts[0])
            axes.set_title(f"{count} microbatches")
        handles, names = panels[0].get_legend_handles_labels()
        panels[0].get_legend().remove()
        figure.legend(handles, names, loc="outside lower center", ncols=len(names))
        for count, axes in zip(counts, panels, strict=True):  # once all axes have their limits and places
            rows = data[data["num_microbatches"] == count]
            name_points(axes, [(row.peak, row.span, style.method_name(row.schedule)) for row in rows.itertuples()])
        return figure


def _draw_panel(axes: Axes, rows: pd.DataFrame, *, legend: bool) -> None:
    families = [family for family in style.FAMILIES if family in set(rows["family"])]
    sns.scatterplot(
        rows,
        x="peak",
        y="span",
        hue="family",
        style="family",
        hue_order=families,
        style_order=families,
        palette={family: style.FAMILIES[family].colour for family in families},
        markers={family: style.FAMILIES[family].marker for family in families},
        s=46,
        edgecolor="black",
        linewidth=0.5,
        legend="full" if legend else False,
        ax=axes,
    )
    best = frontier(rows)
    axes.step(best["peak"], best["span"], where="post", color=style.GREY, linewidth=0.8, zorder=0)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, position: f"{value:g}")
    axes.set_xlabel("peak activations (microbatches of a device's share)")
    axes.set_ylabel("bubble of the longest span (%)")
    axes.margins(x=0.14, y=0.08)
    axes.autoscale_view()


exhibit = exhibit_of("tradeoff", numbers, tabulate, draw, answer=answer)
