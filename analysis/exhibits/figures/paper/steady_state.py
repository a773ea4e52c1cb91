"""Idle time of asynchronous steps: RoundPipe's calls back to back, beside the published labels."""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from analysis.exhibits import style
from analysis.exhibits.exhibit import Cell, Table, exhibit_of, label, ours, table, theirs
from analysis.records import runs
from analysis.records.experiments import Experiments, MissingRuns, succeeded
from analysis.records.published import PUBLISHED_MODELS, Published, look_up

COUNTS = (8, 9, 10, 16)  # N, the microbatches of a call


def numbers(experiments: Experiments) -> pd.DataFrame:
    """One row for each model and N: `bubble`, `bubble_between_ends`, `bubble_causal` (%), and the run ids.

    In the causal runs, which may be missing, the fused stage's forward waits for its input. MissingRuns without others.
    """
    keys = ["model", "num_microbatches"]
    found = runs.of_models(experiments, "steady_state", num_microbatches=COUNTS)
    found = found.assign(bubble=100 * found["bubble_steady"], bubble_between_ends=100 * found["bubble_between_ends"])
    rows = found[[*keys, "bubble", "bubble_between_ends", "run_id"]].reset_index(drop=True)
    try:
        causal = succeeded(experiments.cells("steady_causal"))
    except MissingRuns:
        causal = pd.DataFrame()
    if causal.empty:
        return rows.assign(bubble_causal=float("nan"), run_id_causal="")
    causal = causal.assign(bubble_causal=100 * causal["bubble_steady"])[[*keys, "run_id", "bubble_causal"]]
    return rows.merge(causal, "left", keys, suffixes=("", "_causal"))


def answer(data: pd.DataFrame) -> str:
    bubbles = data.pivot(index="model", columns="num_microbatches", values="bubble").loc[runs.models_of(data)]
    labels = pd.Series({model: _label(model).value for model in runs.models_of(data)})
    counts = counts_of(data)
    higher = ", ".join(str(count) for count in counts if (bubbles[count] > labels).all())
    lower = ", ".join(str(count) for count in counts if (bubbles[count] < labels).all())
    spans = "; ".join(f"N = {count}: {bubbles[count].min():.2f} to {bubbles[count].max():.2f} %" for count in counts)
    text = f"Labels {labels.min():.2f} to {labels.max():.2f} %; simulated {spans}."
    if higher:
        text += f" The simulated bubble is above the label of every model at N = {higher}."
    return text + (f" It is below the label of every model at N = {lower}." if lower else "")


def counts_of(data: pd.DataFrame) -> list[int]:
    return [count for count in COUNTS if count in set(data["num_microbatches"])]


def _label(model: str) -> Published:
    return look_up("async_bubble", "bubble_percent", model=PUBLISHED_MODELS[model], kind="published")


def tabulate(data: pd.DataFrame) -> Table:
    """One row for each model: the label, then for every N the bubbles of `numbers`."""
    causal = data["bubble_causal"].notna().any()
    columns = ["model", "published label (%)"]
    for count in counts_of(data):
        columns += [f"N = {count} (%)", *([f"N = {count}, the head waits (%)"] if causal else [])]
        columns += [f"N = {count}, between the ends (%)", f"N = {count}, between the ends, independent (%)"]
    found = data.set_index(["model", "num_microbatches"]).to_dict("index")
    return table(columns, (_row(found, model, counts_of(data), causal) for model in runs.models_of(data)))


def _row(found: dict, model: str, counts: list[int], causal: bool) -> list[Cell]:
    name, published = PUBLISHED_MODELS[model], _label(model)
    row = [label(style.model_name(model)), theirs(published.value, ".2f", published.source)]
    for count in counts:
        numbers = found[model, count]
        other = look_up("async_bubble", "bubble_percent", model=name, num_microbatches_per_call=str(count))
        row += [
            ours(numbers["bubble"], ".2f", numbers["run_id"]),
            *([ours(numbers["bubble_causal"], ".2f", numbers["run_id_causal"])] if causal else []),
            ours(numbers["bubble_between_ends"], ".2f", numbers["run_id"]),
            theirs(other.value, ".2f", other.source),
        ]
    return row


def draw(data: pd.DataFrame) -> Figure:
    causal = data["bubble_causal"].notna().any()
    with style.figure(12.0, 3.6) as figure:
        axes = figure.subplots()
        models = runs.models_of(data)
        for place, model in enumerate(models):
            _bar(axes, place - 0.34, _label(model).value, "white", style.HATCHES["published"])
            for number, row in enumerate(data[data["model"] == model].itertuples()):
                x = place - 0.17 + 0.17 * number
                _bar(axes, x, row.bubble, _SHADES[row.num_microbatches], "", row.bubble_causal)
        axes.set_xticks(range(len(models)), [style.model_name(model) for model in models])
        axes.set_ylabel("bubble back to back (%)")
        axes.margins(x=0.02, y=0.12)
        handles = [style.bar_key("published label", hatch=style.HATCHES["published"])]
        handles += [style.bar_key(f"N = {count}, simulated", _SHADES[count]) for count in counts_of(data)]
        if causal:
            handles.append(Patch(fill=False, linestyle="--", label="(the head waits for its input)"))
        figure.legend(handles=handles, loc="outside lower center", ncols=3 if causal else 5)
        return figure


_SHADES = dict(zip(COUNTS, style.LIGHTER, strict=True))


def _bar(axes: Axes, x: float, value: float, colour: str, hatch: str, causal: float = float("nan")) -> None:
    axes.bar(x, value, 0.16, color=colour, edgecolor="black", hatch=hatch)
    top, text = value, f"{value:.2f}"
    if pd.notna(causal):
        axes.bar(x, causal, 0.16, fill=False, edgecolor="black", linestyle="--", linewidth=0.9)
        top, text = max(value, causal), f"({causal:.2f})\n{text}"
    style.note(axes, text, (x, top), (0, 2), ha="center", fontsize=5.8)


exhibit = exhibit_of("steady_state", numbers, tabulate, draw, answer=answer)


def causal_numbers(experiments: Experiments) -> pd.DataFrame:
    """One row for each model: `bubble` (%), `makespan_s` and `run_id` of both (`_ahead`, `_waits`), `longer` (%)."""
    data = pd.DataFrame({"model": list(runs.MODELS)})
    for name, experiment in (("ahead", "figure17"), ("waits", "causal")):
        rows = runs.of_models(experiments, experiment, schedule=("roundpipe",)).reset_index(drop=True)
        data[f"bubble_{name}"] = 100 * rows["bubble_makespan"]
        data[[f"makespan_s_{name}", f"run_id_{name}"]] = rows[["makespan_s", "run_id"]]
    return data.assign(longer=100 * (data["makespan_s_waits"] / data["makespan_s_ahead"] - 1))


def causal_answer(data: pd.DataFrame) -> str:
    worst = data.loc[data["longer"].idxmax()]
    return (
        f"Waiting makes it {data['longer'].min():.2f} to {data['longer'].max():.2f} % longer, most for "
        f"{style.model_name(worst['model'])} (bubble {worst['bubble_ahead']:.2f} to {worst['bubble_waits']:.2f} %)."
    )


causal = exhibit_of("causal", causal_numbers, answer=causal_answer)
