"""Idle time against activation memory for every synchronous schedule."""

from collections.abc import Iterator, Sequence
from math import hypot

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.transforms import Bbox

from analysis.exhibits import style
from analysis.exhibits.exhibit import by_schedule, exhibit_of
from analysis.records import runs
from analysis.records.experiments import Experiments

_GAP_PX = 5.0  # between the middle of a marker and its name
_MARKER_PX = 4.5  # half the size of a marker
_TIED_PX = 12.0  # a line connects a name to a point that is farther away


def name_points(axes: Axes, points: Sequence[tuple[float, float, str]]) -> None:
    """Write names at the nearest free places beside points (x, y in data coordinates, name).

    This computes the layout of the figure, so set all limits before.
    """
    figure = axes.get_figure(root=True)
    if figure is None:
        return
    figure.draw_without_rendering()
    inside = axes.get_window_extent()
    spots = [axes.transData.transform(point[:2]) for point in points]
    taken = [Bbox.from_bounds(x - _MARKER_PX, y - _MARKER_PX, 2 * _MARKER_PX, 2 * _MARKER_PX) for x, y in spots]
    to_data = axes.transData.inverted()
    for (x, y), (*at, name) in sorted(zip(spots, points, strict=True), key=lambda pair: -pair[0][1]):
        text = axes.annotate(name, (at[0], at[1]), (0, 0), textcoords="data", fontsize=6.4, va="bottom", ha="left")
        size = text.get_window_extent()
        places = list(_places(x, y, size.width, size.height))
        within = (each for each in places if inside.contains(*each.min) and inside.contains(*each.max))
        box = next((each for each in within if not any(map(each.overlaps, taken))), places[0])
        taken.append(box)
        text.set_position(tuple(to_data.transform(box.min)))
        text.set_in_layout(False)
        nearest = np.clip((x, y), box.min, box.max)
        if hypot(*(nearest - (x, y))) > _TIED_PX:
            end = to_data.transform(nearest)
            axes.plot([at[0], end[0]], [at[1], end[1]], color=style.GREY, linewidth=0.3, zorder=0.5)


def _places(x: float, y: float, width: float, height: float) -> Iterator[Bbox]:
    """Boxes around a point: right and left of it, then further and further up and down."""
    for far in range(60):
        for sign in (1, -1) if far else (1,):
            low = y - height / 2 + sign * far * height / 2
            yield Bbox.from_bounds(x + _GAP_PX, low, width, height)
            yield Bbox.from_bounds(x - _GAP_PX - width, low, width, height)
            if far > 1:
                yield Bbox.from_bounds(x - width / 2, low, width, height)


EXPERIMENT = "tradeoff"


def numbers(experiments: Experiments) -> pd.DataFrame:
    """One row for each schedule and number of microbatches: `span`, `whole` (bubbles in %), `peak` and `family`."""
    found = runs.whole(experiments, EXPERIMENT, schedule="schedule", num_microbatches="num_microbatches")
    share = found["num_devices"] / found["num_backward_stages"]  # of a device's part of the model, in one stage
    return found.assign(
        family=found["schedule"].map(style.family_of),
        span=(100 * found["bubble_span"]).clip(lower=0),  # rounding may leave it just below zero
        whole=(100 * found["bubble_makespan"]).clip(lower=0),
        peak=found["peak_in_flight"].map(max) * share,
    ).reset_index(drop=True)


def answer(data: pd.DataFrame) -> str:
    most = data["num_microbatches"].max()
    best = frontier(data[data["num_microbatches"] == most])
    names = ", ".join(
        f"{style.method_name(row.schedule)} ({row.span:.1f} % at {row.peak:.3g})" for row in best.itertuples()
    )
    return f"With {most} microbatches, no schedule beats these in both: {names}."


def frontier(rows: pd.DataFrame) -> pd.DataFrame:
    """The Pareto-optimal rows of bubble and memory."""
    ordered = rows.sort_values(["peak", "span"], kind="stable")
    return ordered[ordered["span"] < ordered["span"].cummin().shift(fill_value=float("inf"))]


_COLUMNS = {
    "peak": ("m = {}: peak", ".2f"),
    "span": ("m = {}: bubble of span (%)", ".2f"),
    "whole": ("m = {}: bubble of makespan (%)", ".2f"),
}


def draw(data: pd.DataFrame) -> Figure:
    """A panel for each number of microbatches, with a point for each schedule in the look of its family."""
    counts = sorted(data["num_microbatches"].unique())
    with style.figure(12.5, 6.4) as figure:
        panels = figure.subplots(1, len(counts), sharey=True, squeeze=False)[0]
        for count, axes in zip(counts, panels, strict=True):
            _draw_panel(axes, data[data["num_microbatches"] == count], legend=count == counts[0])
            axes.set_title(f"{count} microbatches")
        panels[0].get_legend().remove()
        style.legend_below(figure, panels[0], ncols=len(panels[0].get_legend_handles_labels()[1]))
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
    axes.set(xlabel="peak activations (microbatches of a device's share)", ylabel="bubble of the longest span (%)")
    axes.margins(x=0.14, y=0.08)
    axes.autoscale_view()


exhibit = exhibit_of("tradeoff", numbers, by_schedule("num_microbatches", _COLUMNS), draw, answer=answer)
