"""Equal stages with one burden: the bubble over the latency of a hop, and over the work of the head."""

import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure

from analysis.exhibits import style
from analysis.exhibits.exhibit import by_schedule, exhibit_of
from analysis.records import runs
from analysis.records.experiments import Experiments

_DEALT = ("roundpipe", runs.ONE_ROUND)


def hop_numbers(experiments: Experiments) -> pd.DataFrame:
    """One row for each schedule and `hop` (in forwards of a device): `family`, `bubble` (%), `run_id`."""
    found = runs.whole(experiments, "hop_latency", schedule="schedule", hop="cost.hop_ms")  # a forward takes 1 ms
    return found.assign(family=found["schedule"].map(style.family_of), bubble=100 * found["bubble_makespan"])


def hop_answer(data: pd.DataFrame) -> str:
    bubbles = data.pivot(index="schedule", columns="hop", values="bubble")
    lost = (bubbles.iloc[:, -1] - bubbles.iloc[:, 0]).sort_values()
    first, last = lost.index[0], lost.index[-1]
    return (
        f"From no hop to {bubbles.columns[-1]:g} forward times, {style.method_name(first)} loses "
        f"{lost.iloc[0]:.1f} points and {style.method_name(last)} {lost.iloc[-1]:.1f}."
    )


def hop_draw(data: pd.DataFrame) -> Figure:
    """A panel for each family of schedules, with the curves of the others behind it."""
    families = [family for family in style.FAMILIES if family in set(data["family"])]
    with style.figure(12.5, 2.2 * -(-len(families) // 4) + 0.3) as figure:
        panels = figure.subplots(-(-len(families) // 4), 4, sharex=True, sharey=True, squeeze=False).ravel()
        for axes, family in zip(panels, families, strict=False):
            sns.lineplot(
                data, x="hop", y="bubble", units="schedule", estimator=None, color=style.PALE, linewidth=0.6, ax=axes
            )
            shown = data[data["family"] == family].assign(name=lambda rows: rows["schedule"].map(style.method_name))
            sns.lineplot(shown, x="hop", y="bubble", hue="name", style="name", markers=True, dashes=False, ax=axes)
            axes.set(title=family, xlabel="hop time / forward time", ylabel="bubble (%)")
            axes.legend(title=None, fontsize=6.4)
        for number, axes in enumerate(panels[len(families) :], start=len(families)):
            axes.remove()
            panels[number - 4].tick_params(labelbottom=True)  # the panel above an empty place
            panels[number - 4].xaxis.label.set_visible(True)
        return figure


_HOPS = by_schedule("hop", {"bubble": ("hop {:g}: bubble (%)", ".2f")})
exhibit_of("hop_latency", hop_numbers, _HOPS, hop_draw, answer=hop_answer)


# --- a heavy head: all cuts are searched ------------------------------------------------------------------------


def head_numbers(experiments: Experiments) -> pd.DataFrame:
    """One row for each schedule and `head`: `bubble` (%), `slower` (step time over RoundPipe's), `run_id`.

    RoundPipe's time is the shorter one with rounds of as many microbatches as devices or with one round.
    """
    found = runs.whole(experiments, "uneven_head", schedule="schedule", head="cost.head_share")
    dealt = found[found["schedule"].isin(_DEALT)].groupby("head")["makespan_s"].min()
    slower = found["makespan_s"] / found["head"].map(dealt)
    return found.assign(bubble=100 * found["bubble_makespan"], slower=slower)


def head_answer(data: pd.DataFrame) -> str:
    best = data.loc[data.groupby("head")["slower"].idxmin()]
    names = ", ".join(
        f"{row.head:g}: {style.method_name(row.schedule)}"
        + ("" if row.schedule in _DEALT else f" ({100 - 100 * row.slower:.1f} % less time than RoundPipe)")
        for row in best.itertuples()
    )
    return f"Shortest step by head: {names}."


def head_draw(data: pd.DataFrame) -> Figure:
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
            axes.set(xlabel="work of the head / work of a device's layers", ylabel=text)
            axes.get_legend().remove()
        style.legend_below(figure, left, ncols=4)
        return figure


_HEADS = by_schedule(
    "head", {"bubble": ("head {:g}: bubble (%)", ".2f"), "slower": ("head {:g}: step time / RoundPipe's", ".3f")}
)
exhibit_of("uneven_head", head_numbers, _HEADS, head_draw, answer=head_answer)
