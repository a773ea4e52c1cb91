"""Figure 5: operational intensity of a layer whose weights stream, and the batch from which compute is the limit."""

from collections.abc import Iterator
from dataclasses import replace

from analysis.claims.claim import Claim, section
from analysis.claims.evidence import roofline
from analysis.claims.printed import Printed, printed, rows, where
from analysis.exhibits.style import model_name
from analysis.records.paper import PUBLISHED_MODELS

SOURCE = "RoundPipe, figure 5 (section 3.3)"

# Machine -> its GPU in figure5.csv and hardware.csv.
_GPUS = {"8x_rtx4090": "rtx4090", "8x_a800": "a800", "8x_rtx5090": "rtx5090", "8x_h100": "h100"}


@section(80, "Figure 5: operational intensity", SOURCE)
def claims() -> Iterator[Claim]:
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
        source=f"{SOURCE}, against the settings of figure 10",
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
    row = next(
        rows(
            "run_settings",
            experiment="throughput",
            system="roundpipe",
            platform="8x-rtx4090-24gb",
            model=PUBLISHED_MODELS[model],
        )
    )
    sequences = int(row["microbatches_per_call"]) * float(row["micro_batch_sequences"])
    of = "microbatches_per_call x micro_batch_sequences"
    return Printed(f"{sequences:g}", where("run_settings", of, row["model"], row["source"]))
