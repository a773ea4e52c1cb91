"""The duel on two cores: every contender's step time as predicted, emulated and measured."""

from collections.abc import Callable, Iterable, Mapping
from math import inf, isfinite
from operator import itemgetter
from textwrap import fill
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.exhibits import style
from analysis.exhibits.exhibit import NOTHING, Cell, Table, blank, declared_table, exhibit_of, ours, ranged, short_cut
from analysis.records.experiments import MissingRuns
from analysis.records.runs import grouped
from rpbench.run.modes.duel.contenders import BASE, LIMIT, REFERENCES, TWINS
from rpbench.run.modes.duel.findings import false_alarms, findings, timed, why_none
from rpbench.run.modes.duel.runs import CLOCKS, MOST_OTHERS
from rpbench.run.modes.duel.verdict import Finding, ratio, times

Row = dict[str, Any]

NAMES, MODELS = style.names("duel"), style.names("duel_models")


def by_model(rows: Iterable[Row]) -> dict[str, dict[str, Row]]:
    """Model -> contender -> its record."""
    found = grouped(rows, itemgetter("model"))
    return {model: {row["contender"]: row for row in duel} for model, duel in found.items()}


def found_duels(rows: pd.DataFrame) -> dict[str, dict[str, Row]]:
    """`by_model`, for the models and contenders that are shown and in their order."""
    duels = by_model(rows.to_dict("records"))
    ordered = {model: duels[model] for model in MODELS if BASE in duels.get(model, {})}
    if not ordered:
        raise MissingRuns("all runs of experiment=cpu_duel")
    return {model: {name: rows[name] for name in NAMES if name in rows} for model, rows in ordered.items()}


def judged(duels: Mapping[str, Mapping[str, Row]], clock: str) -> dict[str, dict[str, Finding]]:
    """Model -> contender -> its finding; all verdicts are corrected together."""
    together = sum(len(timed(rows)) for rows in duels.values())
    return {model: findings(rows, clock, together) for model, rows in duels.items()}


def answer(duels: Mapping[str, Mapping[str, Row]]) -> str:
    """Each model's verdicts, and how often equal work was judged different."""
    found = judged(duels, "wall")
    return " ".join(_answer(model, duels[model], found[model]) for model in duels)


def _answer(model: str, rows: Mapping[str, Row], found: Mapping[str, Finding]) -> str:
    groups: dict[str, list[str]] = {}
    for name, each in found.items():
        if name not in (BASE, *TWINS, LIMIT):
            groups.setdefault(each.verdict, []).append(f"{NAMES[name]} {each.ratio:.2f}")
    failed = [NAMES[name] for name, row in rows.items() if row["status"] != "ok"]
    listed = [f"{verdict}: {', '.join(names)}" for verdict, names in groups.items()]
    listed += [f"failed: {', '.join(failed)}"] if failed else []
    text = f"{MODELS[model]}, over 1F1B by the clock: {'; '.join(listed) or 'nobody was timed'}"
    same, alarms, outside = false_alarms(found)
    if reason := why_none(rows):
        text += f" ({reason})"
    over = [ratio(times(row, "wall"), times(row, "replay")).median for row in timed(rows).values()]
    pace = f" Clock over processor time: {min(over):.3f} to {max(over):.3f}." if over else ""
    return (
        f"{text}. Of {same} that are 1F1B itself, {alarms} have a verdict of a difference and {outside} an interval "
        f"of their own without 1.{pace}"
    )


def tabulate(duels: Mapping[str, Mapping[str, Row]]) -> Table:
    clocks = {clock: judged(duels, clock) for clock in CLOCKS}
    found = (
        _row(row, rows, {clock: found[model] for clock, found in clocks.items()})
        for model, rows in duels.items()
        for row in rows.values()
    )
    return declared_table("duel", found)


