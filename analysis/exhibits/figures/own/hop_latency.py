"""The cost of a hop's latency for each schedule: the bubble against hop time over forward time."""

import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure

from analysis.exhibits import style
from analysis.exhibits.exhibit import Table, by_schedule, exhibit_of
from analysis.records import runs
from analysis.records.experiments import Experiments

EXPERIMENT = "hop_latency"


def numbers(experiments: Experiments) -> pd.DataFrame:
    """One row a schedule and hop: `hop` (forwards of a device's share), `bubble` (% of the makespan), `run_id`."""
    found = runs.whole(experiments, EXPERIMENT, schedule="schedule", hop="cost.hop_ms")  # a forward takes 1 ms
    return pd.DataFrame(
        {
            "schedule": found["schedule"],
            "family": found["schedule"].map(style.family_of),
            "hop": found["hop"],
            "bubble": 100 * found["bubble_makespan"],
            "run_id": found["run_id"],
        }
    ).reset_index(drop=True)


def answer(data: pd.DataFrame) -> str:
    """Who loses least and most between no hop and the longest, in a sentence."""
    bubbles = data.pivot(index="schedule", columns="hop", values="bubble")
    lost = (bubbles.iloc[:, -1] - bubbles.iloc[:, 0]).sort_values()
    first, last = lost.index[0], lost.index[-1]
    return (
        f"From no hop to {bubbles.columns[-1]:g} forward times, {style.method_name(first)} loses "
        f"{lost.iloc[0]:.1f} points and {style.method_name(last)} {lost.iloc[-1]:.1f}."
    )


def tabulate(data: pd.DataFrame) -> Table:
    """One row a schedule, one column a hop."""
    return by_schedule(data, "hop", {"bubble": ("hop {:g}: bubble (%)", ".2f")})


def draw(data: pd.DataFrame) -> Figure:
    """One curve a schedule, one panel a family, all others pale behind it."""
    families = [family for family in style.FAMILIES if family in set(data["family"])]
    with style.figure(12.5, 2.2 * -(-len(families) // 4) + 0.3) as figure:
        panels = figure.subplots(-(-len(families) // 4), 4, sharex=True, sharey=True, squeeze=False).ravel()
        for axes, family in zip(panels, families, strict=False):
            sns.lineplot(
                data, x="hop", y="bubble", units="schedule", estimator=None, color=style.PALE, linewidth=0.6, ax=axes
            )
            shown = data[data["family"] == family].assign(name=lambda rows: rows["schedule"].map(style.method_name))
            sns.lineplot(shown, x="hop", y="bubble", hue="name", style="name", markers=True, dashes=False, ax=axes)
            axes.set_title(family)
            axes.set_xlabel("hop time / forward time")
            axes.set_ylabel("bubble (%)")
            axes.legend(title=None, fontsize=6.4)
        for number, axes in enumerate(panels[len(families) :], start=len(families)):
            axes.remove()
            panels[number - 4].tick_params(labelbottom=True)  # what stands above an empty place
            panels[number - 4].xaxis.label.set_visible(True)
        return figure


exhibit = exhibit_of("hop_latency", numbers, tabulate, draw, answer=answer)
