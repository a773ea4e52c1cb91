"""Figure 2: time to recompute a layer against time to reload its activations."""

from collections.abc import Callable, Iterator

from analysis.claims.claim import Claim, Record, section
from analysis.claims.evidence import roofline
from analysis.claims.printed import printed
from analysis.exhibits.style import model_name
from analysis.records.paper import PUBLISHED_MODELS

_FIELDS: dict[str, tuple[str, str, Callable[[Record], float]]] = {
    "recompute_ms": ("time to recompute a layer", "ms", lambda run: 1e3 * run["recompute_s"]),
    "reload_ms": ("time to reload a layer's activations", "ms", lambda run: 1e3 * run["reload_s"]),
    "ratio": ("reload over recompute", "x", lambda run: run["reload_over_recompute"]),
}

# Models whose heads do not add up to the hidden size: the corrected table has a number for them.
_CORRECTED = ("gpt_oss_20b", "qwen3_32b", "qwen3_235b_lora")


@section(60, "Figure 2: recompute or reload", "RoundPipe, figure 2 (section 2.1.1)")
def claims() -> Iterator[Claim]:
    """Both times and their ratio as published, then with the true width of the heads."""
    for model in PUBLISHED_MODELS:
        for column, (metric, unit, value) in _FIELDS.items():
            yield _claim(model, column, metric, unit, "artifact", value)
    for model in _CORRECTED:
        yield _corrected_recompute(model)
        yield _ratio_with_both_corrected(model)


def _claim(model: str, column: str, metric: str, unit: str, convention: str, value: Callable[[Record], float]) -> Claim:
    return Claim(
        id=f"figure2/{model}/{column}",
        statement=f"{model_name(model)}: {metric} on an RTX 4090, 4 sequences of 2,048 tokens",
        metric=metric,
        unit=unit,
        published=printed("figure2", column, model=PUBLISHED_MODELS[model]),
        evidence="derived",
        needs=(roofline(convention, "8x_rtx4090", model),),
        value=value,
    )


def _corrected_recompute(model: str) -> Claim:
    metric, unit, value = _FIELDS["recompute_ms"]
    return _claim(model, "recompute_corrected_ms", f"{metric}, true width of the heads", unit, "corrected", value)


def _ratio_with_both_corrected(model: str) -> Claim:
    return Claim(
        id=f"figure2/{model}/ratio_true_heads",
        statement=f"{model_name(model)}: the ratio holds for the heads the model has",
        metric="reload over recompute, both with the true width of the heads",
        unit="x",
        published=printed("figure2", "ratio", model=PUBLISHED_MODELS[model]),
        evidence="derived",
        needs=(roofline("corrected", "8x_rtx4090", model),),
        value=lambda run: run["reload_over_recompute"],
        contradiction=(
            "the formulas take heads x head_dim for the hidden size; with the true width of queries and keys more is "
            "computed and more is reloaded, and the ratio is {value}; recomputing stays faster"
        ),
    )
