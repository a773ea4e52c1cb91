"""Figure 3: the bubbles of interleaved schedules above their ideal."""

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from analysis.exhibits import style
from analysis.exhibits.exhibit import Table, declared_table, exhibit_of, wide
from analysis.exhibits.figures.paper.figure2 import CLUSTER
from analysis.exhibits.tables.published_cells import published_of
from analysis.records import runs
from analysis.records.experiments import Experiments
from analysis.records.published import PUBLISHED_MODELS, Published, look_up

SCHEDULES = ("interleaved_1f1b", "looped_bfs")


def numbers(experiments: Experiments) -> pd.DataFrame:
    """One row for each `model` and `bar` (ideal or a schedule): `bubble`, `published` (%), `source`, `run_id`."""
    bars = []
    for row in runs.closed_forms(experiments, CLUSTER, "artifact").to_dict("records"):
        published = look_up("figure3", "ideal_bubble_percent", model=PUBLISHED_MODELS[row["model"]])
        bars.append(_bar(row, "ideal", row["ideal_bubble"], published))
    for row in runs.calls(experiments, schedules=SCHEDULES).to_dict("records"):
        published = published_of(row, "bubble_ratio_percent")
        bars.append(_bar(row, row["schedule"], row["bubble_makespan"], published))
    return pd.DataFrame(bars)


def _bar(row: dict, bar: str, bubble: float, published: Published) -> dict:
    own = {"model": row["model"], "bar": bar, "bubble": 100 * bubble, "run_id": row["run_id"]}
    return own | {"published": published.value, "source": published.source}


def answer(data: pd.DataFrame) -> str:
    bubbles = data.pivot(index="model", columns="bar", values="bubble")
    ratio = bubbles[list(SCHEDULES)].min(axis=1) / bubbles["ideal"]
    nearest, farthest = ratio.idxmin(), ratio.idxmax()
    return (
        f"The better of the two idles {ratio.min():.2f} times the ideal ({style.model_name(nearest)}) to "
        f"{ratio.max():.2f} times ({style.model_name(farthest)})."
    )


def tabulate(data: pd.DataFrame) -> Table:
    return declared_table("figure3", wide(data, ["model"], "bar").loc[runs.models_of(data)].reset_index())


def draw(data: pd.DataFrame) -> Figure:
    looks = {"ideal": (style.PALE, "ideal (closed form)")}
    looks |= {name: (style.METHODS[name].colour, f"{style.METHODS[name].name}, simulated") for name in SCHEDULES}
    hatches = {"ideal": "", "interleaved_1f1b": "", "looped_bfs": ".."}
    models = runs.models_of(data)
    with style.figure(7, 3.2) as figure:
        axes = figure.subplots()
        for number, (bar, (colour, _)) in enumerate(looks.items()):
            rows = data[data["bar"] == bar].set_index("model").loc[models]
            for place, (bubble, published) in enumerate(zip(rows["bubble"], rows["published"], strict=True)):
                x = place + 0.27 * (number - 1)
                axes.bar(x, bubble, 0.25, color=colour, edgecolor="black", hatch=hatches[bar])
                axes.plot([x - 0.14, x + 0.14], [published] * 2, color="black", linewidth=1.8)
                style.note(axes, f"{bubble:.1f}", (x, bubble), (0, 3), ha="center", fontsize=6.5)
        axes.set_xticks(range(len(models)), [style.model_name(model) for model in models])
        axes.set_ylabel("bubble (% of devices × makespan)")
        bars = [style.bar_key(name, colour, hatches[bar]) for bar, (colour, name) in looks.items()]
        published = Line2D([], [], color="black", linewidth=1.8, label="published")
        figure.legend(handles=[*bars, published], loc="outside lower center", ncols=4)
        return figure


exhibit = exhibit_of("figure3", numbers, tabulate, draw, answer=answer)
