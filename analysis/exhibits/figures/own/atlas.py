"""Atlas: every schedule's timeline, drawn small and alike."""

from functools import partial
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from analysis.exhibits import style
from analysis.exhibits.exhibit import Shown, Table, exhibited, label, ours, table
from analysis.exhibits.figures.timelines import draw_small, lacking_timelines, read_timeline
from analysis.records import runs
from analysis.records.experiments import Experiments
from rpbench.drawing.timeline_figure import Bars, draw_timeline, handles

EXPERIMENT = "atlas"
_ACROSS = 4
_FORWARDS_PER_S = 1000.0  # a forward of a device takes 1 ms in this experiment


@exhibited("atlas")
def exhibit(experiments: Experiments) -> Shown:
    """All schedules on one page, and each as a drawing of its own."""
    rows, results = _runs(experiments), experiments.results
    return Shown(
        draw=partial(draw, rows, results),
        drawings={f"atlas_{row['schedule']}": partial(draw_one, row, results) for row in rows.to_dict("records")},
        drawn_from={f"atlas_{row['schedule']}": row["run_id"] for row in rows.to_dict("records")},
        table=tabulate(rows),
    )


def _runs(experiments: Experiments) -> pd.DataFrame:
    found = runs.whole(experiments, EXPERIMENT, schedule="schedule")
    lacking_timelines(found, experiments.results, EXPERIMENT)
    return found


def tabulate(rows: pd.DataFrame) -> Table:
    """Makespan, the three bubbles and the peak of every schedule."""
    columns = ("schedule", "makespan (forwards)", "bubble of makespan (%)", "bubble of span (%)", "idle / work (%)")
    return table(
        (*columns, "peak stage activations", "weight versions"),
        (
            (
                label(style.method_name(row.schedule)),
                ours(_FORWARDS_PER_S * row.makespan_s, ".4g", row.run_id),
                ours(100 * row.bubble_makespan, ".2f", row.run_id),
                ours(100 * row.bubble_span, ".2f", row.run_id),
                ours(100 * row.bubble_over_ideal, ".2f", row.run_id),
                ours(max(row.peak_in_flight), "d", row.run_id),
                ours(row.weight_versions, ".0f", row.run_id),
            )
            for row in rows.itertuples()
        ),
    )


def draw_one(row: dict, results: Path) -> Figure:
    """One schedule at full size, with names on its bars."""
    title = f"{style.method_name(row['schedule'])}: bubble {100 * row['bubble_makespan']:.2f} %"
    return draw_timeline(read_timeline(row, results), title, unit="forwards", per_second=_FORWARDS_PER_S)


def draw(rows: pd.DataFrame, results: Path) -> Figure:
    """Panels in rows of four, all with one time axis."""
    with style.applied():
        down = -(-len(rows) // _ACROSS)
        figure = Figure(figsize=(13, 1.05 * down + 0.6), layout="constrained")
        panels = figure.subplots(down, _ACROSS, sharex=True, sharey=True, squeeze=False).ravel()
        drawn: list[Bars] = []
        for axes, row in zip(panels, rows.to_dict("records"), strict=False):
            text = f"{style.method_name(row['schedule'])}, {100 * row['bubble_makespan']:.1f} %"
            drawn.append(draw_small(axes, read_timeline(row, results), text, _FORWARDS_PER_S))
        for axes in panels[len(rows) :]:
            axes.remove()
        panels[0].set_xlim(0, _FORWARDS_PER_S * rows["makespan_s"].max())
        figure.supxlabel("time (forwards)", fontsize=8.5)
        figure.supylabel("device", fontsize=8.5)
        panels[0].set_yticks([0, 3])
        panels[0].set_ylim(3.5, -0.5)
        kinds, heads = {kind for each in drawn for kind in each.kinds}, {kind for each in drawn for kind in each.heads}
        figure.legend(handles=handles(kinds, heads), loc="outside upper center", ncols=6)
        return figure
