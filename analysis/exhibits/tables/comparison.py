"""All systems on the same work: simulated on eight devices, and measured on two cores."""

from collections.abc import Mapping, Sequence
from functools import partial
from math import isinf
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.exhibits import style
from analysis.exhibits.exhibit import (
    NOTHING,
    Cell,
    Shown,
    declared_table,
    exhibit_of,
    exhibited,
    label,
    ours,
    ranged,
    short_cut,
)
from analysis.exhibits.figures.own import convergence
from analysis.exhibits.figures.own.convergence import SHARE, Spread, token_multiples
from analysis.records.experiments import Experiments, MissingRuns, index, succeeded
from analysis.records.runs import MODELS
from rpbench.config.configuration import swept
from rpbench.ir.partition import parse
from rpbench.plan.contest.contender import contenders
from rpbench.records.manifest import NOT_APPLICABLE

Row = dict[str, Any]

EXPERIMENT = "figure10"
LEADERS = 3  # rows of each model in the table of options


def contest_numbers(experiments: Experiments) -> pd.DataFrame:
    """Every schedule's row by model, none if it refuses every setting; MissingRuns without one of the others."""
    rows, manifest = experiments.cells(EXPERIMENT), experiments.manifest(EXPERIMENT)
    if manifest is None:
        raise MissingRuns(f"experiment={EXPERIMENT} has not been run here")
    cells = [cell.overrides for cell in manifest.cells if cell.state != NOT_APPLICABLE]
    wanted = [(model, cell["schedule"]) for model in MODELS for cell in cells if cell["model"] == model]
    return index(rows, ("model", "schedule"), wanted, EXPERIMENT).reset_index(drop=True)


def not_compared() -> list[str]:
    """Schedules of the registry that could take part but are not in the experiment."""
    able = {each.entry.name for each in contenders()}
    return sorted(able - set(swept(EXPERIMENT, "schedule")))


def distinct(rows: pd.DataFrame) -> pd.DataFrame:
    """Each distinct order that fits, the fastest first: its fastest row, with the `names` of all schedules."""
    fitting = rows[rows["status"] == "ok"].sort_values("tokens_per_s", ascending=False, kind="stable")
    groups = fitting.groupby(["model", "order_sha256"], sort=False)
    first = groups.head(1).copy()
    names = groups["schedule"].agg(tuple)
    first["names"] = [names[model, order] for model, order in zip(first["model"], first["order_sha256"], strict=True)]
    return first.reset_index(drop=True)


def options(row: Row) -> Row:
    """Cells for the chosen settings."""
    keeping, layers = sum(row["kept_layers"]), sum(parse(row["partition_layers"]).backward)
    own = ", ".join(f"{name}={value}" for name, value in row["schedule_options"].items() if value is not None)
    return {
        "cut": short_cut(row["partition_layers"]),
        "keeping": Cell(keeping, "all" if keeping == layers else str(keeping), (row["run_id"],)),
        "own": label(own) if own else NOTHING,
    }


def leaders(ranked: pd.DataFrame, model: str) -> list[dict]:
    """The fastest orders of a model, and the fastest without late weights."""
    rows = ranked[ranked["model"] == model].to_dict("records")
    timely = [row for row in rows[LEADERS:] if not row["staleness_steps"]]
    has_timely = any(not row["staleness_steps"] for row in rows[:LEADERS])
    return rows[:LEADERS] if has_timely else rows[:LEADERS] + timely[:1]


def contest_answer(ranked: pd.DataFrame) -> str:
    """First and second of every model, with the lead of the first."""
    parts = []
    for model in MODELS:
        rows = ranked[ranked["model"] == model].to_dict("records")
        if len(rows) > 1:
            lead = 100 * (rows[0]["tokens_per_s"] / rows[1]["tokens_per_s"] - 1)
            parts.append(f"{style.model_name(model)}: {_name(rows[0])}, {lead:.1f} % before {_name(rows[1])}")
    return "; ".join(parts) + "." if parts else ""