def _row(row: Row, rows: Mapping[str, Row], found: Mapping[str, Mapping[str, Finding]]) -> Row:
    own, name = row["run_id"], row["contender"]
    shown = {"of": MODELS[row["model"]], "who": NAMES[name], "plan": Cell(row["partition_layers"], plan(row), (own,))}
    if row["status"] != "ok":
        return blank("duel") | shown | {"recompute": row["recompute"], "verdict": f"failed: {row['reason']}"}
    both = (own, *(rows[each]["run_id"] for each in REFERENCES if each in rows))
    walls, replays = found["wall"].get(name), found["replay"].get(name)
    over_replay = ratio(times(row, "wall"), times(row, "replay")).median
    verdict, starts = "no verdict: nobody to compare with", walls.starts if walls else ()
    if walls is not None:
        verdict = f"{walls.verdict}: {walls.reason}" if walls.reason else walls.verdict
    counted = ", ".join(f"{start.num_pairs} (and {start.num_disturbed} disturbed)" for start in starts)
    shown |= {
        "verdict": verdict,
        "speed": _speed(walls, both),
        "replay_speed": _speed(replays, both),
        "share": _share(found["replay"], name, both),
        "busy": 100 * (1 - row["bubble_makespan"]),
        "over_replay": over_replay,
        "over_predicted": row["replay_makespan_s"] / row["simulated_makespan_s"],
        "counted": counted,
    }
    return row | shown


def plan(row: Row) -> str:
    """The partition and the rounds of a row."""
    size = row["round_size"]
    return short_cut(row["partition_layers"]) + (f", rounds of {size:.0f}" if size and size == size else "")


def _speed(found: Finding | None, run_ids: tuple[str, ...]) -> Cell:
    if found is None or not isfinite(found.high):
        return NOTHING
    return ranged((found.ratio, found.low, found.high), ".3f", run_ids)


def _share(found: Mapping[str, Finding], name: str, run_ids: tuple[str, ...]) -> Cell:
    share = found[name].ratio / found[LIMIT].ratio if {name, LIMIT} <= found.keys() else inf
    return ours(share, ".3f", run_ids) if isfinite(share) else NOTHING


_BARS = (
    ("simulated_makespan_s", "predicted", style.SKY, style.HATCHES["predicted"]),
    ("emulated_makespan_s", "emulated", style.ORANGE, style.HATCHES["emulated"]),
    ("replay_makespan_s", "measured, processor time on the graph", style.VERMILION, ""),
)


TALLEST = 1.5  # the end of the axis, as a multiple of the tallest bar; starts on a busy machine may be beyond it


def draw(duels: Mapping[str, Mapping[str, Row]]) -> Figure:
    """A panel for each model with bars for every contender; a dot is the median of a start."""
    return draw_panels(duels, 2.9, 4, _panel)


def draw_panels(
    duels: Mapping[str, Mapping[str, Row]], height: float, ncols: int, panel: Callable[[Axes, Mapping[str, Row]], str]
) -> Figure:
    """A panel for each model; the function `panel` draws it and returns words on what does not fit."""
    with style.figure(8.6, 0.5 + height * len(duels)) as figure:
        panels = figure.subplots(len(duels), 1, squeeze=False)[:, 0]
        for axes, (model, rows) in zip(panels, duels.items(), strict=True):
            shown = {name: row for name, row in timed(rows).items() if name not in TWINS[1:]}  # one twin is enough
            words = panel(axes, shown)
            axes.set_xticks(range(len(shown)), [fill(NAMES[name], 12) for name in shown], fontsize=6.2)
            axes.set_title(MODELS[model])
            if words:
                axes.annotate(words, (1, 1), xycoords="axes fraction", ha="right", va="bottom", fontsize=7)
        style.legend_below(figure, panels[0], ncols=ncols)
        return figure


def _panel(axes: Axes, shown: Mapping[str, Row]) -> str:
    rows = list(shown.values())
    for number, (key, name, colour, hatch) in enumerate(_BARS):
        places = [place + 0.27 * (number - 1) for place in range(len(rows))]
        axes.bar(places, [row[key] for row in rows], 0.26, color=colour, hatch=hatch, edgecolor="black", label=name)
    clocks = [(place + 0.27, wall) for place, row in enumerate(rows) for wall in times(row, "wall")]
    axes.plot(*zip(*clocks, strict=True), "k.", markersize=3.5, linestyle="none", label="measured, clock, each start")
    axes.set_ylabel("makespan (s)")
    top = TALLEST * max(row[key] for row in rows for key, *_ in _BARS)
    outside = sum(wall > top for _, wall in clocks)
    if not outside:
        return ""
    axes.set_ylim(top=top)
    return f"{outside} of {len(clocks)} starts took longer: other programs had the processor"


exhibit = exhibit_of(
    "duel",
    lambda experiments: found_duels(experiments.cells("cpu_duel")),
    tabulate,
    draw,
    others=100 * MOST_OTHERS,
    answer=answer,
)
