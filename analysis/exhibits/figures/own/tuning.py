"""The effect of tuned cuts on every schedule, and RoundPipe's lead."""

from itertools import product

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.exhibits import style
from analysis.exhibits.exhibit import (
    NOTHING,
    Cell,
    Table,
    cut_of,
    declared_table,
    exhibit_of,
    label,
    ours,
    table,
    theirs,
    wide,
)
from analysis.records import runs
from analysis.records.experiments import Experiments
from analysis.records.published import PUBLISHED_MODELS, look_up

CUTS = tuple(style.PARTITIONS)


def plans_table(found: dict[tuple[str, str], dict]) -> Table:
    models = [model for model in runs.MODELS if (model, "published") in found]
    return declared_table("plans", (_plans_row(found[model, cut]) for model in models for cut in CUTS))


def plans_numbers(experiments: Experiments) -> dict[tuple[str, str], dict]:
    """RoundPipe's records by model and cut."""
    rows = {cut: runs.calls(experiments, cut, ("roundpipe",)).to_dict("records") for cut in CUTS}
    return {(row["model"], cut): row for cut in CUTS for row in rows[cut]}


def plans_answer(found: dict) -> str:
    """Models on which the planner's stage counts differ from the published ones, and the gain of the search."""
    models = dict.fromkeys(model for model, _ in found)
    other, gains, worse = [], [], []
    for model in models:
        published, greedy, search = (found[model, cut] for cut in ("published", "greedy", "search"))
        if any(greedy[key] != published[key] for key in ("num_stages", "num_backward_stages")):
            other.append(style.model_name(model))
        gains.append(100 * published["bubble_makespan"] - 100 * search["bubble_makespan"])
        slower = [cut for cut in CUTS if search["makespan_s"] > found[model, cut]["makespan_s"]]
        worse += [f"{style.model_name(model)} ({cut})" for cut in slower]
    but = f", but is slower than {', '.join(worse)}." if worse else " and is never slower than any of the three others."
    return (
        "The planner's rule gives other stage counts than the published cut for "
        f"{', '.join(other) or 'no model'}. The searched cut idles {min(gains):.2f} to {max(gains):.2f} "
        f"percentage points less than the published one{but}"
    )


def _plans_row(row: dict) -> dict:
    model, cut = PUBLISHED_MODELS[row["model"]], row["partition"]
    stages = {
        direction: _printed(model, cut, ".0f", ("partitions", "num_stages"), f"{direction}_stages", direction=direction)
        for direction in ("forward", "backward")
    }
    return row | {
        "plan": style.PARTITIONS[cut].name,
        **stages,
        "bubble": 100 * row["bubble_makespan"],
        "share": 100 * ((row["switch_s"] + row["intra_s"]) / (row["num_devices"] * row["makespan_s"])),
        "known": _printed(model, cut, ".2f", ("bubble", "bubble_ratio_percent"), "sync_bubble_percent"),
        "cut": cut_of(row),
    }


def _printed(model: str, cut: str, form: str, simulated: tuple[str, str], planned: str, **keys: str) -> Cell:
    """The published number of the published or the planner's cut; a dash for the other cuts.

    It stands in a table and column `simulated`, in the row with further `keys`, or in the planner's column `planned`.
    """
    if cut == "published":
        known = look_up(*simulated, scheduler="roundpipe", model=model, **keys)
    elif cut == "greedy":
        known = look_up("planner", planned, model=model, memory_cap="none")
    else:
        return NOTHING
    return theirs(known.value, form, known.source)


plans_exhibit = exhibit_of("plans", plans_numbers, plans_table, answer=plans_answer)


AHEAD = "search, recompute ahead"  # recomputation before the gradient arrives, as RoundPipe always does
ONE_ROUND = "search, one round"  # RoundPipe with the whole call as one round
BACK_TO_BACK = "back to back"  # RoundPipe's calls; the baselines flush after each
NUM_MICROBATCHES = 16  # of a call

_LEADS = style.looks("leads")


def numbers(experiments: Experiments) -> pd.DataFrame:
    """One row for each model, schedule and cut: `bubble` (%), `makespan_s`, `partition_layers`, `run_id`.

    For RoundPipe back to back, `makespan_s` is the time from call to call.
    """
    found = [runs.calls(experiments, cut).assign(cut=cut) for cut in CUTS]
    found.append(runs.of_models(experiments, "recompute_ahead", schedule=runs.BASELINES).assign(cut=AHEAD))
    found.append(runs.of_models(experiments, "one_round").assign(cut=ONE_ROUND, schedule="roundpipe"))
    steady = runs.of_models(experiments, "steady_state", num_microbatches=(NUM_MICROBATCHES,))
    steady = steady.assign(cut=BACK_TO_BACK, bubble_makespan=steady["bubble_steady"], makespan_s=steady["step_time_s"])
    rows = pd.concat([*found, steady]).reset_index(drop=True)
    rows["bubble"] = 100 * rows["bubble_makespan"]
    return rows[["model", "schedule", "cut", "bubble", "makespan_s", "partition_layers", "num_stages", "run_id"]]


# The cuts of the baselines and of RoundPipe, where they differ.
_COMPARED = {AHEAD: (AHEAD, "search"), ONE_ROUND: (AHEAD, ONE_ROUND), BACK_TO_BACK: ("search", BACK_TO_BACK)}


