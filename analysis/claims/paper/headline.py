"""Claims that follow from the published throughput: speed-ups, gain of asynchronous steps, FLOP rates, predictions."""

from collections.abc import Iterator

from analysis.claims.claim import Claim, Record, figure17, roofline, section
from analysis.exhibits.style import model_name
from analysis.records.published import PUBLISHED_MODELS, Printed, cell, printed, rows, table

PLATFORM = "8x-rtx4090-24gb"
_ABSTRACT = "RoundPipe, abstract"
_FIGURE10 = "RoundPipe, figure 10 (section 5.2)"
_THROUGHPUT = "analysis/published/throughput.csv"

# How far simulated and measured throughput may lie apart to be called near: no link contention, no optimizer,
# no host in the simulation.
_NEAR = 0.15


@section(90, "Headline numbers", _FIGURE10)
def claims() -> Iterator[Claim]:
    """Numbers that the published tables and our records must give again."""
    yield from _range_of_the_abstract()
    yield _only_system_for_235b()
    for model in PUBLISHED_MODELS:
        yield from _speedup(model)
        yield _async_gain(model)
        yield from _flop_rate(model)
        yield from _prediction(model)
        yield from _prediction_against_measurement(model)


def throughput(model: str) -> dict[str, float]:
    """Published tokens per second of every system that ran a model on the eight RTX 4090; FSDP as in the figure."""
    found = rows("throughput", model=PUBLISHED_MODELS[model], platform=PLATFORM, status="ok")
    return {row["system"]: float(row["tokens_per_s"]) for row in found if row["system"] != "fsdp-offload"}


def _best_baseline(model: str) -> tuple[str, float]:
    baselines = {name: rate for name, rate in throughput(model).items() if not name.startswith("roundpipe")}
    return max(baselines.items(), key=lambda item: item[1])


def _speedup_of(model: str) -> float:
    return throughput(model)["roundpipe"] / _best_baseline(model)[1]


def _range_of_the_abstract() -> Iterator[Claim]:
    """The extremes; the rows of headline.csv say which two the abstract states."""
    compared = [row for row in table("headline") if row["best_baseline"]]
    names = {row["model"] for row in compared}
    models = [model for model, name in PUBLISHED_MODELS.items() if name in names]
    for which, extreme in (("lowest", min), ("highest", max)):
        row = extreme(compared, key=lambda row: float(row["speedup_over_best_baseline"]))
        yield Claim(
            id=f"headline/abstract/{which}_speedup",
            source=_ABSTRACT,
            statement=f"The {which} speed-up over the best baseline on 8 RTX 4090",
            metric="speed-up",
            unit="x",
            published=cell("headline", "speedup_over_best_baseline", row, row["model"]),
            evidence="published",
            made_from=_THROUGHPUT,
            value=lambda extreme=extreme: extreme(_speedup_of(model) for model in models),
        )


def _only_system_for_235b() -> Claim:
    return Claim(
        id="headline/abstract/only_system_for_235b",
        statement="RoundPipe is the only system that trains Qwen3-235B with LoRA on 8 RTX 4090",
        metric="systems that finish",
        published=Printed("roundpipe, roundpipe-sync", _FIGURE10),
        evidence="published",
        made_from=_THROUGHPUT,
        value=lambda: ", ".join(sorted(throughput("qwen3_235b_lora"))),
    )


def _speedup(model: str) -> Iterator[Claim]:
    for column, metric, unit in (
        ("speedup_over_best_baseline", "speed-up over the best baseline", "x"),
        ("best_baseline", "best baseline", ""),
    ):
        published = printed("headline", column, model=PUBLISHED_MODELS[model])
        if published is not None:
            yield Claim(
                id=f"headline/{model}/{column}",
                statement=f"RoundPipe on {model_name(model)}, 8 RTX 4090: {metric}",
                metric=metric,
                unit=unit,
                published=published,
                evidence="published",
                made_from=_THROUGHPUT,
                value=lambda unit=unit: _speedup_of(model) if unit else _best_baseline(model)[0],
            )


def _async_gain(model: str) -> Claim:
    return Claim(
        id=f"headline/{model}/async_gain",
        statement=f"RoundPipe on {model_name(model)}: asynchronous over synchronous steps",
        metric="gain of asynchronous steps",
        unit="x",
        published=printed("headline", "async_over_sync_gain", model=PUBLISHED_MODELS[model]),
        evidence="published",
        made_from=_THROUGHPUT,
        value=lambda: throughput(model)["roundpipe"] / throughput(model)["roundpipe-sync"],
    )


