"""RoundPipe against every schedule that fits at equal tuning, each distinct order once."""

from collections.abc import Mapping

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from analysis.exhibits import style
from analysis.exhibits.exhibit import NOTHING, Cell, Table, exhibit_of, label, ours, table
from analysis.exhibits.tables import comparison
from analysis.records import runs
from analysis.records.experiments import Experiments

CHAMPIONS = {False: "roundpipe", True: "roundpipe_async"}  # for rivals without and with late weights


def numbers(experiments: Experiments) -> pd.DataFrame:
    """One row for each distinct rival and model: `slower` (step time over RoundPipe's), `late`, `names`, `run_ids`."""
    ranked = comparison.distinct(comparison.contest_numbers(experiments)).to_dict("records")
    paces = {(row["model"], name): row for row in ranked for name in row["names"]}
    found = []
    for row in ranked:
        late = bool(row["staleness_steps"])
        own = paces.get((row["model"], CHAMPIONS[late]))
        if own is not None and not set(row["names"]) & set(CHAMPIONS.values()):
            beside = {name: row[name] for name in ("schedule", "names", "model")} | {"late": late}
            slower, run_ids = own["tokens_per_s"] / row["tokens_per_s"], (row["run_id"], own["run_id"])
            found.append(beside | {"slower": slower, "run_ids": run_ids})
    return pd.DataFrame(found)


def answer(data: pd.DataFrame) -> str:
    wins, losses = data[data["slower"] > 1], data[data["slower"] < 1]
    by_model = (
        f"{style.model_name(model)} {(wins['model'] == model).sum()} faster, {(losses['model'] == model).sum()} slower"
        for model in runs.models_of(data)
    )
    return (
        f"Of {len(data)} distinct rivals that fit, RoundPipe is faster than {len(wins)}{_most(wins)}, and slower than "
        f"{len(losses)}{_most(losses)}. {'; '.join(by_model)}."
    )


def _most(rows: pd.DataFrame) -> str:
    if rows.empty:
        return ""
    row = rows.loc[np.log(rows["slower"]).abs().idxmax()]
    factor = max(row["slower"], 1 / row["slower"])
    name, model = style.method_name(row["schedule"]), style.model_name(row["model"])
    return f" by up to {factor:.2f} times ({name} on {model})"


def tabulate(data: pd.DataFrame) -> Table:
    """A dash for a schedule that does not fit or has the order of another."""
    columns = ["schedule", "late", *(f"{style.model_name(model)}: time / RoundPipe's" for model in runs.MODELS)]
    found = {(row["schedule"], row["late"], row["model"]): row for row in data.to_dict("records")}
    return table([*columns, "same order"], (_row(found, *key) for key in _order(data)))


def _row(found: Mapping[tuple[str, bool, str], dict], schedule: str, late: bool) -> list[Cell]:
    rows = [found.get((schedule, late, model)) for model in runs.MODELS]
    others = sorted({name for row in rows if row is not None for name in row["names"][1:]})
    return [
        label(style.method_name(schedule)),
        label("yes" if late else "no"),
        *(NOTHING if row is None else ours(row["slower"], ".3f", row["run_ids"]) for row in rows),
        label(", ".join(map(style.method_name, others)) or "–"),
    ]


def _order(data: pd.DataFrame) -> list[tuple[str, bool]]:
    """Schedules without late weights, then the others; the slowest first."""
    mean = data.assign(log=np.log(data["slower"])).groupby(["late", "schedule"])["log"].mean().reset_index()
    mean = mean.sort_values(["late", "log"], ascending=[True, False])
    return [(row.schedule, row.late) for row in mean.itertuples()]


def draw(data: pd.DataFrame) -> Figure:
    order = _order(data)
    num_timely = sum(not late for _, late in order)
    heights = {key: place + (place >= num_timely) * 0.8 for place, key in enumerate(order)}
    with style.figure(12.5, 2 + 0.19 * len(order)) as figure:
        panels = style.model_panels(figure, runs.MODELS, sharex=True, sharey=True)
        for axes, model in zip(panels, runs.MODELS, strict=True):
            _draw_model(axes, data[data["model"] == model], heights)
            axes.axhline(num_timely - 0.1, color=style.GREY, linewidth=0.8, linestyle="--")
        panels[0].set_yticks(list(heights.values()), [style.method_name(name) for name, _ in order])
        panels[0].set_ylim(max(heights.values()) + 0.6, -0.6)
        _limit(panels[0], data)
        panels[len(panels) // 2].set_xlabel("time of a step / RoundPipe's (logarithmic)")
        figure.suptitle(
            f"At equal tuning, RoundPipe is faster than {(data['slower'] > 1).sum()} and slower than "
            f"{(data['slower'] < 1).sum()} of {len(data)} distinct rivals that fit"
        )
        handles = [
            style.point_key(style.Look("slower than RoundPipe", style.BLUE, "o")),
            style.point_key(style.Look("faster than RoundPipe", style.VERMILION, "o")),
            Line2D([], [], color=style.GREY, label="RoundPipe (below the dashed line: one step late)"),
        ]
        figure.legend(handles=handles, loc="outside lower center", ncols=3)
        return figure


def _limit(axes: Axes, data: pd.DataFrame) -> None:
    """Set limits with room for the numbers of the points, and ticks whose labels do not overlap."""
    low, high = min(data["slower"].min(), 1 / 1.1), max(data["slower"].max(), 1.1)
    room = max(1.6, (high / low) ** 0.3)
    near, far = room / low, room * high
    axes.set_xscale("log", base=2)
    axes.set_xlim(1 / near, far)
    apart = 2 if near * far < 64 else 4
    ticks = [apart**power for power in range(-4, 8) if 1 / near <= apart**power <= far]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()


def _draw_model(axes: Axes, rows: pd.DataFrame, heights: Mapping[tuple[str, bool], float]) -> None:
    style.grid_for_rows(axes)
    axes.axvline(1, color=style.GREY, linewidth=1.2)
    for row in rows.itertuples():
        height, won = heights[row.schedule, row.late], row.slower > 1
        axes.plot(row.slower, height, "o", color=style.BLUE if won else style.VERMILION, markersize=5)
        side, align = (6, "left") if won else (-6, "right")  # away from RoundPipe's line
        style.note(axes, f"{row.slower:.2f}", (row.slower, height), (side, 0), va="center", ha=align, fontsize=6.5)


exhibit = exhibit_of("gains", numbers, tabulate, draw, answer=answer)
