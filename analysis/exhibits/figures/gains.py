"""What RoundPipe gains over every other schedule, each with the cut that is fastest for it."""

from functools import partial
from itertools import product

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from analysis.exhibits import style
from analysis.exhibits.cells import label, ours, table
from analysis.exhibits.exhibit import Cell, Exhibit, Table
from analysis.records import runs
from analysis.records.experiments import Experiments, index, succeeded
from rpbench.harness.config import swept

FLUSHING, ASYNCHRONOUS = "gains", "gains_async"
# RoundPipe's asynchronous mode, a call of as many microbatches after another.
BACK_TO_BACK = "steady_causal"
NUM_MICROBATCHES = 16
DEVICE_GIB = 24  # of the consumer devices the published timings were taken on


def exhibit(experiments: Experiments) -> Exhibit:
    """The figure with its numbers.

    Raises:
        MissingRuns: if a run behind it is not there.
    """
    data = numbers(experiments)
    return Exhibit(
        id="gains",
        title="What RoundPipe gains over every other schedule",
        caption=(
            "Time of a step over RoundPipe's, 16 microbatches on 8 devices, published layer times; every schedule with "
            "the cut into stages that simulates fastest for it, all of them allowed to recompute before the gradient "
            "arrives, RoundPipe's fused stage waiting for its input and its rounds as long as is best, 8 or 16. Above, "
            "schedules that flush against RoundPipe's single step; below, those that do not against its asynchronous "
            "mode with the published cut, both in their steady state. The artifact times backward as one piece: "
            "schedules that run its halves apart get them in the ratio of their FLOPs, which is derived, not measured, "
            "and recompute once for both. Open markers: with its fastest cut, the "
            f"fullest device would need more than {DEVICE_GIB} GiB; what a backward in halves keeps between the two is "
            "not counted. Transfers of streamed weights are taken as hidden, the sum over two copies of the weights "
            f"(Chimera, DualPipe) as free. {answer(data)}"
        ),
        evidence=("simulated", "derived"),
        command="; ".join(f"python -m rpbench -m experiment={name}" for name in (FLUSHING, ASYNCHRONOUS, BACK_TO_BACK)),
        draw=partial(draw, data),
        table=tabulate(data),
    )


def numbers(experiments: Experiments) -> pd.DataFrame:
    """One row a schedule and model: `slower` (step time over RoundPipe's), `peak_gib`, `flushes`, `run_ids`.

    Raises:
        MissingRuns: if a run behind it is not there.
    """
    flushing = _with_rival(_runs(experiments, FLUSHING), None)
    steady = succeeded(experiments.cells(BACK_TO_BACK))
    wanted = [(model, NUM_MICROBATCHES) for model in runs.MODELS]
    steady = index(steady, ("model", "num_microbatches"), wanted, BACK_TO_BACK)
    asynchronous = _with_rival(_runs(experiments, ASYNCHRONOUS), steady)
    return pd.concat([flushing.assign(flushes=True), asynchronous.assign(flushes=False)]).reset_index(drop=True)


def _runs(experiments: Experiments, experiment: str) -> pd.DataFrame:
    keys = ("schedule", "model")
    wanted = list(product(swept(experiment, "schedule"), swept(experiment, "model")))
    return index(succeeded(experiments.cells(experiment)), keys, wanted, experiment)


def _with_rival(rows: pd.DataFrame, steady: pd.DataFrame | None) -> pd.DataFrame:
    """The rows beside RoundPipe's, the faster of which is among them if there are no others."""
    is_rival = rows["schedule"].isin(["roundpipe", runs.ONE_ROUND])
    others = rows[~is_rival]
    rival = rows[is_rival] if steady is None else steady
    rival = rival.sort_values("tokens_per_s").groupby("model").last()
    rate = others["model"].map(rival["tokens_per_s"])
    return pd.DataFrame(
        {
            "schedule": others["schedule"],
            "model": others["model"],
            "slower": rate / others["tokens_per_s"],
            "peak_gib": others["peak_memory_bytes"].map(max) / 2**30,
            "bubble": 100 * others["bubble_makespan"],
            "run_ids": list(zip(others["run_id"], others["model"].map(rival["run_id"]), strict=True)),
        }
    )


def answer(data: pd.DataFrame) -> str:
    """How often RoundPipe is faster, and what beats it, in a sentence or two."""
    wins = (data["slower"] > 1).sum()
    fits = data[data["peak_gib"] <= DEVICE_GIB]
    beaten = data[data["slower"] < 1].sort_values("slower")
    lost = ", ".join(
        f"{style.method_name(row.schedule)} on {style.model_name(row.model)} ({row.slower:.3f})"
        for row in beaten.itertuples()
    )
    return (
        f"RoundPipe is faster in {wins} of {len(data)} cases, by up to {data['slower'].max():.2f}×; among those that "
        f"fit the devices in {(fits['slower'] > 1).sum()} of {len(fits)}."
        + (f" Faster than RoundPipe: {lost}." if lost else "")
    )


