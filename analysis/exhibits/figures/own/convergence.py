"""The cost of late gradients: loss over tokens and simulated time, for synchronous and asynchronous pipelines.

The goal of all methods is GPipe's loss after `SHARE` of the tokens: the median over seeds of the mean over `SMOOTH`
batches. The cost in tokens of a method that steps after every microbatch is counted against the flushed method that
does the same, with that method's goal.
"""

from collections.abc import Mapping, Sequence
from itertools import product
from math import inf, isinf
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.exhibits import style
from analysis.exhibits.exhibit import Table, declared_table, exhibit_of, ranged
from analysis.records.experiments import Experiments, index, succeeded

SHARE = 0.75
SMOOTH = 4  # points a curve is averaged over
PLAIN, ONE_BY_ONE = "gpipe", "one_by_one"  # flushed; the second is 1F1B of single microbatches


class Spread(NamedTuple):
    """Median, least and most over seeds; infinite if a seed never reached the goal."""

    median: float
    least: float
    most: float


def goal_of(data: pd.DataFrame, method: str = PLAIN) -> float:
    plain = data[data["method"] == method]
    at = round(SHARE * len(plain["losses"].iloc[0])) - SMOOTH
    return float(np.median([smoothed(losses)[at] for losses in plain["losses"]]))


def reached(data: pd.DataFrame, over: str, goal: float) -> pd.Series:
    """The first point of every run at or below a goal, in `tokens` or `seconds`; infinite without one."""
    found = []
    for losses, points in zip(data["losses"], data[over], strict=True):
        below = np.flatnonzero(smoothed(losses) <= goal)
        found.append(float(points[SMOOTH - 1 :][below[0]]) if len(below) else inf)
    return pd.Series(found, index=data.index)


def spread(values: Sequence[float]) -> Spread:
    return Spread(float(np.median(values)), min(values), max(values))


def token_multiples(data: pd.DataFrame, by_batch: Sequence[str]) -> dict[str, Spread]:
    """Tokens to the goal of the flushed method that steps as often, over that method's, seed by seed.

    The methods `by_batch` step once a batch, the others after every microbatch.
    """
    found = {}
    for plain, often in ((PLAIN, False), (ONE_BY_ONE, True)):
        runs = data.assign(needed=reached(data, "tokens", goal_of(data, plain)))
        needed = runs.set_index(["method", "seed"])["needed"]
        for method in data["method"].unique():
            if (method not in by_batch) == often:
                pairs = [(own, needed[plain, seed]) for seed, own in needed[method].items()]
                found[method] = spread([inf if isinf(base) else own / base for own, base in pairs])
    return found


def smoothed(values: np.ndarray) -> np.ndarray:
    """Means over `SMOOTH` consecutive points."""
    return np.convolve(values, np.ones(SMOOTH) / SMOOTH, mode="valid")


METHODS = style.looks("convergence")  # by schedule
# These step once a batch, the others after every microbatch.
BY_BATCH = ("gpipe", "roundpipe", "roundpipe_async", "pipedream_2bw", "xpipe")
SEEDS = (0, 1, 2)
EXPERIMENTS = ("convergence", "convergence_one_by_one")  # the second is that of `ONE_BY_ONE`
BATCH = 4  # microbatches of each point
LAST = 8  # points averaged for the final loss


def numbers(experiments: Experiments) -> pd.DataFrame:
    """One row for each method and seed: `losses`, `tokens` and `seconds` of its points, and other fields."""
    late, plain = (succeeded(experiments.cells(experiment)) for experiment in EXPERIMENTS)
    rows = pd.concat([late.assign(method=late["schedule"]), plain.assign(method=ONE_BY_ONE)], ignore_index=True)
    rows = index(rows, ("method", "seed"), list(product(METHODS, SEEDS)), EXPERIMENTS[0]).to_dict("records")
    return pd.DataFrame([{"method": row["method"], "seed": row["seed"], **_points(row)} for row in rows])


