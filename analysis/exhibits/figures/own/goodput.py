"""Goodput over the mean time between failures, for five policies, beside their papers."""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.exhibits import style
from analysis.exhibits.exhibit import Cell, Table, exhibit_of, label, ours, table, theirs
from analysis.records import runs
from analysis.records.experiments import Experiments
from analysis.records.published import look_up, published

EXPERIMENT = "goodput"
HOUR_S = 3600.0
POLICIES = style.looks("policies")
NO_FIGURE = "none of this kind in what we have read"
OVER_BAMBOO = "throughput over Bamboo under failures (at most)"


def numbers(experiments: Experiments) -> pd.DataFrame:
    """One row for each policy, failure rate and seed: `hours` between failures of the run, `goodput` (%), `run_id`."""
    keys = {"policy": "mode.policy", "mean_between_s": "mode.mean_between_s", "seed": "seed"}
    found = runs.whole(experiments, EXPERIMENT, **keys)
    hours = found["mean_between_s"] / found["num_ranks"] / HOUR_S
    return found.assign(hours=hours, goodput=100 * found["goodput"]).reset_index(drop=True)


def over_bamboo(data: pd.DataFrame) -> pd.Series:
    """ReCycle's mean goodput over Bamboo's, by hours between failures."""
    means = data.groupby(["policy", "hours"])["goodput"].mean()
    ratio: pd.Series = means["recycle"] / means["bamboo"]
    return ratio


def answer(data: pd.DataFrame) -> str:
    often = data[data["hours"] == data["hours"].min()].groupby("policy")["goodput"].mean().sort_values()
    least, most = often.index[0], often.index[-1]
    return (
        f"With a failure every {60 * data['hours'].min():.0f} minutes {often.iloc[-1]:.1f} % is left by "
        f"{POLICIES[most].name}, {often.iloc[0]:.1f} % by {POLICIES[least].name}."
    )


def tabulate(data: pd.DataFrame) -> Table:
    hours = sorted(data["hours"].unique())
    columns = ("policy", *(f"every {hour:g} h: goodput (%)" for hour in hours), "its paper's figure", "which")
    return table(columns, (_row(data[data["policy"] == policy], policy, hours) for policy in POLICIES))


def _row(data: pd.DataFrame, policy: str, hours: list[float]) -> list[Cell]:
    groups = (data[data["hours"] == hour] for hour in hours)
    cells = [ours(draws["goodput"].mean(), ".1f", draws["run_id"]) for draws in groups]
    said, known = published("failures").query("policy == @policy and unit == 'ratio'"), [label("–"), label(NO_FIGURE)]
    if not said.empty:
        first = said.iloc[0]
        source = f"analysis/published/failures.csv, {first['quantity']}: {first['source']}"
        known = [theirs(first["value"], ".2f", source), label(first["quantity"])]
    return [label(POLICIES[policy].name), *cells, *known]


def draw(data: pd.DataFrame) -> Figure:
    """Left: goodput of every policy. Right: ReCycle over Bamboo, with ReCycle's claim."""
    with style.figure(8.6, 3.4) as figure:
        left, right = figure.subplots(1, 2, width_ratios=(1.6, 1))
        for policy, look in POLICIES.items():
            draws = data[data["policy"] == policy].groupby("hours")["goodput"]
            mean, least, most = draws.mean(), draws.min(), draws.max()
            left.plot(mean.index, mean, color=look.colour, marker=look.marker, label=look.name)
            left.fill_between(mean.index, least, most, color=look.colour, alpha=0.12, linewidth=0)
        left.set_ylim(bottom=20)
        left.set_ylabel("goodput (% of the pace without failures)")
        _hours(left, data)
        ratio, claimed = over_bamboo(data), look_up("failures", "value", quantity=OVER_BAMBOO).value
        right.plot(ratio.index, ratio, color=style.GREEN, marker="^", label="ours, simulated")
        right.axhline(claimed, color=style.BLACK, linestyle="--", label=f"ReCycle's abstract: up to {claimed:g}")
        right.set(ylabel="goodput of detours over shadows", ylim=(0.9, 1.9))
        words = "copies, shadows, morphing: no figure\nof goodput in what we have read"
        right.annotate(words, (0.03, 0.03), xycoords="axes fraction", fontsize=7)
        _hours(right, data)
        left.legend(loc="lower right", title=None)
        right.legend(loc="upper right", title=None)
        return figure


def _hours(axes: Axes, data: pd.DataFrame) -> None:
    hours = sorted(data["hours"].unique())
    axes.set_xscale("log")
    axes.set_xticks(hours, [f"{hour:g}" for hour in hours])
    axes.set_xticks([], minor=True)
    axes.set_xlabel("mean time between failures of the run (h)")


exhibit = exhibit_of("goodput", numbers, tabulate, draw, answer=answer)
