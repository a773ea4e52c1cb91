"""From 8 to 1,024 devices with a fixed batch: idle time, and activations on the fullest device."""

from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from analysis.exhibits import style
from analysis.exhibits.exhibit import by_schedule, exhibit_of
from analysis.records import runs
from analysis.records.experiments import Experiments

EXPERIMENTS = ("thousand_devices", "thousand_devices_v")  # schedules in V placement take fewer devices

_LOOKS = style.looks("thousand_devices")
_DASHED = ("dapple", "zb_h2", "roundpipe_call")  # they share their colour with another curve
_TICKS = (0.2, 0.5, 1, 2, 5, 10, 20, 50)


def numbers(experiments: Experiments) -> pd.DataFrame:
    """One row for each schedule and number of devices: `bubble`, `span` (bubbles in %), `peak` and `run_id`."""
    found = pd.concat(
        [runs.whole(experiments, each, schedule="schedule", num_devices="num_devices") for each in EXPERIMENTS]
    )
    share = found["num_devices"] / found["num_backward_stages"]  # of a device's part of the model, in one stage
    return found.assign(
        bubble=100 * found["bubble_makespan"],
        span=(100 * found["bubble_span"]).clip(lower=0),
        peak=found["peak_in_flight"].map(max) * share,
    ).reset_index(drop=True)


def answer(data: pd.DataFrame) -> str:
    most = data["num_devices"].max()
    rows = data[data["num_devices"] == most].sort_values("bubble")
    best, worst = rows.iloc[0], rows.iloc[-1]
    one = data[data["schedule"] == "1f1b"].set_index("num_devices")["bubble"]
    return (
        f"1F1B idles {one.iloc[0]:.1f} % of the time on {one.index[0]} devices and {one[most]:.1f} % on {most:,}. "
        f"There {style.method_name(best['schedule'])} idles least, {best['bubble']:.1f} %, and "
        f"{style.method_name(worst['schedule'])} most, {worst['bubble']:.1f} %."
    )


_COLUMNS = {
    "bubble": ("p = {:,}: bubble (%)", ".2f"),
    "span": ("p = {:,}: bubble of span (%)", ".2f"),
    "peak": ("p = {:,}: peak", ".2f"),
}


def draw(data: pd.DataFrame) -> Figure:
    with style.figure(9.6, 3.9) as figure:
        left, right = figure.subplots(1, 2)
        most = data["num_devices"].max()
        largest = data[data["num_devices"] == most]["bubble"]
        _draw_curves(left, data, "bubble")
        left.set_title(f"Idle on {most:,} devices: {largest.min():.0f} to {largest.max():.0f} % of the time")
        left.set(ylabel="bubble of the makespan (%)", yscale="log")
        left.set_yticks(_TICKS, [f"{tick:g}" for tick in _TICKS])
        _draw_curves(right, data, "peak")
        right.set(title="Who binds stages keeps ever more of the batch", ylabel="peak activations (microbatches)")
        right.set_yscale("log", base=2)
        right.yaxis.set_major_formatter(lambda value, position: f"{value:,g}")
        for axes in (left, right):
            axes.minorticks_off()
        handles = [Line2D([], [], label=look.name, **_line(name, look)) for name, look in _LOOKS.items()]
        figure.legend(handles=handles, loc="outside lower center", ncols=5, handlelength=4)
        return figure


def _draw_curves(axes: Axes, data: pd.DataFrame, column: str) -> None:
    for name, look in _LOOKS.items():
        rows = data[data["schedule"] == name].sort_values("num_devices")
        axes.plot(rows["num_devices"], rows[column], **_line(name, look))
    counts = sorted(data["num_devices"].unique())
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [f"{count:,}" for count in counts])
    axes.set_xlabel("devices")


def _line(schedule: str, look: style.Look) -> dict[str, Any]:
    """GPipe's curve is wide with open markers because others cover it."""
    below = schedule == "gpipe"
    return {
        "color": look.colour,
        "marker": look.marker,
        "linestyle": "--" if schedule in _DASHED else "-",
        "linewidth": 3.5 if below else 1.3,
        "markersize": 9 if below else 5,
        "markerfacecolor": "none" if below else look.colour,
    }


exhibit = exhibit_of(
    "thousand_devices", numbers, by_schedule("num_devices", _COLUMNS, schedules=_LOOKS), draw, answer=answer
)
