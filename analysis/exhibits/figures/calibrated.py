"""The machine at hand, calibrated: what `cost=analytic` predicts of the duel's schedules, and what they take."""

from collections.abc import Mapping
from functools import partial
from statistics import mean, median
from textwrap import fill

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.exhibits import style
from analysis.exhibits.cells import NOTHING, label, ours, short_cut, table
from analysis.exhibits.exhibit import Cell, Shown, columns_of, exhibited
from analysis.exhibits.figures.duel import MODELS, NAMES, Row, drawn, found_duels
from analysis.records.experiments import Experiments, MissingRuns, succeeded
from rpbench.run.modes.duel.rows import Ratio, drift, over_predicted, predictions

BAR = 0.15  # how far a prediction may be off

Duels = Mapping[str, Mapping[str, Row]]


@exhibited("calibrated")
def exhibit(experiments: Experiments) -> Shown:
    """The figure with its numbers."""
    duels = found_duels(_calibrated(experiments))
    columns = columns_of("calibrated")
    return Shown(
        draw=partial(draw, duels),
        table=table(columns, (_row(row) for rows in duels.values() for row in rows.values())),
        words={"bar": 100 * BAR, "answer": answer(duels)},
    )


def _calibrated(experiments: Experiments) -> pd.DataFrame:
    """The records that have predictions.

    Raises:
        MissingRuns: if none has.
    """
    column = "calibrated_makespans_s"
    rows = succeeded(experiments.cells("cpu_duel"))
    found = rows[rows[column].map(lambda value: isinstance(value, list))] if column in rows else rows[:0]
    if found.empty:
        raise MissingRuns("runs of experiment=cpu_duel with mode.calibrate=true")
    return found


def answer(duels: Duels) -> str:
    """How many predictions hold, in a sentence a model."""
    return " ".join(_answer(model, rows) for model, rows in duels.items())


def _answer(model: str, rows: Mapping[str, Row]) -> str:
    found = {name: over_predicted(row, "replay").median for name, row in rows.items()}
    far = [NAMES[name] for name, ratio in found.items() if abs(ratio - 1) > BAR]
    clock = [over_predicted(row, "wall").median for row in rows.values()]
    apart = median(drift(row) for row in rows.values())
    but = f" (not {', '.join(far)})" if far else ""
    return (
        f"{MODELS[model]}: by processor time {min(found.values()):.3f} to {max(found.values()):.3f} of the prediction, "
        f"{len(found) - len(far)} of {len(found)} within the band{but}; "
        f"by the clock {min(clock):.3f} to {max(clock):.3f}; its calibrations are {100 * apart:.0f} % apart."
    )


def _row(row: Row) -> list[Cell]:
    own = row["run_id"]
    foreign = [share for share in row["calibration_foreign_cores"] if share is not None]
    return [
        label(MODELS[row["model"]]),
        label(NAMES[row["contender"]]),
        Cell(row["partition_layers"], short_cut(row["partition_layers"]), (own,)),
        ours(median(predictions(row)), ".3f", own),
        ours(row["replay_makespan_s"], ".3f", own),
        ours(row["makespan_s"], ".3f", own),
        *(_ratio(over_predicted(row, clock), own) for clock in ("replay", "wall")),
        ours(row["foreign_cpu_share"], ".2f", own),
        ours(mean(foreign), ".2f", own) if foreign else NOTHING,
        ours(100 * drift(row), ".1f", own),
    ]


def _ratio(found: Ratio, own: str) -> Cell:
    return Cell(found.median, f"{found.median:.3f} ({found.low:.3f}–{found.high:.3f})", (own,))


# --- the figure ----------------------------------------------------------------------------------------------

_MARKS = (("replay", "processor time on the graph", style.VERMILION, "o"), ("wall", "clock", style.BLACK, "x"))
# The most that the axis shows: where other programs had the processor, the clock says nothing about a prediction.
TOP = 1.6


def draw(duels: Duels) -> Figure:
    """A panel a model: measured over predicted time of every contender, with the band."""
    with style.applied():
        figure = Figure(figsize=(8.6, 0.5 + 2.4 * len(duels)), layout="constrained")
        panels = figure.subplots(len(duels), 1, squeeze=False)[:, 0]
        for axes, (model, rows) in zip(panels, duels.items(), strict=True):
            _panel(axes, model, drawn(rows))
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=3)
        return figure


def _panel(axes: Axes, model: str, rows: Mapping[str, Row]) -> None:
    axes.axhspan(1 - BAR, 1 + BAR, color=style.SKY, alpha=0.25, lw=0, label=f"within {100 * BAR:.0f} %")
    axes.axhline(1, color="black", lw=0.6)
    outside = 0
    for shift, (clock, name, colour, marker) in zip((-0.12, 0.12), _MARKS, strict=True):
        found = [(place + shift, over_predicted(row, clock)) for place, row in enumerate(rows.values())]
        shown = [(place, ratio) for place, ratio in found if ratio.median <= TOP]
        beyond = [place for place, ratio in found if ratio.median > TOP]
        outside += len(beyond)
        if beyond:  # an empty line that is not clipped counts as a mark in the corner of the page
            axes.plot(beyond, [TOP] * len(beyond), "^", color=colour, clip_on=False, zorder=4)
        places = [place for place, _ in shown]
        errors = [[r.median - r.low for _, r in shown], [r.high - r.median for _, r in shown]]
        axes.errorbar(places, [r.median for _, r in shown], errors, fmt=marker, color=colour, capsize=2, label=name)
    axes.set_xticks(range(len(rows)), [fill(NAMES[name], 12) for name in rows], fontsize=6.2)
    axes.set_ylim(0.6, TOP)
    axes.set_ylabel("measured / predicted")
    axes.set_title(MODELS[model])
    if outside:
        words = f"▲ {outside} above {TOP:g}: other programs had the processor"
        axes.annotate(words, (1, 1), xycoords="axes fraction", ha="right", va="bottom", fontsize=7)