exhibit = exhibit_of(
    "figure10_options",
    lambda experiments: distinct(contest_numbers(experiments)),
    lambda ranked: declared_table(
        "figure10_options", (row | options(row) for model in MODELS for row in leaders(ranked, model))
    ),
    leaders=LEADERS,
    answer=contest_answer,
)


# Schedule -> the schedule of `experiment=convergence` with the same lateness; PipeMare with T1 to T3.
_TRAINED_AS = {
    "cyclic_dp": "roundpipe_async",
    "roundpipe": "roundpipe_async",
    "zero_offload": "roundpipe_async",
    "pipemare": "pipemare_t1_t2_t3",
}

Multiples = Mapping[str, Spread]


@exhibited("figure10")
def simulated(experiments: Experiments) -> Shown:
    """All systems on eight devices and the published models, at equal tuning."""
    rows, multiples, behind = contest_numbers(experiments), *_multiples(experiments)
    sizes = rows.groupby("model", sort=False)["tokens_per_step"].first()
    *most, last = [f"{sizes[model] / 1000:,.0f}" for model in MODELS if model in sizes]
    systems = [
        row
        | _system(row, "bubble_steady", multiples, behind)
        | options(row)
        | {"fate": NOTHING if row["status"] == "ok" else label(f"{row['status']}: {row['reason'].split(';')[0]}")}
        for row in rows.to_dict("records")
    ]
    return Shown(
        draw=partial(draw, rows),
        table=declared_table("figure10", systems),
        words={
            "steps": f"{', '.join(most)} and {last}" if most else last,
            "budget": " and ".join(f"{budget:.0f}" for budget in sorted(rows["budget_timelines"].unique())),
            "late": _LATE,
            "others": (f"Not compared yet: {', '.join(names)}. " if (names := not_compared()) else ""),
            "answer": answer(rows),
        },
    )


_LATE = (
    "A stale step is not a full one: beside the pace of those that read late weights stands how many tokens they take "
    f"to the loss that plain training has after {100 * SHARE:.0f} % of its tokens, over a flushed one that steps as "
    "often (a small GPT, median and range of three seeds, experiment=convergence), and their pace over that."
)


@exhibited("baselines_cpu")
def measured(experiments: Experiments) -> Shown:
    """All systems that the engine trains, measured on two cores of this machine."""
    rows = succeeded(experiments.cells("baselines_cpu"))
    if rows.empty:
        raise MissingRuns("all runs of experiment=baselines_cpu")
    # Tokens per second of the whole run: it is too short for an interval.
    pace = rows["tokens_per_step"] * rows["num_updates"] / rows["makespan_s"]
    rows = rows.sort_values("schedule", kind="stable").assign(tokens_per_s=pace)
    multiples, behind = _multiples(experiments)
    systems = [row | _system(row, "bubble_makespan", multiples, behind) for row in rows.to_dict("records")]
    exact = int((rows["grad_max_abs_diff"] == 0).sum())
    return Shown(
        table=declared_table("baselines_cpu", systems),
        words={"late": _LATE, "exact": exact, "systems": len(rows)},
        evidence=("measured", "simulated") if multiples else (),
    )


def answer(rows: pd.DataFrame) -> str:
    running = rows[rows["status"] == "ok"]
    flushed = running[running["staleness_steps"] == 0]
    return f"{len(running)} of {len(rows)} fit. Fastest: {_fastest(running)}; of those never late: {_fastest(flushed)}."


def _fastest(rows: pd.DataFrame) -> str:
    best = rows.loc[rows.groupby("model", sort=False)["tokens_per_s"].idxmax()]
    if len({row["schedule"] for row in best.to_dict("records")}) == 1:
        return f"{_name(best.iloc[0].to_dict())} on every model"
    return ", ".join(f"{_name(row)} on {style.model_name(row['model'])}" for row in best.to_dict("records"))


def _name(row: Mapping) -> str:
    return style.method_name(row["schedule"])


def _multiples(experiments: Experiments) -> tuple[Multiples, list[str]]:
    """The cost of late weights in tokens, by method, and the runs behind it; empty without these."""
    try:
        data = convergence.numbers(experiments)
    except MissingRuns:
        return {}, []
    return token_multiples(data, convergence.BY_BATCH), data["run_id"].tolist()


