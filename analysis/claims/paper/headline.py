"""Claims on published throughput: speed-ups, the gain of asynchronous steps, FLOP rates, predicted throughput."""

from collections.abc import Callable, Iterator

from analysis.claims.claim import DECLARED, Claim, Record, claim, section
from analysis.records.published import PUBLISHED_MODELS, RTX4090, Printed, cell, printed, rows, table

_FIGURE10 = "RoundPipe, figure 10 (section 5.2)"
_NEAR = 0.15  # of measured throughput; the simulation has no link contention, optimizer or host


@section(90, "Headline numbers", _FIGURE10)
def claims() -> Iterator[Claim]:
    yield from _range_of_the_abstract()
    yield claim(
        "headline/abstract/only_system_for_235b",
        lambda: ", ".join(sorted(throughput("qwen3_235b_lora"))),
        published=Printed("roundpipe, roundpipe-sync", _FIGURE10),
    )
    peak = float(next(rows("hardware", item="fp16_peak", applies_to="rtx4090"))["value"])
    for model in PUBLISHED_MODELS:
        for column, value in (
            ("speedup_over_best_baseline", lambda model=model: _speedup_of(model)),
            ("best_baseline", lambda model=model: _best_baseline(model)[0]),
        ):
            published = printed("headline", column, model=PUBLISHED_MODELS[model])
            if published is not None:
                yield claim(f"headline/{{model}}/{column}", value, published=published, model=model)
        yield claim(
            "headline/{model}/async_gain",
            lambda model=model: throughput(model)["roundpipe"] / throughput(model)["roundpipe-sync"],
            model=model,
        )
        yield claim("headline/{model}/achieved_tflops_per_gpu", lambda run, m=model: _tflops(m, run), model=model)
        yield claim("headline/{model}/percent_of_peak", lambda run, m=model: 100 * _tflops(m, run) / peak, model=model)
        for column, (kind, _, value_of) in _PREDICTIONS.items():
            published = printed("headline", column, model=PUBLISHED_MODELS[model])
            if published is not None:
                name = "headline/{model}/{column}"
                yield claim(name, value_of, published=published, model=model, column=column, kind=kind)
        yield from _prediction_against_measurement(model)


def throughput(model: str) -> dict[str, float]:
    """Published tokens per second of each system on a model and eight RTX 4090; FSDP as in the figure."""
    found = rows("throughput", model=PUBLISHED_MODELS[model], platform=RTX4090, status="ok")
    return {row["system"]: float(row["tokens_per_s"]) for row in found if row["system"] != "fsdp-offload"}


def _best_baseline(model: str) -> tuple[str, float]:
    baselines = {name: rate for name, rate in throughput(model).items() if not name.startswith("roundpipe")}
    return max(baselines.items(), key=lambda item: item[1])


def _speedup_of(model: str) -> float:
    return throughput(model)["roundpipe"] / _best_baseline(model)[1]


def _range_of_the_abstract() -> Iterator[Claim]:
    """The smallest and the largest speed-up of headline.csv, which the abstract states."""
    compared = [row for row in table("headline") if row["best_baseline"]]
    names = {row["model"] for row in compared}
    models = [model for model, name in PUBLISHED_MODELS.items() if name in names]
    for which, extreme in (("lowest", min), ("highest", max)):
        row = extreme(compared, key=lambda row: float(row["speedup_over_best_baseline"]))
        yield claim(
            "headline/abstract/{which}_speedup",
            lambda extreme=extreme: extreme(_speedup_of(model) for model in models),
            published=cell("headline", "speedup_over_best_baseline", row, row["model"]),
            which=which,
        )


def _tflops(model: str, run: Record) -> float:
    """TFLOP/s per GPU, counting three forwards for each token."""
    flops_per_s = throughput(model)["roundpipe"] * 3 * run["forward_flops_per_token"]
    return float(flops_per_s / run["num_devices"] / 1e12)


# --- throughput predicted from simulated bubbles --------------------------------------------------------------


def _asynchronous(run: Record) -> float:
    """Thousands of tokens per second for the same work with the bubble of the asynchronous bar."""
    capacity_s = run["num_devices"] * run["makespan_s"]
    work_s = (1 - run["bubble_makespan"]) * run["makespan_s"]
    label = (run["switch_s"] + run["intra_s"]) / capacity_s
    return float(run["tokens_per_step"] / (work_s / (1 - label)) / 1e3)


_PREDICTIONS: dict[str, tuple[str, str, Callable[[Record], float]]] = {
    "predicted_sync_ktokens_per_s": (
        "synchronous",
        "roundpipe-sync",
        lambda run: float(run["tokens_per_step"] / run["makespan_s"] / 1e3),
    ),
    "predicted_async_ktokens_per_s": ("asynchronous", "roundpipe", _asynchronous),
}


def _prediction_against_measurement(model: str) -> Iterator[Claim]:
    for kind, system, value in _PREDICTIONS.values():
        measured = printed("throughput", "tokens_per_s", model=PUBLISHED_MODELS[model], platform=RTX4090, system=system)
        if measured is None:
            continue
        why = DECLARED["far"].get(f"{model}/{kind}", "")
        yield claim(
            "headline/{model}/simulated_against_measured_{kind}",
            lambda run, value=value: 1e3 * value(run),
            published=measured,
            wide_tolerance=_NEAR * float(measured.value),
            contradiction=f"the simulated bubble predicts {{value}} tokens/s: {why}" if why else "",
            model=model,
            kind=kind,
        )
