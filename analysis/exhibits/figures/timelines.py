"""Timelines, small on one page and each as its own figure: the 25 of figure 17, and one of every schedule."""

import csv
import io
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.exhibits import style
from analysis.exhibits.exhibit import Shown, Table, declared_table, exhibited
from analysis.exhibits.tables.published_cells import missing
from analysis.records import runs
from analysis.records.experiments import Experiments, MissingRuns
from rpbench.drawing.timeline_figure import Bars, bars_of, draw_timeline, handles, put_bars
from rpbench.ir.action import Action, parse
from rpbench.ir.partition import parse as parse_partition
from rpbench.ir.schedule import Schedule, Shape
from rpbench.ir.timeline import Timeline
from rpbench.records import record
from rpbench.run.recording import TIMELINE


@exhibited("timelines")
def exhibit(experiments: Experiments) -> Shown:
    rows, results = numbers(experiments), experiments.results
    lost = missing(rows.to_dict("records"))
    found = declared_table("timelines", rows.assign(bubble=100 * rows["bubble_makespan"]))
    each = {f"timeline_{row['schedule']}_{row['model']}": row for row in rows.to_dict("records")}
    shown = _shown(found, partial(draw, rows, results), each, partial(draw_one, results=results))
    return shown._replace(words={"missing": lost})


def _shown(
    found: Table, draw_all: Callable[[], Figure], each: dict[str, dict], draw: Callable[[dict], Figure]
) -> Shown:
    drawings = {stem: partial(draw, row) for stem, row in each.items()}
    return Shown(found, draw_all, drawings, drawn_from={stem: row["run_id"] for stem, row in each.items()})


def numbers(experiments: Experiments) -> pd.DataFrame:
    """The 25 records, or those that are there; MissingRuns if none is, or a timeline is missing."""
    return _with_timelines(runs.calls_there(experiments), experiments.results, "figure17")


def _with_timelines(rows: pd.DataFrame, results: Path, experiment: str) -> pd.DataFrame:
    lacking = [run for run in rows["run_id"] if not (results / run / TIMELINE).exists()]
    if lacking:
        raise MissingRuns(f"timeline.csv of {len(lacking)} of {len(rows)} runs of experiment={experiment}")
    return rows


def read_timeline(row: dict, results: Path) -> Timeline:
    """The timeline file of a record; ValueError if it is torn or does not fit the record."""
    folder = results / row["run_id"]
    source = record.kept_file(folder, row, TIMELINE)
    if source is None:
        raise ValueError(f"{folder / TIMELINE} is not the one that its record was written with; run it again")
    # A column that some records lack holds floats.
    num_devices, stages, microbatches, backward_stages, steps = (
        int(row[key]) for key in ("num_devices", "num_stages", "num_microbatches", "num_backward_stages", "num_steps")
    )
    lanes: list[dict[str, list[Action]]] = [defaultdict(list) for _ in range(num_devices)]
    for entry in csv.DictReader(io.StringIO(source)):
        lanes[int(entry["device"])][entry["lane"]].append(parse(entry["action"]))
    fused = parse_partition(row["partition_layers"]).fused
    shape = Shape(num_devices, stages, microbatches, backward_stages, steps, fused=fused)
    rows = tuple(tuple((lane, tuple(actions)) for lane, actions in device.items()) for device in lanes)
    schedule = Schedule(shape, rows, row["schedule"])
    return Timeline.from_csv(source, schedule, comm_total=row["comm_total_s"])


def draw_one(row: dict, results: Path) -> Figure:
    title = f"{style.method_name(row['schedule'])}, {style.model_name(row['model'])}: "
    title += f"makespan {row['makespan_s']:.3f} s, bubble {100 * row['bubble_makespan']:.2f} %"
    return draw_timeline(read_timeline(row, results), title)


