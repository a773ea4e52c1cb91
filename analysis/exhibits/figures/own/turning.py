"""Rankings that turn: six schedules ordered by step time, as more and more costs are charged.

Levels are cumulative, each with its own experiment. A schedule that does not fit takes infinite time and is "out". A
pair turns at a level where the faster schedule becomes the slower one; equal or two infinite times change nothing.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, product
from math import inf, isclose
from typing import Any, NamedTuple

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from analysis.exhibits import style
from analysis.exhibits.exhibit import Cell, Table, exhibit_of, label, ours, table
from analysis.records.experiments import Experiments, index
from rpbench.config.configuration import swept

# What each level adds -> its experiment.
LEVELS: Mapping[str, str] = {
    "order": "turning_order",
    "hops": "turning_hops",
    "transfers": "turning_transfers",
    "memory": "turning_memory",
    "halves": "turning_halves",
    "collectives": "turning_collectives",
}
_REL_TIE = 1e-9  # rounding of equal times


class Turn(NamedTuple):
    """Two schedules that change places at a level."""

    # first, second: the faster one before this level, and from this level on
    first: str
    second: str
    level: str
    # before, after: lead of `first` at the level before, and of `second` now; infinite if the other is out
    before: float
    after: float


def step_time_s(run: Mapping[str, Any]) -> float:
    """Seconds of a step; infinite if the schedule does not fit."""
    return float(run["step_time_s"]) if run["status"] == "ok" else inf


def lead(first: float, second: float) -> float:
    """The second time over the first, less 1; infinite if only the second is out, ValueError if both are."""
    if first == second == inf:
        raise ValueError("both are out: neither is ahead; ask at a level where one fits")
    return second / first - 1


def turns(times: Mapping[str, Sequence[float]], levels: Sequence[str]) -> Iterator[Turn]:
    """Every turn of every pair; `times` has the step times of each schedule, one for each level."""
    for one, other in combinations(times, 2):
        ahead = ""
        before = 0.0
        for level, mine, theirs in zip(levels, times[one], times[other], strict=True):
            if mine == theirs or isclose(mine, theirs, rel_tol=_REL_TIE):
                before = 0.0 if mine < inf else before
                continue
            now = one if mine < theirs else other
            if ahead and now != ahead:
                yield Turn(ahead, now, level, before, lead(*sorted((mine, theirs))))
            ahead, before = now, lead(*sorted((mine, theirs)))


def counted(found: Sequence[Turn], levels: Sequence[str]) -> dict[str, int]:
    """The number of pairs that each level but the first turns."""
    return {level: sum(turn.level == level for turn in found) for level in levels[1:]}


_KEYS = ("model", "cluster", "schedule")
# Other looks than the project's, which are too much alike.
_LOOKS = {"zb_h1": style.Look("ZB-H1", style.PURPLE, "<"), "dualpipe": style.Look("DualPipe", style.BLACK, "X")}
_MACHINES = {"8x_rtx4090": "8 x RTX 4090", "8x_rtx5090": "8 x RTX 5090"}
Placed = tuple[str, str, Turn]  # model, machine and the turn


def numbers(experiments: Experiments) -> pd.DataFrame:
    """One row for each level, model, cluster and schedule: `step_time_s`, `rank`, `run_id`.

    A schedule that is out has an infinite time and NaN as its rank; the fastest has rank 1.
    """
    found = []
    for level, experiment in LEVELS.items():
        wanted = list(product(*(swept(experiment, key) for key in _KEYS)))
        rows = index(experiments.cells(experiment), _KEYS, wanted, experiment)
        times = [step_time_s(row) for row in rows.to_dict("records")]
        found.append(rows[[*_KEYS, "run_id"]].assign(level=level, step_time_s=times))
    data = pd.concat(found, ignore_index=True)
    fits = data["step_time_s"].where(data["step_time_s"] < inf)
    data["rank"] = fits.groupby([data[key] for key in ("level", "model", "cluster")]).rank(method="first")
    return data


def found_turns(data: pd.DataFrame) -> list[Placed]:
    """Every turn of every model on every machine, in the order of the levels."""
    found = [
        (model, cluster, turn)
        for (model, cluster), rows in data.groupby(["model", "cluster"], sort=False)
        for turn in turns(_times(rows), list(LEVELS))
    ]
    return sorted(found, key=lambda placed: list(LEVELS).index(placed[2].level))


def never(data: pd.DataFrame) -> list[tuple[str, str]]:
    """Pairs (ahead, behind) with the same order at all levels, on all models and machines."""
    turned = {frozenset((turn.first, turn.second)) for _, _, turn in found_turns(data)}
    every = [_times(rows) for _, rows in data.groupby(["model", "cluster"], sort=False)]
    return [
        (one, other)
        for pair in combinations(every[0], 2)
        for one, other in (pair, pair[::-1])
        if frozenset(pair) not in turned and all(times[one][0] < times[other][0] for times in every)
    ]


def _times(rows: pd.DataFrame) -> dict[str, list[float]]:
    """Step times of each schedule, one for each level."""
    wide = rows.pivot(index="schedule", columns="level", values="step_time_s")[list(LEVELS)]
    return {name: list(wide.loc[name]) for name in rows["schedule"].unique()}


def answer(data: pd.DataFrame) -> str:
    found = [turn for _, _, turn in found_turns(data)]
    counts = counted(found, list(LEVELS))
    places = len(data[["model", "cluster"]].drop_duplicates())
    pairs = places * len(list(combinations(data["schedule"].unique(), 2)))
    told = ", ".join(f"{level} {count}" for level, count in sorted(counts.items(), key=lambda item: -item[1]) if count)
    none = " and ".join(level for level, count in counts.items() if not count)
    return (
        f"Of {pairs} pairs (two schedules on one model and machine) the levels turn: {told or 'none'}"
        f"{f'; {none} turn none' if none and told else ''}."
    )


def never_sentence(data: pd.DataFrame) -> str:
    pairs = [f"{style.method_name(one)} before {style.method_name(other)}" for one, other in never(data)]
    if not pairs:
        return "No pair keeps its order everywhere."
    where = "at every level where both fit, on both models and machines"
    return f"Pairs that keep their order {where}: {', '.join(pairs)}."


def tabulate(data: pd.DataFrame) -> Table:
    """One row for each turn, then one for each pair that never turns."""
    columns = ("level", "model", "machine", "was ahead", "then ahead", "lead before (%)", "lead after (%)")
    at = data.set_index(["level", *_KEYS])["run_id"].to_dict()
    rows = [_turned(placed, at) for placed in found_turns(data)]
    return table(columns, [*rows, *(_kept(data, pair) for pair in never(data))])


def _turned(placed: Placed, at: dict) -> list[Cell]:
    model, cluster, turn = placed
    levels = list(LEVELS)
    before = levels[levels.index(turn.level) - 1]
    names = (turn.first, turn.second)
    runs = {level: [at[level, model, cluster, name] for name in names] for level in (before, turn.level)}
    return [
        label(turn.level),
        label(style.model_name(model)),
        label(_MACHINES.get(cluster, cluster)),
        *(label(style.method_name(name)) for name in names),
        ours(100 * turn.before, ".2f", runs[before]),
        label("the other is out") if turn.after == inf else ours(100 * turn.after, ".2f", runs[turn.level]),
    ]


def _kept(data: pd.DataFrame, pair: tuple[str, str]) -> list[Cell]:
    """A pair that never turns: its smallest and largest lead over all levels where both fit."""
    one, other = (data[data["schedule"] == name].reset_index(drop=True) for name in pair)
    both = (one["step_time_s"] < inf) & (other["step_time_s"] < inf)
    leads = [lead(*each) for each in zip(one[both]["step_time_s"], other[both]["step_time_s"], strict=True)]
    runs = (*one[both]["run_id"], *other[both]["run_id"])
    names = (label(style.method_name(name)) for name in pair)
    ends = (ours(100 * end(leads), ".2f", runs) for end in (min, max))
    return [label("never"), label("all"), label("all, least and largest"), *names, *ends]


def draw(data: pd.DataFrame) -> Figure:
    """A panel for each model and machine: a line for each schedule's rank over levels, a ring around each turn."""
    schedules, levels = list(data["schedule"].unique()), list(LEVELS)
    places = list(data.groupby(["model", "cluster"], sort=False))
    with style.figure(10.0, 6.4) as figure:
        panels = figure.subplots(-(-len(places) // 2), 2, sharex=True, sharey=True, squeeze=False).ravel()
        for axes, ((model, cluster), rows) in zip(panels, places, strict=True):
            found = rows.pivot(index="schedule", columns="level", values="rank")[levels]
            ranks = {name: list(found.loc[name]) for name in schedules}
            for schedule in schedules:
                _draw_line(axes, ranks[schedule], _look(schedule))
            for turn in turns(_times(rows), levels):
                # A ring where two lines cross; the line of a schedule that is out ends and crosses none.
                after = levels.index(turn.level)
                ends = (ranks[name][after - 1 : after + 1] for name in (turn.first, turn.second))
                if (place := crossing(*ends)) is not None:
                    axes.plot([after - 1 + place[0]], [place[1]], color=style.BLACK, **_RING)
            title = f"{style.model_name(model)}, {_MACHINES.get(cluster, cluster)}"
            axes.set(title=title, ylabel="place (1: fastest)")
        panels[0].set(ylim=(len(schedules) + 0.5, 0.5), xlim=(-0.3, len(LEVELS) - 0.7))
        panels[0].set_yticks(range(1, len(schedules) + 1))
        panels[0].set_xticks(range(len(LEVELS)), [name if n == 0 else f"+ {name}" for n, name in enumerate(LEVELS)])
        looks = map(_look, schedules)
        handles = [Line2D([], [], color=look.colour, marker=look.marker, label=look.name) for look in looks]
        handles.append(Line2D([], [], color=style.BLACK, label="change places", **_RING))
        handles.append(Line2D([], [], color=style.GREY, marker="x", linestyle="none", label="out"))
        figure.legend(handles=handles, loc="outside lower center", ncols=4)
        return figure


def _look(schedule: str) -> style.Look:
    return _LOOKS.get(schedule) or style.look_of(schedule)


def _draw_line(axes: Axes, ranks: list[float], look: style.Look) -> None:
    axes.plot(range(len(ranks)), ranks, color=look.colour, marker=look.marker, linewidth=1.6, markersize=6)
    out = next((at for at, rank in enumerate(ranks) if rank != rank), None)
    if out is not None:
        axes.plot([out - 0.6], [ranks[out - 1]], color=look.colour, marker="x", markersize=8, linestyle="none")


_RING: dict[str, Any] = {"marker": "o", "markersize": 11, "markerfacecolor": "none"}
_RING |= {"linestyle": "none", "markeredgewidth": 0.9}


def crossing(one: Sequence[float], other: Sequence[float]) -> tuple[float, float] | None:
    """The crossing (level, rank) of two lines from level 0 to level 1; None if one of them ends."""
    first, second = other[0] - one[0], other[1] - one[1]
    if first != first or second != second or first == second:
        return None
    level = first / (first - second)
    return level, one[0] + level * (one[1] - one[0])


exhibit = exhibit_of("turning", numbers, tabulate, draw, never=never_sentence, answer=answer)
