"""A heavy head: what each schedule makes of it when its cut is searched as hard as RoundPipe's."""

import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure

from analysis.exhibits import style
from analysis.exhibits.exhibit import Table, by_schedule, exhibit_of
from analysis.records import runs
from analysis.records.experiments import Experiments

EXPERIMENT = "uneven_head"
_DEALT = ("roundpipe", runs.ONE_ROUND)


def numbers(experiments: Experiments) -> pd.DataFrame:
    """One row a schedule and head: `head`, `bubble` (%), `slower` (step time over RoundPipe's), `run_id`.

    RoundPipe's is the shorter of those with rounds of as many microbatches as devices and with one round.
    """
    found = runs.whole(experiments, EXPERIMENT, schedule="schedule", head="cost.head_share")
    dealt = found[found["schedule"].isin(_DEALT)].groupby("head")["makespan_s"].min()
    return pd.DataFrame(
        {
            "schedule": found["schedule"],
            "head": found["head"],
            "bubble": 100 * found["bubble_makespan"],
            "slower": found["makespan_s"] / found["head"].map(dealt),
            "run_id": found["run_id"],
        }
    ).reset_index(drop=True)


def answer(data: pd.DataFrame) -> str:
    """Which schedule is fastest at every head, in a sentence."""
    best = data.loc[data.groupby("head")["slower"].idxmin()]
    names = ", ".join(
        f"{row.head:g}: {style.method_name(row.schedule)}"
        + ("" if row.schedule in _DEALT else f" ({100 - 100 * row.slower:.1f} % less time than RoundPipe)")
        for row in best.itertuples()
    )
    return f"Shortest step by head: {names}."


def tabulate(data: pd.DataFrame) -> Table:
    """One row a schedule, two columns a head."""
    columns = {
        "bubble": ("head {:g}: bubble (%)", ".2f"),
        "slower": ("head {:g}: step time / RoundPipe's", ".3f"),
    }
    return by_schedule(data, "head", columns)


def draw(data: pd.DataFrame) -> Figure:
    """Bubble on the left, step time over RoundPipe's on the right; a curve a schedule."""
    shown = data.assign(name=data["schedule"].map(style.method_name))
    looks = [style.look_of(name) for name in data["schedule"].unique()]
    with style.figure(9.6, 3.6) as figure:
        left, right = figure.subplots(1, 2)
        for axes, column, text in ((left, "bubble", "bubble (%)"), (right, "slower", "step time / RoundPipe's")):
            sns.lineplot(
                shown,
                x="head",
                y=column,
                hue="name",
                style="name",
                palette={look.name: look.colour for look in looks},
                markers={look.name: look.marker for look in looks},
                dashes=False,
                legend="full",
                ax=axes,
            )
            axes.set_xlabel("work of the head / work of a device's layers")
            axes.set_ylabel(text)
        handles, names = left.get_legend_handles_labels()
        for axes in (left, right):
            axes.get_legend().remove()
        figure.legend(handles, names, loc="outside lower center", ncols=4)
        return figure


exhibit = exhibit_of("uneven_head", numbers, tabulate, draw, answer=answer)