def draw(rows: pd.DataFrame, results: Path) -> Figure:
    """A panel for each schedule (down) and model (across)."""
    with style.figure(13, 7.6) as figure:
        schedules, models = runs.schedules_of(rows), runs.models_of(rows)
        # Shared axes are slow, because each asks all others for their limits: set the limits of each.
        panels = figure.subplots(len(schedules), len(models), squeeze=False)
        drawn: list[Bars] = []
        by_name = rows.set_index(["schedule", "model"], drop=False)
        for down, schedule in enumerate(schedules):
            for across, model in enumerate(models):
                if (schedule, model) not in by_name.index:
                    panels[down, across].set_title("missing", fontsize=7.5, fontweight="normal")
                    continue
                row = by_name.loc[(schedule, model)]
                text = f"{row['makespan_s']:.2f} s, bubble {100 * row['bubble_makespan']:.2f} %"
                drawn.append(draw_small(panels[down, across], read_timeline(row.to_dict(), results), text))
            panels[down, 0].set_ylabel(f"{style.method_name(schedule)}\ndevice")
        for across, model in enumerate(models):
            bold = {"fontsize": 9.5, "fontweight": "bold"}
            panels[0, across].annotate(
                style.model_name(model), (0, 1), (0, 17), "axes fraction", "offset points", **bold
            )
            panels[-1, across].set_xlabel("time (s)")
            longest = rows.loc[rows["model"] == model, "makespan_s"].max()
            for axes in panels[:, across]:
                axes.set(xlim=(0, longest), ylim=(7.5, -0.5), yticks=[0, 7])
                axes.label_outer()
        _legend(figure, drawn, "outside lower center", 5)
        return figure


def _legend(figure: Figure, drawn: list[Bars], place: Any, ncols: int) -> None:
    kinds, heads = {kind for each in drawn for kind in each.kinds}, {kind for each in drawn for kind in each.heads}
    figure.legend(handles=handles(kinds, heads), loc=place, ncols=ncols)


def draw_small(axes: Axes, timeline: Timeline, title: str, per_second: float = 1.0) -> Bars:
    """The compute lanes of a timeline as bars without names, rasterised for a small file."""
    axes.grid(visible=False)
    bars = bars_of(timeline, 0.9, per_second)
    put_bars(axes, bars, 0.0, rasterized=True)
    axes.set_title(title, fontsize=7.5, fontweight="normal")
    return bars


# --- the atlas: a small timeline of every schedule ---------------------------------------------------------------

_ACROSS = 4
_FORWARDS_PER_S = 1000.0  # a forward of a device takes 1 ms in this experiment


@exhibited("atlas")
def atlas(experiments: Experiments) -> Shown:
    results = experiments.results
    rows = _with_timelines(runs.whole(experiments, "atlas", schedule="schedule"), results, "atlas")
    shown = rows.assign(
        makespan=_FORWARDS_PER_S * rows["makespan_s"],
        peak=rows["peak_in_flight"].map(max),
        bubble=100 * rows["bubble_makespan"],
        span=100 * rows["bubble_span"],
        over_ideal=100 * rows["bubble_over_ideal"],
    )
    found, whole = declared_table("atlas", shown), partial(draw_atlas, rows, results)
    each = {f"atlas_{row['schedule']}": row for row in rows.to_dict("records")}
    return _shown(found, whole, each, partial(draw_schedule, results=results))


def draw_schedule(row: dict, results: Path) -> Figure:
    title = f"{style.method_name(row['schedule'])}: bubble {100 * row['bubble_makespan']:.2f} %"
    return draw_timeline(read_timeline(row, results), title, unit="forwards", per_second=_FORWARDS_PER_S)


def draw_atlas(rows: pd.DataFrame, results: Path) -> Figure:
    """Panels in rows of four with one time axis."""
    down = -(-len(rows) // _ACROSS)
    with style.figure(13, 1.05 * down + 0.6) as figure:
        panels = figure.subplots(down, _ACROSS, sharex=True, sharey=True, squeeze=False).ravel()
        drawn: list[Bars] = []
        for axes, row in zip(panels, rows.to_dict("records"), strict=False):
            text = f"{style.method_name(row['schedule'])}, {100 * row['bubble_makespan']:.1f} %"
            drawn.append(draw_small(axes, read_timeline(row, results), text, _FORWARDS_PER_S))
        for axes in panels[len(rows) :]:
            axes.remove()
        figure.supxlabel("time (forwards)", fontsize=8.5)
        figure.supylabel("device", fontsize=8.5)
        panels[0].set(xlim=(0, _FORWARDS_PER_S * rows["makespan_s"].max()), ylim=(3.5, -0.5), yticks=[0, 3])
        _legend(figure, drawn, "outside upper center", 6)
        return figure
