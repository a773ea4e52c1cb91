"""Does the simulated bubble predict throughput? Simulated tokens/s beside published measurements."""

import pandas as pd
from matplotlib.figure import Figure

from analysis.exhibits import style
from analysis.exhibits.exhibit import Table, declared_table, exhibit_of
from analysis.records import runs
from analysis.records.experiments import Experiments
from analysis.records.published import PUBLISHED_MODELS, look_up

# Estimate -> the published system, and the look.
ESTIMATES = {
    "sync": ("roundpipe-sync", style.Look("one call (sync)", style.ORANGE, "P")),
    "label": ("roundpipe", style.Look("one call without fill and drain", style.BLACK, "x")),
    "back to back": ("roundpipe", style.Look("calls back to back, N = 10", style.VERMILION, "o")),
}
BACK_TO_BACK = 10  # microbatches of a call in the published measurements of four of the five models


def numbers(experiments: Experiments) -> pd.DataFrame:
    """One row for each model and estimate: `simulated`, `measured` (tokens/s), their `ratio`, `source`, `run_id`."""
    calls = runs.calls(experiments, schedules=("roundpipe",)).set_index("model")
    steady = runs.of_models(experiments, "steady_state", num_microbatches=(BACK_TO_BACK,)).set_index("model")
    rows = []
    for model in runs.MODELS:
        call = calls.loc[model]
        rows.append(_row(model, "sync", call["tokens_per_s"], call["run_id"]))
        # Throughput with switch and intra as the only idle time, as in the published asynchronous bars.
        label_share = (call["switch_s"] + call["intra_s"]) / (call["num_devices"] * call["makespan_s"])
        seconds = sum(call["busy_s"]) / call["num_devices"] / (1 - label_share)
        rows.append(_row(model, "label", call["tokens_per_step"] / seconds, call["run_id"]))
        rows.append(_row(model, "back to back", steady.loc[model, "tokens_per_s"], steady.loc[model, "run_id"]))
    return pd.DataFrame(rows)


def _row(model: str, estimate: str, simulated: float, run_id: str) -> dict:
    system, _ = ESTIMATES[estimate]
    measured = look_up("throughput", "tokens_per_s", system=system, model=PUBLISHED_MODELS[model])
    found = {"model": model, "estimate": estimate, "simulated": simulated, "measured": measured.value}
    return found | {"ratio": simulated / measured.value, "source": measured.source, "run_id": run_id}


def answer(data: pd.DataFrame) -> str:
    ratio = data.pivot(index="model", columns="estimate", values="ratio")["back to back"]
    names = {model: style.model_name(model) for model in runs.models_of(data)}
    near = [name for model, name in names.items() if ratio[model] < 1.2]
    far = [f"{name} ({ratio[model]:.2f} times)" for model, name in names.items() if ratio[model] >= 1.2]
    text = f"Back to back, it is within 20 % of the measurement for {', '.join(near) or 'no model'}"
    return text + (f" and too high for {', '.join(far)}." if far else ".")


def tabulate(data: pd.DataFrame) -> Table:
    rows = data.assign(name=[ESTIMATES[estimate][1].name for estimate in data["estimate"]]).to_dict("records")
    for row in rows:
        column = {"sync": "predicted_sync_ktokens_per_s", "label": "predicted_async_ktokens_per_s"}.get(row["estimate"])
        found = look_up("headline", column, model=PUBLISHED_MODELS[row["model"]]) if column else (None, "")
        row["printed"], row["printed_in"] = found
    return declared_table("prediction", rows)


def draw(data: pd.DataFrame) -> Figure:
    with style.figure(9.5, 3.4) as figure:
        rates, ratios = figure.subplots(1, 2)
        for shift, (estimate, (_, look)) in zip((-0.28, 0, 0.28), ESTIMATES.items(), strict=True):
            rows = data[data["estimate"] == estimate].reset_index()
            places = rows.index + shift
            name = "measured, published" if estimate == "sync" else ""
            rates.hlines(rows["measured"], places - 0.14, places + 0.14, color="black", linewidth=2, label=name)
            rates.plot(places, rows["simulated"], look.marker, color=look.colour, label=look.name)
            ratios.plot(places, rows["ratio"], look.marker, color=look.colour)
            for x, ratio in zip(places, rows["ratio"], strict=True):
                style.note(ratios, f"{ratio:.2f}", (x, ratio), (0, 5), ha="center", fontsize=6.3)
        names = [style.model_name(model).replace(" ", "\n") for model in runs.models_of(data)]
        for axes in (rates, ratios):
            axes.set_xticks(range(len(names)), names, fontsize=7)
        rates.set_yscale("log")
        rates.set_yticks([2000, 5000, 10_000, 20_000, 50_000])
        rates.yaxis.set_major_formatter("{x:,.0f}")
        rates.minorticks_off()
        rates.set(title="Throughput on 8 RTX 4090", ylabel="tokens/s")
        ratios.axhline(1, color="black", linewidth=1)
        ratios.set(title="Simulated over measured", ylabel="ratio", ylim=(0, 1.12 * data["ratio"].max()))
        style.legend_below(figure, rates, ncols=5)
        return figure


exhibit = exhibit_of("prediction", numbers, tabulate, draw, answer=answer)