def leads(data: pd.DataFrame) -> pd.DataFrame:
    """One row for each model and comparison: `lead` (time of the `best` baseline over RoundPipe's), `run_ids`."""
    rows = []
    for model, cut in product(runs.models_of(data), _LEADS):
        of_model, (theirs, mine) = data[data["model"] == model], _COMPARED.get(cut, (cut, cut))
        dealt = of_model["schedule"] == "roundpipe"
        own = of_model[(of_model["cut"] == mine) & dealt].iloc[0]
        baselines = of_model[(of_model["cut"] == theirs) & ~dealt]
        best = baselines.loc[baselines["makespan_s"].idxmin()]
        lead, run_ids = best["makespan_s"] / own["makespan_s"], (best["run_id"], own["run_id"])
        rows.append({"model": model, "cut": cut, "best": best["schedule"], "lead": lead, "run_ids": run_ids})
    return pd.DataFrame(rows)


def answer(data: pd.DataFrame) -> str:
    lead = leads(data).pivot(index="model", columns="cut", values="lead")
    spans = [f"{lead[cut].min():.3f} to {lead[cut].max():.3f} ({look.name})" for cut, look in _LEADS.items()]
    single = lead.drop(columns=BACK_TO_BACK).min(axis=1)
    lost = [style.model_name(model) for model in runs.models_of(data) if single[model] < 1]
    end = f" RoundPipe's single call is not the fastest for {', '.join(lost)}." if lost else ""
    return f"RoundPipe's lead over the best baseline: {'; '.join(spans)}.{end}"


def tabulate(data: pd.DataFrame) -> Table:
    """Bubbles of every schedule by cut, and the searched cut."""
    cuts = data["cut"].replace({AHEAD: "ahead", ONE_ROUND: "one_round"})
    found = wide(data.assign(cut=cuts), ["model", "schedule"], "cut")
    rows = found.loc[list(product(runs.models_of(data), runs.schedules_of(data)))].reset_index().to_dict("records")
    searched = ({name: row[f"{name}_search"] for name in ("partition_layers", "run_id")} for row in rows)
    return declared_table("tuning", (row | {"cut": cut_of(own)} for row, own in zip(rows, searched, strict=True)))


def _lead_table(data: pd.DataFrame) -> Table:
    headings = [heading for look in _LEADS.values() for heading in (f"lead (×), {look.name}", "best baseline")]
    cells = {model: [label(style.model_name(model))] for model in runs.MODELS}
    for row in leads(data).itertuples():
        cells[row.model] += [ours(row.lead, ".4f", row.run_ids), label(style.method_name(row.best))]
    return table(["model", *headings], cells.values())


exhibit_of("lead", numbers, _lead_table, answer=answer)


def draw(data: pd.DataFrame) -> Figure:
    """A panel for each model with bubbles by schedule and cut; RoundPipe's leads on the right."""
    with style.figure(12, 3.9) as figure:
        models, schedules = runs.models_of(data), runs.schedules_of(data)
        *panels, last = figure.subplots(1, len(models) + 1, width_ratios=[2] * len(models) + [2.4])
        for axes, model in zip(panels, models, strict=True):
            _draw_model(axes, data[data["model"] == model], schedules)
            axes.set_title(style.model_name(model))
        names = [style.method_name(schedule).replace(" ", "\n") for schedule in schedules]
        panels[0].set_yticks(range(len(schedules)), names)
        _draw_leads(last, leads(data))
        figure.legend(handles=list(map(style.point_key, _LOOKS.values())), loc="outside lower left", ncols=3)
        figure.legend(handles=list(map(style.point_key, _LEADS.values())), loc="outside lower right", ncols=2)
        return figure


def _draw_model(axes: Axes, data: pd.DataFrame, schedules: list[str]) -> None:
    style.grid_for_rows(axes)
    for height, schedule in enumerate(schedules):
        for row in data[(data["schedule"] == schedule) & (data["cut"] != BACK_TO_BACK)].itertuples():
            look = _LOOKS[row.cut]
            shift = 0.7 * (list(_LOOKS).index(row.cut) / (len(_LOOKS) - 1) - 0.5)
            axes.plot(row.bubble, height + shift, look.marker, color=look.colour, markersize=5)
    _rows(axes, [""] * len(schedules))
    axes.set_xlim(0)
    axes.set_xlabel("bubble (%)")


_LOOKS = style.PARTITIONS | style.looks("further_cuts")


def _rows(axes: Axes, names: list[str]) -> None:
    """Named rows from the top down with borders between them."""
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    for border in range(1, len(names)):
        axes.axhline(border - 0.5, color=style.PALE, linewidth=0.6)


def _draw_leads(axes: Axes, rows: pd.DataFrame) -> None:
    style.grid_for_rows(axes)
    for number, (cut, look) in enumerate(_LEADS.items()):
        values = rows[rows["cut"] == cut]["lead"]
        heights = [place + 0.17 * (number - 2) for place in range(len(values))]
        axes.plot(values, heights, look.marker, color=look.colour)
        for value, height in zip(values, heights, strict=True):
            style.note(axes, f"{value:.2f}", (value, height), (6, 0), va="center", fontsize=6.5)
    axes.axvline(1, color=style.GREY, linewidth=0.8, linestyle=":")
    _rows(axes, [style.model_name(model).replace(" ", "\n") for model in runs.models_of(rows)])
    axes.margins(x=0.2)
    axes.set(title="RoundPipe's lead", xlabel="time, best baseline / RoundPipe")


exhibit = exhibit_of("tuning", numbers, tabulate, draw, answer=answer)
