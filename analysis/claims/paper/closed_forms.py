"""Figures 2, 3 and 5, which are closed forms: recomputing against reloading, ideal bubbles, operational intensity."""

from collections.abc import Callable, Iterator
from dataclasses import replace

from analysis.claims.claim import Claim, Record, figure17, roofline, section
from analysis.exhibits.style import method_name, model_name
from analysis.records.published import PUBLISHED_MODELS, Printed, printed, throughput_run, where

_FIELDS: dict[str, tuple[str, str, Callable[[Record], float]]] = {
    "recompute_ms": ("time to recompute a layer", "ms", lambda run: 1e3 * run["recompute_s"]),
    "reload_ms": ("time to reload a layer's activations", "ms", lambda run: 1e3 * run["reload_s"]),
    "ratio": ("reload over recompute", "x", lambda run: run["reload_over_recompute"]),
}

# Models whose heads do not add up to the hidden size: the corrected table has a number for them.
_CORRECTED = ("gpt_oss_20b", "qwen3_32b", "qwen3_235b_lora")


@section(60, "Figure 2: recompute or reload", "RoundPipe, figure 2 (section 2.1.1)")
def recompute_or_reload() -> Iterator[Claim]:
    """Both times and their ratio as published, then with the true width of the heads."""
    for model in PUBLISHED_MODELS:
        for column in _FIELDS:
            yield _claim(model, column)
    for model in _CORRECTED:
        true_heads = f"{_FIELDS['recompute_ms'][0]}, true width of the heads"
        yield _claim(model, "recompute_ms", "recompute_corrected_ms", "corrected", true_heads)
        yield replace(
            _claim(model, "ratio", convention="corrected"),
            id=f"figure2/{model}/ratio_true_heads",
            statement=f"{model_name(model)}: the ratio holds for the heads the model has",
            metric="reload over recompute, both with the true width of the heads",
            contradiction=(
                "the formulas take heads x head_dim for the hidden size; with the true width of queries and keys more "
                "is computed and more is reloaded, and the ratio is {value}; recomputing stays faster"
            ),
        )


def _claim(model: str, field: str, column: str = "", convention: str = "artifact", metric: str = "") -> Claim:
    """A field of `_FIELDS`, against its column of figure2.csv or another one."""
    named, unit, value = _FIELDS[field]
    return Claim(
        id=f"figure2/{model}/{column or field}",
        statement=f"{model_name(model)}: {metric or named} on an RTX 4090, 4 sequences of 2,048 tokens",
        metric=metric or named,
        unit=unit,
        published=printed("figure2", column or field, model=PUBLISHED_MODELS[model]),
        evidence="derived",
        needs=(roofline(convention, "8x_rtx4090", model),),
        value=value,
    )


_ABOVE = Printed("above", "RoundPipe, section 2.3: real interleaved schedules stay above the ideal bubble")


@section(70, "Figure 3: ideal and simulated bubbles", "RoundPipe, figure 3 (section 2.3)")
def ideal_bubbles() -> Iterator[Claim]:
    """The ideal of each model, and both looped schedules above it."""
    for model, name in PUBLISHED_MODELS.items():
        yield Claim(
            id=f"figure3/{model}/ideal",
            statement=f"{model_name(model)}: bubble of an interleaved pipeline of equal layers, 16 microbatches",
            metric="ideal bubble",
            unit="%",
            published=printed("figure3", "ideal_bubble_percent", model=name),
            evidence="derived",
            needs=(roofline("artifact", "8x_rtx4090", model),),
            value=lambda run: 100 * run["ideal_bubble"],
        )
    for model in PUBLISHED_MODELS:
        for schedule in ("interleaved_1f1b", "looped_bfs"):
            yield Claim(
                id=f"figure3/{model}/{schedule}_above_ideal",
                statement=f"{method_name(schedule)} on {model_name(model)} simulates above the ideal bubble",
                metric="simulated against ideal bubble",
                published=_ABOVE,
                needs=(figure17(schedule, model), roofline("artifact", "8x_rtx4090", model)),
                value=lambda run, ideal: "above" if run["bubble_makespan"] > ideal["ideal_bubble"] else "not above",
            )


_FIGURE5 = "RoundPipe, figure 5 (section 3.3)"