# --- FLOP rates ----------------------------------------------------------------------------------------------


def _flop_rate(model: str) -> Iterator[Claim]:
    peak = printed("hardware", "value", item="fp16_peak", applies_to="rtx4090")
    peak_tflops = float(peak.value) if peak else float("nan")

    def tflops(run: Record) -> float:
        """Three forwards a token, over the GPUs of the machine."""
        flops_per_s = throughput(model)["roundpipe"] * 3 * run["forward_flops_per_token"]
        return float(flops_per_s / run["num_devices"] / 1e12)

    for column, metric, unit, value in (
        ("achieved_tflops_per_gpu", "model FLOP rate", "TFLOPS", tflops),
        ("percent_of_peak", "share of the stated peak", "%", lambda run: 100 * tflops(run) / peak_tflops),
    ):
        yield Claim(
            id=f"headline/{model}/{column}",
            source=f"{_FIGURE10}, by the artifact's FLOP formula",
            statement=f"RoundPipe on {model_name(model)}: {metric} of one RTX 4090",
            metric=metric,
            unit=unit,
            published=printed("headline", column, model=PUBLISHED_MODELS[model]),
            evidence="derived",
            needs=(roofline("artifact", "8x_rtx4090", model),),
            made_from=_THROUGHPUT,
            value=value,
        )


# --- throughput that the simulated bubbles predict -----------------------------------------------------------


def _synchronous(run: Record) -> float:
    return float(run["tokens_per_step"] / run["makespan_s"] / 1e3)


def _asynchronous(run: Record) -> float:
    """The same work with the bubble of the bar for asynchronous steps."""
    capacity_s = run["num_devices"] * run["makespan_s"]
    work_s = (1 - run["bubble_makespan"]) * run["makespan_s"]
    label = (run["switch_s"] + run["intra_s"]) / capacity_s
    return float(run["tokens_per_step"] / (work_s / (1 - label)) / 1e3)


_PREDICTIONS = {
    "predicted_sync_ktokens_per_s": ("synchronous", "roundpipe-sync", _synchronous),
    "predicted_async_ktokens_per_s": ("asynchronous", "roundpipe", _asynchronous),
}


def _prediction(model: str) -> Iterator[Claim]:
    for column, (kind, _, value) in _PREDICTIONS.items():
        published = printed("headline", column, model=PUBLISHED_MODELS[model])
        if published is not None:
            yield Claim(
                id=f"headline/{model}/{column}",
                source="derived from RoundPipe, figure 17",
                statement=f"RoundPipe on {model_name(model)}: {kind} throughput that the simulated bubble predicts",
                metric=f"predicted throughput, {kind}",
                unit="ktokens/s",
                published=published,
                needs=(figure17("roundpipe", model),),
                value=value,
            )


# Where the simulation is known to be far from the measurement, and what it leaves out there.
_FAR = {
    ("qwen3_235b_lora", "asynchronous"): "streaming the weights, the host's bandwidth and Python are not simulated",
    ("qwen3_235b_lora", "synchronous"): "streaming the weights, the host's bandwidth and Python are not simulated",
    ("gpt_oss_20b", "synchronous"): "the optimizer on the host, exposed in a synchronous step, is not simulated",
    ("qwen3_32b", "synchronous"): "the optimizer on the host, exposed in a synchronous step, is not simulated",
}


def _prediction_against_measurement(model: str) -> Iterator[Claim]:
    for kind, system, value in _PREDICTIONS.values():
        measured = printed(
            "throughput", "tokens_per_s", model=PUBLISHED_MODELS[model], platform=PLATFORM, system=system
        )
        if measured is None:
            continue
        why = _FAR.get((model, kind), "")
        yield Claim(
            id=f"headline/{model}/simulated_against_measured_{kind}",
            source=f"{_FIGURE10} against figure 17",
            statement=f"RoundPipe on {model_name(model)}: the simulation predicts the measured {kind} throughput",
            metric=f"throughput, {kind}",
            unit="tokens/s",
            published=measured,
            wide_tolerance=_NEAR * float(measured.value),
            evidence="predicted",
            predicts=True,
            needs=(figure17("roundpipe", model),),
            value=lambda run, value=value: 1e3 * value(run),
            contradiction=f"the simulated bubble predicts {{value}} tokens/s: {why}" if why else "",
        )
