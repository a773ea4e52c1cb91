"""On two cores: what was predicted of every contender, what the engine makes of it, what the clock says."""

from collections.abc import Mapping, Sequence
from functools import partial
from statistics import median
from textwrap import fill
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.exhibits import style
from analysis.exhibits.cells import NOTHING, label, ours, short_cut, table
from analysis.exhibits.exhibit import Cell, Exhibit
from analysis.records.experiments import Experiments, MissingRuns
from rpbench.harness.modes.duel.contenders import BASE, LIMIT, TWIN
from rpbench.harness.modes.duel.paired import Ratio, noise, ratio
from rpbench.harness.modes.duel.rows import CLOCKS, speed_up, times

Row = dict[str, Any]

NAMES = {
    BASE: "1F1B",
    TWIN: "1F1B, its twin",
    "gpipe": "GPipe",
    "interleaved_1f1b": "Interleaved 1F1B",
    "looped_bfs": "Looped BFS",
    "pipedream_2bw": "PipeDream-2BW, asynchronous",
    "vocab_parallel": "Vocabulary parallel",
    "roundpipe": "RoundPipe",
    "roundpipe_async": "RoundPipe, asynchronous",
    "roundpipe_dynamic": "RoundPipe, dynamic dispatch",
    "torch_1f1b": "1F1B of torch, two processes",
    LIMIT: "limit: no dependencies",
}
MODELS = {"mid_gpt": "mid GPT", "fat_head_gpt": "fat-head GPT"}


def exhibit(experiments: Experiments) -> Exhibit:
    """The figure with its numbers.

    Raises:
        MissingRuns: if there was no duel.
    """
    duels = found_duels(experiments.cells("cpu_duel"))
    columns = (
        "model",
        "contender",
        "plan",
        "speed-up over 1F1B by processor time (95 % interval)",
        "by the clock (95 % interval)",
        "share of the limit by processor time",
        "devices busy (% of devices × time)",
        "predicted (s)",
        "emulated (s)",
        "measured: processor time on the graph (s)",
        "measured: clock (s)",
        "clock over processor time",
        "processor time over predicted",
        "processor time of all actions (s)",
        "foreign load (cores)",
    )
    return Exhibit(
        id="duel",
        title="On two cores: predicted, emulated, measured",
        caption=(
            "Small GPTs trained for real on two devices of one core each, optimizer steps and gradient sums within "
            "the time. Every contender computes the same forwards, recomputations, backwards and steps, was tuned "
            "by the same search with the same budget on layer times profiled in the same run, and took part after "
            "its gradients and weights had been compared with plain training. Ratios are medians over rounds in which "
            "every contender ran once. Predicted: simulated from the profile. Emulated: the engine's threads asleep "
            "for the profiled times. Processor time on the graph: each action's own processor time, the schedule "
            "replayed with it, which other programs on the machine do not change; by the clock they do. A ~ marks "
            f"a difference from 1F1B no larger than that of its twin. {answer(duels)}"
        ),
        evidence=("simulated", "emulated", "measured"),
        command="python -m rpbench -m experiment=cpu_duel",
        draw=partial(draw, duels),
        table=table(columns, (_row(row, rows) for rows in duels.values() for row in rows.values())),
    )


def found_duels(rows: pd.DataFrame) -> dict[str, dict[str, Row]]:
    """Model -> contender -> its record, those that failed included.

    Raises:
        MissingRuns: if there is none.
    """
    duels: dict[str, dict[str, Row]] = {}
    for row in rows.to_dict("records"):
        duels.setdefault(row["model"], {})[row["contender"]] = row
    ordered = {model: duels[model] for model in MODELS if BASE in duels.get(model, {})}
    if not ordered:
        raise MissingRuns("all runs of experiment=cpu_duel")
    return {model: {name: rows[name] for name in NAMES if name in rows} for model, rows in ordered.items()}


def answer(duels: Mapping[str, Mapping[str, Row]]) -> str:
    """Who is faster, in a sentence a model."""
    return " ".join(_answer(model, rows) for model, rows in duels.items())


def _answer(model: str, rows: Mapping[str, Row]) -> str:
    names = ("roundpipe", "roundpipe_async", "roundpipe_dynamic", "pipedream_2bw", "vocab_parallel", "torch_1f1b")
    gains = [f"{NAMES[name]} {speed_up(rows[name], rows[BASE], 'replay').median:.2f}" for name in names if name in rows]
    text = f"{MODELS[model]}, speed over 1F1B by processor time: {', '.join(gains)}"
    if (share := _noise(rows, "replay")) is not None:
        text += f"; its twin differs by up to {100 * share:.1f} %"
    over = [ratio(times(row, "wall"), times(row, "replay")).median for row in rows.values()]
    return f"{text}. Clock over processor time: {min(over):.3f} to {max(over):.3f}."


