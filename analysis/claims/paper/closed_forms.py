"""Figures 2, 3 and 5, which are closed forms: recompute or reload, ideal bubbles, operational intensity."""

from collections.abc import Callable, Iterator
from itertools import product

from analysis.claims.claim import Claim, Record, claim, section
from analysis.records.published import PUBLISHED_MODELS, Printed, throughput_run, where

_FIELDS: dict[str, Callable[[Record], float]] = {
    "recompute_ms": lambda run: 1e3 * run["recompute_s"],
    "reload_ms": lambda run: 1e3 * run["reload_s"],
    "ratio": lambda run: run["reload_over_recompute"],
}

# Models whose attention heads do not add up to the hidden size; the corrected table has their numbers.
_CORRECTED = ("gpt_oss_20b", "qwen3_32b", "qwen3_235b_lora")


@section(60, "Figure 2: recompute or reload", "RoundPipe, figure 2 (section 2.1.1)")
def recompute_or_reload() -> Iterator[Claim]:
    """Both times and their ratio, as published and with the true width of the heads."""
    for model, (field, value) in product(PUBLISHED_MODELS, _FIELDS.items()):
        yield claim(f"figure2/{{model}}/{field}", value, model=model)
    for model in _CORRECTED:
        yield claim("figure2/{model}/recompute_corrected_ms", _FIELDS["recompute_ms"], model=model)
        yield claim("figure2/{model}/ratio_true_heads", _FIELDS["ratio"], model=model)


_ABOVE = Printed("above", "RoundPipe, section 2.3: real interleaved schedules stay above the ideal bubble")


@section(70, "Figure 3: ideal and simulated bubbles", "RoundPipe, figure 3 (section 2.3)")
def ideal_bubbles() -> Iterator[Claim]:
    """The ideal bubble of each model, and that both looped schedules stay above it."""
    for model in PUBLISHED_MODELS:
        yield claim("figure3/{model}/ideal", lambda run: 100 * run["ideal_bubble"], model=model)
    for model, schedule in product(PUBLISHED_MODELS, ("interleaved_1f1b", "looped_bfs")):
        yield claim(
            "figure3/{model}/{schedule}_above_ideal",
            lambda run, ideal: "above" if run["bubble_makespan"] > ideal["ideal_bubble"] else "not above",
            published=_ABOVE,
            model=model,
            schedule=schedule,
        )


@section(80, "Figure 5: operational intensity", "RoundPipe, figure 5 (section 3.3)")
def intensities() -> Iterator[Claim]:
    """Intensities, thresholds, smallest batches, and whether the published runs used large enough batches."""
    gpus = ("rtx4090", "a800", "rtx5090", "h100")
    for model in PUBLISHED_MODELS:
        yield claim(
            "figure5/{model}/intensity",
            lambda run: run["intensity_flop_per_byte"][run["batch_sequences"].index(1)],
            model=model,
        )
    for gpu in gpus:
        contradiction = "the stated peak over the stated link is {value}; the constant takes another peak"
        yield claim(
            "figure5/threshold/{gpu}",
            lambda run: run["ridge_flop_per_byte"],
            gpu=gpu,
            contradiction=contradiction if gpu == "rtx4090" else "",
        )
    for model, gpu in product(PUBLISHED_MODELS, gpus):
        yield claim("figure5/{model}/smallest_batch_{gpu}", _smallest_batch, model=model, gpu=gpu)
    for model in ("gpt_oss_20b", "qwen3_235b_lora"):
        yield claim("figure5/{model}/smallest_batch_{gpu}_true_heads", _smallest_batch, model=model, gpu="rtx4090")
    for model in PUBLISHED_MODELS:
        contradiction = "by the paper's own formula {value} sequences per upload are needed"
        row = throughput_run(model)
        sequences = int(row["microbatches_per_call"]) * float(row["micro_batch_sequences"])
        source = where("run_settings", "microbatches_per_call x micro_batch_sequences", row["model"], row["source"])
        yield claim(
            "figure5/{model}/batch_of_the_run",
            _smallest_batch,
            published=Printed(f"{sequences:g}", source),
            model=model,
            contradiction=contradiction if model == "qwen3_235b_lora" else "",
        )


def _smallest_batch(run: Record) -> float:
    return float(run["smallest_compute_bound_batch"])