def tabulate(data: pd.DataFrame) -> Table:
    """One row a schedule: time over RoundPipe's and bytes on the fullest device, for every model."""
    columns = ["schedule", "flushes"]
    for model in runs.MODELS:
        columns += [f"{style.model_name(model)}: time / RoundPipe's", f"{style.model_name(model)}: peak (GiB)"]
    found = data.set_index(["schedule", "model"]).to_dict("index")
    return table(columns, (_row(found, name) for name in _order(data)))


def _row(found: dict, schedule: str) -> list[Cell]:
    first = found[schedule, runs.MODELS[0]]
    row = [label(style.method_name(schedule)), label("yes" if first["flushes"] else "no")]
    for model in runs.MODELS:
        numbers = found[schedule, model]
        row += [
            ours(numbers["slower"], ".3f", numbers["run_ids"]),
            ours(numbers["peak_gib"], ".1f", numbers["run_ids"][:1]),
        ]
    return row


def _order(data: pd.DataFrame) -> list[str]:
    """Schedules that flush, then the others; within each, the slowest first."""
    mean = data.assign(log=np.log(data["slower"])).groupby(["flushes", "schedule"])["log"].mean().reset_index()
    return list(mean.sort_values(["flushes", "log"], ascending=[False, False])["schedule"])


def draw(data: pd.DataFrame) -> Figure:
    """One panel a model, a row a schedule; the numbers beside the points."""
    order = _order(data)
    num_flushing = data[data["flushes"]]["schedule"].nunique()
    heights = {name: place + (place >= num_flushing) * 0.8 for place, name in enumerate(order)}
    with style.applied():
        figure = Figure(figsize=(12.5, 6.2), layout="constrained")
        panels = figure.subplots(1, len(runs.MODELS), sharex=True, sharey=True, squeeze=False)[0]
        for axes, model in zip(panels, runs.MODELS, strict=True):
            _draw_model(axes, data[data["model"] == model], heights)
            axes.axhline(num_flushing - 0.1, color=style.GREY, linewidth=0.8, linestyle="--")
            axes.set_title(style.model_name(model))
        panels[0].set_yticks(list(heights.values()), [style.method_name(name) for name in order])
        panels[0].set_ylim(max(heights.values()) + 0.6, -0.6)
        low, high = data["slower"].min(), data["slower"].max()
        room = 0.25 * (high - min(1, low))  # for the numbers
        panels[0].set_xlim(min(1, low) - room, high + room)
        panels[len(panels) // 2].set_xlabel("time of a step / RoundPipe's")
        figure.suptitle(_title(data))
        figure.legend(handles=_legend(), loc="outside lower center", ncols=4)
        return figure


def _title(data: pd.DataFrame) -> str:
    fits = data[data["peak_gib"] <= DEVICE_GIB]
    return (
        f"With every cut tuned, RoundPipe is faster in {(data['slower'] > 1).sum()} of {len(data)} cases, and in "
        f"{(fits['slower'] > 1).sum()} of the {len(fits)} that fit {DEVICE_GIB} GiB"
    )


def _draw_model(axes: Axes, rows: pd.DataFrame, heights: dict[str, float]) -> None:
    axes.grid(visible=True, axis="x")
    axes.grid(visible=False, axis="y")
    axes.axvline(1, color=style.VERMILION, linewidth=1.2)
    for row in rows.itertuples():
        height, fits = heights[row.schedule], row.peak_gib <= DEVICE_GIB
        axes.plot(
            row.slower,
            height,
            "o",
            color=style.BLUE if row.slower > 1 else style.VERMILION,
            markerfacecolor=None if fits else "white",
            markersize=5,
        )
        side, align = (6, "left") if row.slower > 1 else (-6, "right")  # away from RoundPipe's line
        place = (row.slower, height)
        axes.annotate(
            f"{row.slower:.2f}", place, (side, 0), textcoords="offset points", va="center", ha=align, fontsize=6.5
        )


def _legend() -> list[Line2D]:
    return [
        Line2D([], [], color=style.BLUE, marker="o", linestyle="", label=f"fits {DEVICE_GIB} GiB a device"),
        Line2D([], [], color=style.BLUE, marker="o", markerfacecolor="white", linestyle="", label="needs more"),
        Line2D([], [], color=style.VERMILION, marker="o", linestyle="", label="faster than RoundPipe"),
        Line2D(
            [],
            [],
            color=style.VERMILION,
            marker="o",
            markerfacecolor="white",
            linestyle="",
            label="faster, but needs more",
        ),
        Line2D([], [], color=style.VERMILION, label="RoundPipe (below the dashed line: asynchronous)"),
    ]