# Machine -> its GPU in figure5.csv and hardware.csv.
_GPUS = {"8x_rtx4090": "rtx4090", "8x_a800": "a800", "8x_rtx5090": "rtx5090", "8x_h100": "h100"}


@section(80, "Figure 5: operational intensity", _FIGURE5)
def intensities() -> Iterator[Claim]:
    """Intensities, thresholds, smallest batches, and whether the batches that were run are large enough."""
    for model in PUBLISHED_MODELS:
        yield _intensity(model)
    for cluster in _GPUS:
        yield _threshold(cluster)
    for model in PUBLISHED_MODELS:
        for cluster in _GPUS:
            yield _smallest_batch(model, cluster)
    for model in ("gpt_oss_20b", "qwen3_235b_lora"):
        yield _smallest_batch_true_heads(model)
    for model in PUBLISHED_MODELS:
        yield _large_enough(model)


def _intensity(model: str) -> Claim:
    return Claim(
        id=f"figure5/{model}/intensity",
        statement=f"{model_name(model)}: FLOPs of a layer per byte uploaded for one sequence of 2,048 tokens",
        metric="operational intensity",
        unit="FLOP/byte",
        published=printed("figure5", "operational_intensity_batch1_flop_per_byte", model=PUBLISHED_MODELS[model]),
        evidence="derived",
        needs=(roofline("artifact", "8x_rtx4090", model),),
        value=lambda run: run["intensity_flop_per_byte"][run["batch_sequences"].index(1)],
    )


def _threshold(cluster: str) -> Claim:
    gpu = _GPUS[cluster]
    return Claim(
        id=f"figure5/threshold/{gpu}",
        statement=f"{gpu}: FLOP/byte from which compute is the limit, peak over link",
        metric="roofline threshold",
        unit="FLOP/byte",
        published=printed("hardware", "value", item="roofline_threshold", applies_to=gpu),
        evidence="derived",
        needs=(roofline("artifact", cluster, "qwen3_1p7b"),),
        value=lambda run: run["ridge_flop_per_byte"],
        contradiction="the stated peak over the stated link is {value}; the constant takes another peak"
        if gpu == "rtx4090"
        else "",
    )


def _smallest_batch(model: str, cluster: str) -> Claim:
    gpu = _GPUS[cluster]
    return Claim(
        id=f"figure5/{model}/smallest_batch_{gpu}",
        statement=f"{model_name(model)}: fewest sequences per upload that make {gpu} compute-bound",
        metric="smallest compute-bound batch",
        unit="sequences",
        published=printed("figure5", f"smallest_batch_{gpu}", model=PUBLISHED_MODELS[model]),
        tolerance=0.0,
        evidence="derived",
        needs=(roofline("artifact", cluster, model),),
        value=lambda run: run["smallest_compute_bound_batch"],
    )


def _smallest_batch_true_heads(model: str) -> Claim:
    claim = _smallest_batch(model, "8x_rtx4090")
    return replace(
        claim,
        id=f"{claim.id}_true_heads",
        statement=f"{claim.statement}, for the heads the model has",
        needs=(roofline("corrected", "8x_rtx4090", model),),
        contradiction="with the true width of the heads a layer computes more per byte: {value} sequences are enough",
    )


def _large_enough(model: str) -> Claim:
    return Claim(
        id=f"figure5/{model}/batch_of_the_run",
        source=f"{_FIGURE5}, against the settings of figure 10",
        statement=f"{model_name(model)}: the sequences per upload of the throughput run make RTX 4090 compute-bound",
        metric="smallest compute-bound batch, at most that of the run",
        unit="sequences",
        published=_sequences_per_upload(model),
        relation="<=",
        tolerance=0.0,
        evidence="derived",
        needs=(roofline("artifact", "8x_rtx4090", model),),
        value=lambda run: run["smallest_compute_bound_batch"],
        contradiction="by the paper's own formula {value} sequences per upload are needed"
        if model == "qwen3_235b_lora"
        else "",
    )


def _sequences_per_upload(model: str) -> Printed:
    """Microbatches a call times sequences a microbatch."""
    row = throughput_run(model)
    sequences = int(row["microbatches_per_call"]) * float(row["micro_batch_sequences"])
    of = "microbatches_per_call x micro_batch_sequences"
    return Printed(f"{sequences:g}", where("run_settings", of, row["model"], row["source"]))