def _system(row: Row, bubble: str, multiples: Multiples, behind: Sequence[str]) -> Row:
    """The columns of a system that both tables have; `bubble` is the name of its field."""
    needed, even = _progress(row, multiples, behind)
    return {
        "needed": needed,
        "even": even,
        "bubble": None if row.get(bubble) is None else 100 * row[bubble],
        "device_GB": max(row["peak_memory_bytes"]) / 1e9,
        "host_GB": row["host_memory_bytes"] / 1e9,
        "links_GB": _moved(row, "h2d_bytes") + _moved(row, "d2h_bytes"),
        "net_GB": _moved(row, "net_bytes"),
        "exactly": ".1e" if row.get("grad_max_abs_diff") else ".0f",
    }


def _progress(row: dict, multiples: Multiples, behind: Sequence[str]) -> Sequence[Cell]:
    """Tokens to a loss over those of a flushed run, and tokens per second over that; dashes without training."""
    pace, run = row["tokens_per_s"], row["run_id"]
    if row["status"] != "ok" or not row["staleness_steps"]:
        return NOTHING, ours(pace, ",.0f", run)
    method = _TRAINED_AS.get(row["generator"], row["generator"])
    if method not in multiples:
        return NOTHING, NOTHING
    needed = multiples[method]
    even = None if isinf(needed.median) else pace / needed.median
    return ranged(needed, ".2f", behind), ours(even, ",.0f", (run, *behind))


def _moved(row: dict, link: str) -> float:
    """Gigabytes of a step over one kind of link, for all devices."""
    found = row.get(link)
    return sum(found) / 1e9 / row["num_steps"] if isinstance(found, list) else 0.0


def draw(rows: pd.DataFrame) -> Figure:
    """A panel for each model with bars from the fastest system down; late systems are hatched."""
    models = list(dict.fromkeys(rows["model"]))
    most = max(len(rows[rows["model"] == model]) for model in models)
    with style.figure(2.75 * len(models), 0.9 + 0.2 * most) as figure:
        for axes, model in zip(style.model_panels(figure, models), models, strict=True):
            _draw_model(axes, rows[rows["model"] == model])
        figure.supxlabel("tokens/s, simulated on equal terms", fontsize=8.5)
        drawn = rows[rows["status"] == "ok"]
        late = drawn["staleness_steps"] > 0
        looks = {"flushed": (~late, ""), "reads late weights": (late, _LATE_HATCH)}
        handles = [style.bar_key(name, hatch=hatch) for name, (found, hatch) in looks.items() if found.any()]
        figure.legend(handles=handles, loc="outside lower right", ncols=2)
        return figure


_LATE_HATCH = "////"


def _draw_model(axes: Axes, rows: pd.DataFrame) -> None:
    ordered = rows.assign(pace=rows["tokens_per_s"].where(rows["status"] == "ok", -1.0))
    ordered = ordered.sort_values("pace", ascending=False, kind="stable")
    room = 1.3 * max(ordered["pace"].max(), 1.0)
    for height, row in enumerate(ordered.to_dict("records")):
        if row["status"] != "ok":
            axes.text(0.01 * room, height, _SHORT.get(row["status"], row["status"]), va="center", fontsize=6)
            continue
        colour = style.look_of(row["schedule"]).colour
        hatch = _LATE_HATCH if row["staleness_steps"] else ""
        axes.barh(height, row["pace"], 0.74, color=colour, edgecolor="black", linewidth=0.4, hatch=hatch)
        axes.text(row["pace"] + 0.01 * room, height, f"{row['pace']:,.0f}", va="center", fontsize=6)
    names = [_name(row) for row in ordered.to_dict("records")]
    axes.set_yticks(range(len(names)), names, fontsize=6)
    axes.set(ylim=(len(names) - 0.4, -0.6), xlim=(0, room))
    style.grid_for_rows(axes, num_ticks=3)


_SHORT = {"oom": "does not fit", "infeasible": "cannot run", "failed": "failed"}