def _points(row: Mapping[str, Any]) -> dict[str, Any]:
    each = BATCH // int(row["num_microbatches"])
    losses = np.asarray(row["loss_curve"]).reshape(-1, each).mean(axis=1)
    seconds = np.asarray(row["loss_curve_s"]).reshape(-1, each).max(axis=1)
    of_microbatch = row["tokens_per_step"] * row["num_updates"] / (len(losses) * BATCH)
    return {
        "losses": losses,
        "tokens": of_microbatch * BATCH * np.arange(1, len(losses) + 1),
        "seconds": seconds,
        "last": float(losses[-LAST:].mean()),
        "pace": row["tokens_per_s"],
        "num_updates": row["num_updates"],
        "staleness": row["staleness_steps"],
        "versions": row["weight_versions"],
        "run_id": row["run_id"],
    }


def answer(data: pd.DataFrame) -> str:
    last = data.groupby("method")["last"].median()
    parts = []
    for own, base in ((True, PLAIN), (False, ONE_BY_ONE)):
        gaps = {m: last[m] - last[base] for m in METHODS if (m in BY_BATCH) == own and m != base}
        listed = ", ".join(f"{METHODS[method].name} {gap:+.3f}" for method, gap in gaps.items())
        parts.append(f"against {METHODS[base].name} ({last[base]:.3f}): {listed}")
    return f"Loss at the end {'; '.join(parts)}."


def tabulate(data: pd.DataFrame) -> Table:
    goal, multiples = goal_of(data), token_multiples(data, BY_BATCH)
    data = data.assign(**{f"{over}_needed": reached(data, over, goal) for over in ("tokens", "seconds")})
    rows = (_row(method, data[data["method"] == method], multiples[method]) for method in METHODS)
    return declared_table("convergence", rows)


def _row(method: str, rows: pd.DataFrame, multiple: Spread) -> dict[str, Any]:
    runs, last = rows["run_id"].tolist(), rows["last"]
    row = {name: int(rows.iloc[0][name]) for name in ("num_updates", "staleness", "versions")}
    return row | {
        "name": METHODS[method].name,
        "median": last.median(),
        "least": last.min(),
        "most": last.max(),
        "pace": rows["pace"].median(),
        "tokens": ranged(spread(rows["tokens_needed"] / 1000), ".1f", runs),
        "seconds": ranged(spread(rows["seconds_needed"]), ".3f", runs),
        "multiple": ranged(multiple, ".2f", runs),
        "run_id": runs,
    }


def draw(data: pd.DataFrame) -> Figure:
    with style.figure(8.6, 4.2) as figure:
        left, right = figure.subplots(1, 2, sharey=True)
        for method, look in METHODS.items():
            rows = data[data["method"] == method]
            _curve(left, rows, "tokens", look, 1e-3)
            _curve(right, rows, "seconds", look, 1.0)
        left.set(xlabel="tokens (thousands)", ylabel="training loss (nats per byte)")
        right.set(xlabel="simulated time (s)", xscale="log")  # a flush after every microbatch takes many times as long
        right.minorticks_off()
        style.legend_below(figure, left, ncols=4)
        return figure


def _curve(axes: Axes, rows: pd.DataFrame, over: str, look: style.Look, scale: float) -> None:
    losses = np.stack([smoothed(values) for values in rows["losses"]])
    x = scale * rows[over].iloc[0][SMOOTH - 1 :]
    lines: dict[str, Any] = {"linestyle": "--" if look.marker in "*X" else "-", "marker": look.marker, "markevery": 6}
    axes.fill_between(x, losses.min(axis=0), losses.max(axis=0), color=look.colour, alpha=0.12, linewidth=0)
    axes.plot(x, np.median(losses, axis=0), color=look.colour, label=look.name, **lines)


exhibit = exhibit_of(
    "convergence",
    numbers,
    tabulate,
    draw,
    seeds=len(SEEDS),
    smooth=SMOOTH,
    batch=BATCH,
    goal=goal_of,
    share=100 * SHARE,
    most=1 / SHARE,
    answer=answer,
)
