"""Figure 5: how many sequences have to share an upload of a layer until computing takes longer than loading?"""

from operator import itemgetter

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.exhibits import style
from analysis.exhibits.exhibit import NOTHING, Cell, Table, exhibit_of, label, ours, table, theirs
from analysis.records import runs
from analysis.records.experiments import Experiments
from analysis.records.published import PUBLISHED_MODELS, look_up

# Clusters by rising threshold -> their names in published tables and in text.
GPUS = {
    "8x_rtx5090": ("rtx5090", "RTX 5090"),
    "8x_a800": ("a800", "A800"),
    "8x_rtx4090": ("rtx4090", "RTX 4090"),
    "8x_h100": ("h100", "H100"),
}
COUNTS = ("artifact", "corrected")


def numbers(experiments: Experiments) -> pd.DataFrame:
    """The roofline records of all models and GPUs in both counts."""
    found = [runs.closed_forms(experiments, cluster, count) for count in COUNTS for cluster in GPUS]
    return pd.concat(found).reset_index(drop=True)


def answer(data: pd.DataFrame) -> str:
    rows = data[data["cluster"] == "8x_rtx4090"]
    here = rows.pivot(index="model", columns="convention", values="smallest_compute_bound_batch")
    batches = []
    for model in runs.models_of(data):
        artifact, corrected = here.loc[model, list(COUNTS)]
        other = "" if artifact == corrected else f" ({corrected:.0f} with the corrected count)"
        batches.append(f"{style.model_name(model)} {artifact:.0f}{other}")
    return f"Smallest batch above the RTX 4090's line: {', '.join(batches)}."


def tabulate(data: pd.DataFrame) -> Table:
    """The thresholds; then for each model the intensity at batch 1 and the smallest batch above each threshold."""
    columns = ["model", "intensity at batch 1 (FLOP/byte)", "published", "corrected"]
    for _, name in GPUS.values():
        columns += [f"smallest batch, {name} (sequences)", "published", "corrected"]
    found = data.set_index(["model", "cluster", "convention"]).to_dict("index")
    thresholds = [label("threshold (FLOP/byte)"), NOTHING, NOTHING, NOTHING]
    for cluster, (name, _) in GPUS.items():
        record = next(row for (_, gpu, count), row in found.items() if (gpu, count) == (cluster, "artifact"))
        published = look_up("hardware", "value", item="roofline_threshold", applies_to=name)
        thresholds += [
            ours(record["ridge_flop_per_byte"], ",.1f", record["run_id"]),
            theirs(float(published.value), ",.0f", published.source),
            NOTHING,
        ]
    return table(columns, [thresholds, *(_model_row(found, model) for model in runs.models_of(data))])


def _model_row(found: dict, model: str) -> list[Cell]:
    first, *_ = GPUS
    columns = {"operational_intensity_batch1_flop_per_byte": (first, lambda run: run["intensity_flop_per_byte"][0])}
    for cluster, (gpu, _) in GPUS.items():
        columns[f"smallest_batch_{gpu}"] = cluster, itemgetter("smallest_compute_bound_batch")
    row = [label(style.model_name(model))]
    for column, (cluster, value) in columns.items():
        published = look_up("figure5", column, model=PUBLISHED_MODELS[model])
        artifact, corrected = (found[model, cluster, count] for count in COUNTS)
        row += [
            ours(value(artifact), ".0f", artifact["run_id"]),
            theirs(published.value, ".0f", published.source),
            ours(value(corrected), ".0f", corrected["run_id"]),
        ]
    return row


def draw(data: pd.DataFrame) -> Figure:
    """Intensity of each model over the batch, with the threshold of each GPU."""
    drawn = data[data["convention"] == "artifact"]
    smallest = drawn.set_index(["model", "cluster"])["smallest_compute_bound_batch"]
    with style.figure(7.2, 4.2) as figure:
        axes = figure.subplots()
        for model in runs.models_of(drawn):
            row = drawn[(drawn["model"] == model) & (drawn["cluster"] == "8x_rtx4090")].iloc[0]
            look = style.MODELS[model]
            axes.plot(
                row["batch_sequences"],
                row["intensity_flop_per_byte"],
                color=look.colour,
                marker=look.marker,
                label=f"{look.name}: {', '.join(f'{smallest[model, cluster]:.0f}' for cluster in GPUS)}",
            )
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        batches = drawn["batch_sequences"].iloc[0]
        axes.set_xticks(batches, list(map(str, batches)))
        _draw_thresholds(axes, drawn, batches[-1])
        axes.set(xlabel="sequences of 2,048 tokens per upload", ylabel="operational intensity (FLOP/byte)")
        names = ", ".join(name for _, name in GPUS.values())
        axes.legend(loc="lower right", title=f"smallest batch above the lines of\n{names}", alignment="left")
        return figure


def _draw_thresholds(axes: Axes, drawn: pd.DataFrame, end: int) -> None:
    # A800 and RTX 4090 lie close together: one name goes below its line, the other above.
    looks = ((":", -2, "top"), ("--", -2, "top"), ("-", 2, "bottom"), ("-.", 2, "bottom"))
    for (cluster, (_, name)), (dashes, shift, place) in zip(GPUS.items(), looks, strict=True):
        ridge = drawn.loc[drawn["cluster"] == cluster, "ridge_flop_per_byte"].iloc[0]
        axes.axhline(ridge, color="black", linewidth=0.9, linestyle=dashes)
        style.note(axes, f"{name}: {ridge:,.0f}", (1, ridge), (2, shift), va=place, fontsize=7)
    axes.set_xlim(0.93, 1.07 * end)


exhibit = exhibit_of("figure5", numbers, tabulate, draw, answer=answer)
