"""Beyond the paper: the gain of a work-conserving pool over strict rotation, by microbatches in a round."""

import pandas as pd
from matplotlib.figure import Figure

from analysis.exhibits import style
from analysis.exhibits.exhibit import Table, declared_table, exhibit_of, wide
from analysis.records import runs
from analysis.records.experiments import Experiments, index, succeeded

ROUNDS = (8, 4, 1)  # microbatches a round


def numbers(experiments: Experiments) -> pd.DataFrame:
    """One row for each model and dispatch: `round_size` (0 for rotation), `bubble` (%), `makespan_s`, `run_id`."""
    rotation = runs.of_models(experiments, "causal", schedule=("roundpipe",)).assign(round_size=0)
    pool = succeeded(experiments.cells("dispatch"))
    pool = pool.assign(round_size=[config["schedule"].get("round_size") for config in pool["config"]])
    wanted = [(model, size) for model in runs.MODELS for size in ROUNDS]
    pool = index(pool, ("model", "round_size"), wanted, "dispatch")
    rows = pd.concat([rotation, pool])[["model", "round_size", "bubble_makespan", "makespan_s", "run_id"]]
    rows["bubble"] = (100 * rows.pop("bubble_makespan")).clip(lower=0)  # rounding may leave it just below zero
    return rows.astype({"round_size": int}).reset_index(drop=True)


def answer(data: pd.DataFrame) -> str:
    bubbles = data.pivot(index="model", columns="round_size", values="bubble")
    spans = "; ".join(f"rounds of {size}: {bubbles[size].min():.2f} to {bubbles[size].max():.2f} %" for size in ROUNDS)
    return f"Bubble with rotation {bubbles[0].min():.2f} to {bubbles[0].max():.2f} %; dynamic, {spans}."


def tabulate(data: pd.DataFrame) -> Table:
    found = wide(data, ["model"], "round_size").loc[list(runs.MODELS)].reset_index()
    gains = {f"gain_{size}": found["makespan_s_0"] / found[f"makespan_s_{size}"] for size in ROUNDS}
    return declared_table("dispatch", found.assign(**gains))


def draw(data: pd.DataFrame) -> Figure:
    with style.figure(8.6, 3.0) as figure:
        axes = figure.subplots()
        for number, size in enumerate((0, *ROUNDS)):
            rows = data[data["round_size"] == size].set_index("model").loc[list(runs.MODELS)]
            places = [place - 0.3 + 0.2 * number for place in range(len(rows))]
            name = f"dynamic, rounds of {size}" if size else "rotation, rounds of 8"
            bars = axes.bar(places, rows["bubble"], 0.19, color=style.LIGHTER[number], edgecolor="black", label=name)
            axes.bar_label(bars, [f"{bubble:.1f}" for bubble in rows["bubble"]], padding=1, fontsize=6.2)
        axes.set_xticks(range(len(runs.MODELS)), [style.model_name(model) for model in runs.MODELS])
        axes.set_ylabel("bubble (% of devices × time)")
        figure.legend(loc="outside lower center", ncols=4)
        return figure


exhibit = exhibit_of("dispatch", numbers, tabulate, draw, answer=answer)
