"""Figures 10 to 13: every system's predicted throughput and longest sequence, beside the published ones.

The predictions are the committed tables of `analysis/predictions/`, the measurements those of `analysis/published/`; a
new measurement needs a row there and nothing else.
"""

from functools import partial
from itertools import combinations
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.exhibits import style
from analysis.exhibits.exhibit import Cell, Shown, declared_table, exhibited, theirs
from analysis.exhibits.figures.paper import systems
from analysis.predictions.tables import read
from analysis.records.experiments import Experiments
from analysis.records.published import A800, OUR_MODELS, RTX4090, models_in

# Table -> its column in the predictions, its column as published, and its name.
_QUANTITIES = {
    "throughput": ("tokens_per_s", "tokens_per_s", "tokens/s"),
    "max_seq_len": ("max_seq_len_k", "max_seq_len_published_k", "longest sequence (1,024 tokens)"),
}


def numbers(name: str, platform: str) -> pd.DataFrame:
    """One row for each system and model: `predicted`, `low`, `high`, `status`, `known`, `known_status`, `ratio`."""
    column, known_column, _ = _QUANTITIES[name]
    ours = pd.DataFrame(read(name))
    ours = ours[(ours["platform"] == platform) & (ours.get("num_gpus", "8") == "8")]
    known = systems.numbers(name, known_column, platform).rename(columns={"value": "known", "status": "known_status"})
    known = known[~known["source"].str.contains("README")]  # the bars of the figure alone
    keys = ["system", "model"]
    found = ours.merge(known.drop(columns="source"), "left", keys).fillna({"known_status": ""})
    for field, end in (("predicted", ""), ("low", "_low"), ("high", "_high")):
        found[field] = found[f"{column}{end}"].replace("", "nan").astype(float)
    found["ratio"] = found["predicted"] / found["known"]
    return found[[*keys, "status", "predicted", "low", "high", "known", "known_status", "ratio"]]


def agreement(data: pd.DataFrame) -> tuple[int, int]:
    """The number of pairs of systems on a model whose order is predicted, and of all pairs."""
    same = total = 0
    for _, rows in data.dropna(subset=["predicted", "known"]).groupby("model"):
        for (_, a), (_, b) in combinations(rows.iterrows(), 2):
            total += 1
            same += (a["predicted"] > b["predicted"]) == (a["known"] > b["known"])
    return same, total


def answer(data: pd.DataFrame) -> str:
    both = data.dropna(subset=["ratio"])
    if both.empty:
        return "Nothing measured is known here yet: a measurement is drawn beside its prediction once it is."
    same, total = agreement(data)
    stated = data[data["known_status"] != ""]
    right = int((stated["status"] == stated["known_status"]).sum())
    off = (both["ratio"] - 1).abs()
    return (
        f"Predicted over published: median off by {off.median():.1%}, largest by {off.max():.0%}; "
        f"{right} of {len(stated)} verdicts agree, and the order of {same} of {total} pairs of systems."
    )


def _shown(identity: str, name: str, platform: str, _: Experiments) -> Shown:
    data = numbers(name, platform)
    known = data["known"].notna().any()
    words = {"answer": answer(data), "published": " and published" if known else ""}
    evidence = ("predicted", "published") if known else ("predicted",)
    drawn = partial(draw, data, _QUANTITIES[name][2])
    rows = (_row(row, name, platform) for row in data.to_dict("records"))
    return Shown(declared_table(identity, rows), drawn, words=words, evidence=evidence)


for _identity, _name, _platform in (
    ("figure10_predicted", "throughput", RTX4090),
    ("figure11_predicted", "max_seq_len", RTX4090),
    ("figure12_predicted", "throughput", A800),
    ("figure13_predicted", "max_seq_len", A800),
):
    exhibited(_identity)(partial(_shown, _identity, _name, _platform))


def _row(row: dict, name: str, platform: str) -> dict:
    place = f"{name}.csv, {row['system']}, {platform}, {row['model']}"
    source, measured = f"analysis/predictions/{place}", f"analysis/published/{place}: measured by its source"
    predicted = _value(row["predicted"], row["status"], source)
    known = _value(row["known"], row["known_status"], measured)
    return row | {"model": OUR_MODELS[row["model"]], "predicted": predicted, "known": known, "source": source}


def _value(value: float | None, status: str, source: str) -> Cell:
    """A number, or the word in its place."""
    return Cell(None, status, source=source) if pd.isna(value) and status else theirs(value, ",.0f", source)


def draw(data: pd.DataFrame, quantity: str) -> Figure:
    """A panel for each model with the prediction of every system and, above it, the published value."""
    with style.figure(11.5, 4.6) as figure:
        names = list(dict.fromkeys(data["system"]))
        models = models_in(data)
        panels = style.model_panels(figure, models, sharey=True)
        for axes, name in zip(panels, models.values(), strict=True):
            _draw_model(axes, data[data["model"] == name].set_index("system"), names)
        panels[0].set_yticks(range(len(names)), [style.method_name(system) for system in names])
        panels[0].set_ylim(len(names) - 0.4, -0.6)
        bars = "bar and number: predicted, with its interval"
        if data["known"].notna().any():
            bars = "hatched upper bar: published; lower bar and number: predicted, (×) over published"
        figure.supxlabel(f"{quantity}; {bars}", fontsize=8.5)
        return figure


def _draw_model(axes: Axes, rows: pd.DataFrame, names: list[str]) -> None:
    highest = rows[["high", "known"]].max().max()
    room = 1.75 * highest if highest > 0 else 1.0
    for height, system in enumerate(names):
        row = rows.loc[system]
        looks: dict[str, Any] = {"color": style.METHODS[system].colour, "edgecolor": "black"}
        if pd.notna(row["known"]):
            axes.barh(height - 0.2, row["known"], 0.36, hatch=style.HATCHES["published"], **looks)
        elif row["known_status"]:
            axes.text(0.02 * room, height - 0.2, row["known_status"], va="center", fontsize=6.5)
        if pd.isna(row["predicted"]):
            axes.text(0.02 * room, height + 0.2, f"{row['status']} (predicted)", va="center", fontsize=6.5)
            continue
        axes.barh(height + 0.2, row["predicted"], 0.36, alpha=0.75, **looks)
        axes.hlines(height + 0.2, row["low"], row["high"], color="black", linewidth=1)
        over = f" ({row['ratio']:.2f}×)" if pd.notna(row["ratio"]) else ""
        end = row[["high", "known"]].max() + 0.02 * room
        axes.text(end, height, f"{row['predicted']:,.0f}{over}", va="center", fontsize=6.5)
    axes.set_xlim(0, room)
    style.grid_for_rows(axes, num_ticks=4)
