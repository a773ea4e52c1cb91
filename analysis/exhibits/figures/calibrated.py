"""Calibration of this machine: predicted and measured times of the duel's schedules and of layers."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import mean, median
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.exhibits import style
from analysis.exhibits.exhibit import (
    NOTHING,
    Cell,
    Exhibit,
    Table,
    cut_of,
    declared_table,
    exhibit_of,
    label,
    ranged,
    table,
    theirs,
)
from analysis.exhibits.figures.duel import MODELS, NAMES, Row, draw_panels, found_duels
from analysis.records.experiments import Experiments, MissingRuns, succeeded
from rpbench.cost.hardware.measured import PARTS
from rpbench.run.modes.duel.verdict import drift, over_predicted, predictions

BAR = 0.15  # how far a prediction may be off

Duels = Mapping[str, Mapping[str, Row]]


def numbers(experiments: Experiments) -> Duels:
    """The records that have predictions."""
    column = "calibrated_makespans_s"
    rows = succeeded(experiments.cells("cpu_duel"))
    found = rows[rows[column].map(lambda value: isinstance(value, list))] if column in rows else rows[:0]
    if found.empty:
        raise MissingRuns("runs of experiment=cpu_duel with mode.calibrate=true")
    return found_duels(found)


def answer(duels: Duels) -> str:
    return " ".join(_answer(model, rows) for model, rows in duels.items())


def _answer(model: str, rows: Mapping[str, Row]) -> str:
    found = {name: over_predicted(row, "replay").median for name, row in rows.items()}
    far = [NAMES[name] for name, ratio in found.items() if abs(ratio - 1) > BAR]
    clock = [over_predicted(row, "wall").median for row in rows.values()]
    apart = median(drift(row) for row in rows.values())
    but = f" (not {', '.join(far)})" if far else ""
    return (
        f"{MODELS[model]}: by processor time {min(found.values()):.3f} to {max(found.values()):.3f} of the prediction, "
        f"{len(found) - len(far)} of {len(found)} within the band{but}; "
        f"by the clock {min(clock):.3f} to {max(clock):.3f}; its calibrations are {100 * apart:.0f} % apart."
    )


def tabulate(duels: Duels) -> Table:
    return declared_table("calibrated", (_row(row) for rows in duels.values() for row in rows.values()))


def _row(row: Row) -> Row:
    foreign = [share for share in row["calibration_foreign_cores"] if share is not None]
    over = {clock: over_predicted(row, clock) for clock in ("replay", "wall")}
    shown = {clock: ranged((each.median, each.low, each.high), ".3f", (row["run_id"],)) for clock, each in over.items()}
    return (row | shown) | {
        "of": MODELS[row["model"]],
        "who": NAMES[row["contender"]],
        "cut": cut_of(row),
        "predicted": median(predictions(row)),
        "foreign": mean(foreign) if foreign else None,
        "apart": 100 * drift(row),
    }


_MARKS = (("replay", "processor time on the graph", style.VERMILION, "o"), ("wall", "clock", style.BLACK, "x"))
TOP = 1.6  # the end of the axis: ratios beyond it come from other programs on the processor


def draw(duels: Duels) -> Figure:
    return draw_panels(duels, 2.4, 3, _panel)


def _panel(axes: Axes, rows: Mapping[str, Row]) -> str:
    axes.axhspan(1 - BAR, 1 + BAR, color=style.SKY, alpha=0.25, lw=0, label=f"within {100 * BAR:.0f} %")
    axes.axhline(1, color="black", lw=0.6)
    outside = 0
    for shift, (clock, name, colour, marker) in zip((-0.12, 0.12), _MARKS, strict=True):
        found = [(place + shift, over_predicted(row, clock)) for place, row in enumerate(rows.values())]
        shown = [(place, ratio) for place, ratio in found if ratio.median <= TOP]
        beyond = [place for place, ratio in found if ratio.median > TOP]
        outside += len(beyond)
        if beyond:  # matplotlib would place an empty line without clipping in the corner of the page
            axes.plot(beyond, [TOP] * len(beyond), "^", color=colour, clip_on=False, zorder=4)
        places = [place for place, _ in shown]
        errors = [[r.median - r.low for _, r in shown], [r.high - r.median for _, r in shown]]
        axes.errorbar(places, [r.median for _, r in shown], errors, fmt=marker, color=colour, capsize=2, label=name)
    axes.set(ylim=(0.6, TOP), ylabel="measured / predicted")
    return f"▲ {outside} above {TOP:g}: other programs had the processor" if outside else ""


exhibit = exhibit_of("calibrated", numbers, tabulate, draw, bar=100 * BAR, answer=answer)


# --- one calibration: its layers and its rates ---------------------------------------------------------------

ANSWER = "calibration.json"  # in a folder of results: the output of `rpbench calibrate`
_FROM = f"python -m rpbench calibrate, {ANSWER}"
_RATES = (
    ("matrix products, sums in 16 bits", "matmul_flops_per_s", 1e-12, "TFLOP/s"),
    ("matrix products", "wide_matmul_flops_per_s", 1e-12, "TFLOP/s"),
    ("memory", "memory_bytes_per_s", 1e-9, "GB/s"),
    ("link, host to device", "host_to_device_bytes_per_s", 1e-9, "GB/s"),
    ("link, device to host", "device_to_host_bytes_per_s", 1e-9, "GB/s"),
    ("link, one way while the other is busy", "copy_bytes_per_s", 1e-9, "GB/s"),
    ("link, first device to second", "intra_bytes_per_s", 1e-9, "GB/s"),
    ("optimizer on the host", "host_bytes_per_s", 1e-9, "GB/s"),
)


def calibration(results: Path) -> list[Exhibit]:
    """The exhibits of `rpbench calibrate`, if it was run; the tables of a dry run have no numbers."""
    if not (results / ANSWER).exists():
        return []
    answer = json.loads((results / ANSWER).read_text(encoding="utf-8"))
    is_dry = answer.get("evidence") == "dry"
    layers = tuple(_layers(answer))
    ratios = [took / each["predicted_s"][part] for each in answer["layers"] for part, took in each["seconds"].items()]
    told = (
        f"Of {len(ratios)} parts the median takes {median(ratios):.3f} times what is predicted, "
        f"all {min(ratios):.2f} to {max(ratios):.2f} times."
        if ratios
        else "It was a dry run: accelerators that are made up have no pace."
    )
    command = "python -m rpbench calibrate device=accelerator"
    return [
        Exhibit(
            id="calibrated_layers",
            title="Layers: timed against predicted",
            caption="A layer, an embedding and a head of several shapes, as the engine runs them. What is predicted of "
            f"a shape follows from counted work and the times of all other shapes; its own have no word in it. {told}",
            evidence=() if is_dry else ("measured", "predicted"),
            command=command,
            table=table(("shape", "part", "timed (ms)", "predicted (ms)", "timed over predicted"), layers),
            question="How far are layers from what is predicted of them?",
        ),
        Exhibit(
            id="calibrated_rates",
            title="Rates of the device, its links and its collectives",
            caption="As measured by operators that do one thing each. A collective of X bytes over n ranks takes its "
            "latency and volume X over its rate; the volume is (n - 1) / n, twice that for an all-reduce. "
            f"In brackets: what holds nine of ten. {told if is_dry else ''}".rstrip(),
            evidence=() if is_dry else ("measured",),
            command=command,
            table=table(("what", "rate", "unit", "latency (us)"), _rates(answer)),
            question="What do links and collectives reach?",
        ),
    ]


def _layers(answer: Mapping[str, Any]) -> Iterator[list[Cell]]:
    for each in answer["layers"]:
        shape = f"{each['hidden']} wide, {each['num_tokens']:,} tokens, {each['vocab']:,} words"
        for part in PARTS:
            timed, predicted = (each[key].get(part) for key in ("seconds", "predicted_s"))
            yield [
                label(shape),
                label(part.replace("_", " ")),
                theirs(timed and 1e3 * timed, ".4g", _FROM),
                theirs(predicted and 1e3 * predicted, ".4g", _FROM),
                theirs(timed / predicted if predicted else None, ".3f", _FROM),
            ]


def _rates(answer: Mapping[str, Any]) -> Iterator[list[Cell]]:
    for name, key, scale, unit in _RATES:
        value = answer.get(key)
        yield [label(name), theirs(value and scale * value, ".4g", _FROM), label(unit), NOTHING]
    for name, found in answer["collectives"].items():
        ends = [found.get(f"bytes_per_s{end}", 0.0) / 1e9 for end in ("_low", "_high")]
        rate, latency = found.get("bytes_per_s"), found.get("latency_s")
        words = f"{rate / 1e9:.4g} ({ends[0]:.4g}–{ends[1]:.4g})" if rate else ""
        yield [
            label(f"{name.replace('_', ' ')}, {found['num_ranks']} ranks"),
            Cell(rate / 1e9, words, source=_FROM) if rate else NOTHING,
            label("GB/s"),
            theirs(latency and 1e6 * latency, ".4g", _FROM),
        ]