def _noise(rows: Mapping[str, Row], clock: str) -> float | None:
    return noise(speed_up(rows[TWIN], rows[BASE], clock)) if TWIN in rows else None


def _row(row: Row, rows: Mapping[str, Row]) -> list[Cell]:
    base, own = rows[BASE], row["run_id"]
    both = (own, base["run_id"])
    limit = rows.get(LIMIT)
    share = speed_up(row, limit, "replay").median if limit else None
    over_replay = ratio(times(row, "wall"), times(row, "replay")).median
    return [
        label(MODELS[row["model"]]),
        label(NAMES[row["contender"]]),
        Cell(row["partition_layers"], _plan(row), (own,)),
        *(_speed(speed_up(row, base, clock), _noise(rows, clock), both) for clock in reversed(CLOCKS)),
        ours(share, ".3f", (own, limit["run_id"])) if limit else NOTHING,
        ours(100 * (1 - row["bubble_makespan"]), ".1f", own),
        ours(row["simulated_makespan_s"], ".3f", own),
        ours(row["emulated_makespan_s"], ".3f", own),
        ours(row["replay_makespan_s"], ".3f", own),
        ours(row["makespan_s"], ".3f", own),
        ours(over_replay, ".3f", own),
        ours(row["replay_makespan_s"] / row["simulated_makespan_s"], ".3f", own),
        ours(median(row["round_cpus_s"]), ".3f", own),
        ours(row["foreign_cpu_share"], ".2f", own),
    ]


def _plan(row: Row) -> str:
    size = row["round_size"]
    return short_cut(row["partition_layers"]) + (f", rounds of {size:.0f}" if size and size == size else "")


def _speed(found: Ratio, noise: float | None, run_ids: tuple[str, ...]) -> Cell:
    same = "" if noise is None or abs(found.median - 1) > noise else " ~"
    return Cell(found.median, f"{found.median:.3f} ({found.low:.3f}–{found.high:.3f}){same}", run_ids)


# --- the figure ----------------------------------------------------------------------------------------------

_BARS = (
    ("simulated_makespan_s", "predicted", style.SKY, style.HATCHES["predicted"]),
    ("emulated_makespan_s", "emulated", style.ORANGE, style.HATCHES["emulated"]),
    ("replay_makespan_s", "measured, processor time on the graph", style.VERMILION, ""),
)


# How far above the tallest bar the axis reaches at most: a machine that was busy otherwise hides all else.
TALLEST = 1.5


def draw(duels: Mapping[str, Mapping[str, Row]]) -> Figure:
    """A panel a model: for every contender what was predicted, emulated and measured; every round a dot."""
    with style.applied():
        figure = Figure(figsize=(8.6, 0.5 + 2.9 * len(duels)), layout="constrained")
        panels = figure.subplots(len(duels), 1, squeeze=False)[:, 0]
        for axes, (model, rows) in zip(panels, duels.items(), strict=True):
            _panel(axes, model, list(rows.values()))
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=4)
        return figure


def _panel(axes: Axes, model: str, rows: Sequence[Row]) -> None:
    for number, (key, name, colour, hatch) in enumerate(_BARS):
        places = [place + 0.27 * (number - 1) for place in range(len(rows))]
        axes.bar(places, [row[key] for row in rows], 0.26, color=colour, hatch=hatch, edgecolor="black", label=name)
    clocks = [(place + 0.27, wall) for place, row in enumerate(rows) for wall in times(row, "wall")]
    axes.plot(*zip(*clocks, strict=True), "k.", markersize=3.5, linestyle="none", label="measured, clock, each round")
    axes.set_xticks(range(len(rows)), [fill(NAMES[row["contender"]], 12) for row in rows], fontsize=6.2)
    axes.set_ylabel("makespan (s)")
    axes.set_title(MODELS[model])
    top = TALLEST * max(row[key] for row in rows for key, *_ in _BARS)
    if outside := sum(wall > top for _, wall in clocks):
        axes.set_ylim(top=top)
        words = f"{outside} of {len(clocks)} rounds took longer: other programs had the processor"
        axes.annotate(words, (1, 1), xycoords="axes fraction", ha="right", va="bottom", fontsize=7)
