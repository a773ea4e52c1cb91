"""Figure 2: is it faster to recompute a layer's forward or to reload its activations from host memory?"""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from analysis.exhibits import style
from analysis.exhibits.exhibit import Table, declared_table, exhibit_of
from analysis.records import runs
from analysis.records.experiments import Experiments
from analysis.records.published import PUBLISHED_MODELS, Published, look_up

CLUSTER = "8x_rtx4090"

_RECOMPUTE, _RELOAD = style.ORANGE, style.BLUE


def numbers(experiments: Experiments, cluster: str = CLUSTER) -> pd.DataFrame:
    """One row for each model: `cluster`, times in ms, ratios and run ids, by the artifact's and the corrected count."""
    data = pd.DataFrame({"model": list(runs.MODELS)}).assign(cluster=cluster)
    for count in ("artifact", "corrected"):
        found = runs.closed_forms(experiments, cluster, count).reset_index(drop=True)
        data[f"recompute_ms_{count}"] = 1000 * found["recompute_s"]
        data[f"reload_ms_{count}"] = 1000 * found["reload_s"]
        data[f"ratio_{count}"] = found["reload_over_recompute"]
        data[f"run_{count}"] = found["run_id"]
    return data.assign(ratio_half_corrected=data["reload_ms_artifact"] / data["recompute_ms_corrected"])


def answer(data: pd.DataFrame) -> str:
    artifact, corrected = data["ratio_artifact"], data["ratio_corrected"]
    always = artifact.min() > 1 and corrected.min() > 1
    return (
        f"Reloading takes {artifact.min():.2f} to {artifact.max():.2f} times as long as recomputing, and "
        f"{corrected.min():.2f} to {corrected.max():.2f} times with the corrected count: recomputing wins for "
        f"{'every model' if always else 'some models only'}."
    )


def tabulate(data: pd.DataFrame) -> Table:
    rows = data.to_dict("records")
    for row in rows:
        for column in ("recompute_ms", "recompute_corrected_ms", "reload_ms", "ratio", "ratio_corrected"):
            name = "ratio_corrected_printed" if column in row else column
            row[name], row[f"{column}_in"] = _published(row, column)
    return declared_table("figure2", rows)


def _published(row: dict, column: str) -> Published:
    """The published value of a model on the figure's cluster."""
    if row["cluster"] != CLUSTER:
        return Published(None, "")
    return look_up("figure2", column, model=PUBLISHED_MODELS[row["model"]])


def draw(data: pd.DataFrame) -> Figure:
    with style.figure(9.5, 3.4) as figure:
        times, ratios = figure.subplots(1, 2, width_ratios=(3, 2))
        for place, row in enumerate(data.to_dict("records")):
            for offset, what, count, column in (
                (-0.3, "recompute", "artifact", "recompute_ms"),
                (-0.1, "recompute", "corrected", "recompute_corrected_ms"),
                (0.1, "reload", "artifact", "reload_ms"),
                (0.3, "reload", "corrected", ""),
            ):
                colour = _RECOMPUTE if what == "recompute" else _RELOAD
                known = _published(row, column).value if column else None
                _bar(times, place + offset, row[f"{what}_ms_{count}"], colour, count == "corrected", known, ".1f")
            published = _published(row, "ratio").value
            _bar(ratios, place - 0.11, row["ratio_artifact"], style.PALE, False, published, ".2f")
            _bar(ratios, place + 0.11, row["ratio_corrected"], style.PALE, True, None, ".2f")
        names = [style.model_name(model).replace(" ", "\n") for model in data["model"]]
        for axes in (times, ratios):
            axes.set_xticks(range(len(data)), names, fontsize=7)
            axes.margins(y=0.12)
        times.set(title="One layer, 4 × 2,048 tokens", ylabel="time (ms)")
        ratios.set(title="Reload over recompute", ylabel="ratio")
        ratios.axhline(1, color=style.GREY, linewidth=0.8, linestyle=":")
        has_published = (data["cluster"] == CLUSTER).any()
        handles = [
            style.bar_key("recompute", _RECOMPUTE),
            style.bar_key("reload", _RELOAD),
            style.bar_key("reload / recompute", style.PALE),
            style.bar_key("true width of the heads", hatch="...."),
            *([Line2D([], [], color="black", linewidth=1.8, label="published")] if has_published else []),
        ]
        figure.legend(handles=handles, loc="outside lower center", ncols=5)
        return figure


def _bar(axes: Axes, x: float, value: float, colour: str, corrected: bool, published: float | None, form: str) -> None:
    hatch = "...." if corrected else ""
    axes.bar(x, value, 0.19, color=colour, edgecolor="black", linewidth=0.5, hatch=hatch)
    style.note(axes, format(value, form), (x, value), (0, 2), ha="center", fontsize=6, rotation=90, va="bottom")
    if published is not None:
        axes.plot([x - 0.1, x + 0.1], [published] * 2, color="black", linewidth=1.8)


exhibit = exhibit_of("figure2", numbers, tabulate, draw, answer=answer)
