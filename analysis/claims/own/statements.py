"""Statements of README and docs on our own experiments, number by number; each follows from records."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any

from analysis.claims.claim import (
    Claim,
    Need,
    Record,
    bubble_percent,
    causal,
    figure17,
    lead_of_last,
    partitions,
    recompute_ahead,
    section,
    stated,
    steady_causal,
    steady_state,
)
from analysis.claims.expected import read_table
from analysis.claims.own.regression import need_of
from analysis.predictions.score import NUM_BARS, Bar, bars
from analysis.records.published import PUBLISHED_MODELS, printed
from analysis.records.runs import BASELINES, ONE_ROUND, SCHEDULES


@section(190, "What we say of our own experiments")
def claims() -> Iterator[Claim]:
    """Every statement, by its experiment."""
    yield from _leads()
    yield from _thousand_devices()
    yield from _uneven_head()
    yield from _dispatch()
    yield from _contest()
    yield from _contest_as_a_whole()
    yield from _against_published()
    yield from _paces()
    yield from _orders()
    yield from _waiting()
    yield from _parity()
    yield from _bars()


def _say(name: str, words: str, unit: str, needs: tuple[Need, ...], value: Callable[..., Any], **more: Any) -> Claim:
    return stated(f"ours/{name}", words, unit, needs, value, **more)


def _ends(
    name: str,
    words: str,
    unit: str,
    needs: tuple[Need, ...],
    values: Callable[[tuple[Record, ...]], Iterable[float]],
    **more: Any,
) -> Iterator[Claim]:
    """The least and the most of the values that follow from some runs."""
    for end, extreme in (("least", min), ("most", max)):
        yield _say(
            f"{name}/{end}",
            f"{words}: the {end}",
            unit,
            needs,
            lambda *runs, extreme=extreme: extreme(values(runs)),
            **more,
        )


# --- leads of RoundPipe over the best classic schedule ---------------------------------------------------------

_FIELDS: dict[str, tuple[str, Callable[[str], tuple[Need, ...]]]] = {
    "published": ("published cuts", lambda model: tuple(figure17(name, model) for name in SCHEDULES)),
    "searched": ("searched cuts", lambda model: tuple(partitions("search", name, model) for name in SCHEDULES)),
    "ahead": (
        "searched cuts, the baselines recomputing ahead",
        lambda model: (*(recompute_ahead(name, model) for name in BASELINES), partitions("search", "roundpipe", model)),
    ),
    "one_round": (
        "searched cuts, the baselines recomputing ahead, RoundPipe's call as one round",
        lambda model: (*(recompute_ahead(name, model) for name in BASELINES), Need("one_round", {"model": model})),
    ),
}


def _leads() -> Iterator[Claim]:
    for name, (words, needs) in _FIELDS.items():
        every = tuple(need for model in PUBLISHED_MODELS for need in needs(model))
        says = f"RoundPipe's lead over the best classic schedule on the paper's models, {words}"
        yield from _ends(f"lead/{name}", says, "x", every, _leads_of)


def _leads_of(runs: tuple[Record, ...]) -> list[float]:
    """One lead a model; its runs stand together, RoundPipe's last."""
    each = len(runs) // len(PUBLISHED_MODELS)
    return [lead_of_last(*runs[first : first + each]) for first in range(0, len(runs), each)]


# --- experiments of schedules as such --------------------------------------------------------------------------


def _thousand_devices() -> Iterator[Claim]:
    for schedule, words in (("1f1b", "1F1B"), ("roundpipe", "RoundPipe"), (ONE_ROUND, "RoundPipe in one round")):
        for devices in (8, 1024):
            yield _say(
                f"thousand_devices/{schedule}/{devices}",
                f"1,024 microbatches on {devices:,} devices: idle time of {words}",
                "%",
                (Need("thousand_devices", {"schedule": schedule, "num_devices": str(devices)}),),
                bubble_percent,
            )


def _uneven_head() -> Iterator[Claim]:
    dealt = ("roundpipe", ONE_ROUND)
    for schedule, words, heads in (("zb_v", "ZB-V", ("0.0", "1.0")), ("vocab_parallel", "a cut head", ("2.0",))):
        for head in heads:
            needs = tuple(
                Need("uneven_head", {"schedule": name, "cost.head_share": head}) for name in (schedule, *dealt)
            )
            yield _say(
                f"uneven_head/{schedule}/{head}",
                f"Step of {words} over RoundPipe's, with a head of {head} devices' work",
                "x",
                needs,
                lambda own, *rivals: own["makespan_s"] / min(run["makespan_s"] for run in rivals),
            )


def _dispatch() -> Iterator[Claim]:
    size = "4"
    needs = tuple(
        need
        for model in PUBLISHED_MODELS
        for need in (Need("dispatch", {"model": model, "schedule.round_size": size}), causal(model))
    )
    yield from _ends(
        "dispatch",
        f"Idle time that dynamic dispatch in rounds of {size} leaves of strict rotation's",
        "%",
        needs,
        lambda runs: (
            100 * pool["bubble_makespan"] / rotation["bubble_makespan"]
            for pool, rotation in zip(runs[::2], runs[1::2], strict=True)
        ),
    )


def _contest() -> Iterator[Claim]:
    """Pace of the fastest system of figure 10 at equal tuning over RoundPipe's; late and synchronous ones apart."""
    rows = [row for row in read_table("figure10") if row["status"] == "ok"]
    for model in PUBLISHED_MODELS:
        runs = {row["cell.schedule"]: need_of("figure10", row) for row in rows if row["cell.model"] == model}
        for late, own, words in (
            (True, "roundpipe_async", "the fastest that fits, over RoundPipe one step late"),
            (False, "roundpipe", "the fastest that fits and is never late, over RoundPipe"),
        ):
            if own in runs:
                others = [need for name, need in runs.items() if name != own]
                yield _say(
                    f"figure10/{model}/{'late' if late else 'synchronous'}",
                    f"Figure 10 at equal tuning, {model}: pace of {words}",
                    "x",
                    (runs[own], *others),
                    lambda *found, late=late: _best_over_first(found, late=late),
                )


def _contest_as_a_whole() -> Iterator[Claim]:
    """The fastest system of each model, distinct orders that fit, and gains of random restarts over the plans."""
    rows = read_table("figure10")
    for model in PUBLISHED_MODELS:
        needs = tuple(need_of("figure10", row) for row in rows if row["cell.model"] == model)
        of = f"Figure 10 at equal tuning, {model}"
        yield _say(f"figure10/{model}/first", f"{of}: the fastest that fits", "", needs, _first)
        yield _say(
            f"figure10/{model}/first_synchronous",
            f"{of}: the fastest that fits and is never late",
            "",
            needs,
            lambda *runs: _first(*(run for run in runs if not run["staleness_steps"])),
        )
        yield _say(f"figure10/{model}/orders", f"{of}: distinct orders that fit", "orders", needs, _fitting_orders)
    yield _say(
        "figure10/restarts",
        "Figure 10 at equal tuning: the most that the last round of random restarts found over a plan",
        "%",
        tuple(need_of("figure10", row) for row in rows),
        lambda *runs: 100 * max(_gains(runs)),
    )

    for name, words, settled in (
        ("settled", "at most 1 %", True),
        ("unsettled", "more than 1 %, or did not end", False),
    ):
        yield _say(
            f"figure10/{name}",
            f"Figure 10 at equal tuning: plans that fit over which the last round of random restarts found {words}",
            "plans",
            tuple(need_of("figure10", row) for row in rows),
            lambda *runs, settled=settled: sum((gain <= 0.01) is settled for gain in _gains(runs)),
        )


def _gains(runs: tuple[Record, ...]) -> list[float]:
    """The gains that restarts found, of the plans that fit."""
    return [run["restart_gain"] for run in runs if run["status"] == "ok"]


def _first(*runs: Record) -> str:
    fitting = [run for run in runs if run["status"] == "ok"]
    return str(max(fitting, key=lambda run: run["tokens_per_s"])["choices"]["schedule"])


def _fitting_orders(*runs: Record) -> int:
    return len({run["order_sha256"] for run in runs if run["status"] == "ok"})


def _against_published() -> Iterator[Claim]:
    """Simulated over published pace of each system: the error that a ratio between two systems carries."""
    rows = [row for row in read_table("figure10_published") if row["status"] == "ok"]
    for system in dict.fromkeys(row["cell.mode.system"] for row in rows):
        known = [(row, pace) for row in rows if row["cell.mode.system"] == system and (pace := _bar(row)) is not None]
        needs, paces = tuple(need_of("figure10_published", row) for row, _ in known), [pace for _, pace in known]
        if known:
            yield from _ends(
                f"by_action/{system}",
                f"Simulated over published pace of {system} on eight RTX 4090, its run script's settings",
                "x",
                needs,
                partial(_over_paces, paces),
                evidence="predicted",
            )


def _over_paces(paces: Sequence[float], runs: tuple[Record, ...]) -> list[float]:
    return [run["tokens_per_s"] / pace for run, pace in zip(runs, paces, strict=True)]


def _bar(row: Mapping[str, str]) -> float | None:
    """The published tokens per second of a system on a model; None where it has no bar."""
    found = printed(
        "throughput", "tokens_per_s", system=row["cell.mode.system"], model=PUBLISHED_MODELS[row["cell.model"]]
    )
    return found.value if found is not None and isinstance(found.value, float) else None


def _best_over_first(runs: tuple[Record, ...], *, late: bool) -> float:
    paces = [run["tokens_per_s"] for run in runs if late or not run["staleness_steps"]]
    return float(max(paces) / runs[0]["tokens_per_s"])


# Contenders of figure 10 whose page says their pace, with the models it says it on.
_PACES = {
    **dict.fromkeys(("megatron_tp", "mobius", "zero_2", "zero_3", "zero_infinity"), ("qwen3_1p7b",)),
    "roundpipe_async": ("qwen3_1p7b", "llama31_8b"),
}


def _paces() -> Iterator[Claim]:
    for schedule, models in _PACES.items():
        for model in models:
            yield _say(
                f"pace/{schedule}/{model}",
                f"Figure 10 at equal tuning, {model}: pace of {schedule}",
                "thousand tokens/s",
                (Need("figure10", {"schedule": schedule, "model": model}),),
                lambda run: run["tokens_per_s"] / 1000,
            )


def _orders() -> Iterator[Claim]:
    """Contenders may run one order under several names."""
    rows = read_table("figure10")
    needs = tuple(need_of("figure10", row) for model in PUBLISHED_MODELS for row in rows if row["cell.model"] == model)
    words = "Distinct orders of all contenders of figure 10, by order_sha256, on one model"
    yield from _ends("figure10/orders", words, "orders", needs, _distinct_orders)


def _distinct_orders(runs: tuple[Record, ...]) -> list[int]:
    """Numbers of distinct orders, one a model."""
    found: dict[str, set[str]] = {}
    for run in runs:
        if isinstance(run.get("order_sha256"), str):
            found.setdefault(run["model"], set()).add(run["order_sha256"])
    return [len(orders) for orders in found.values()]


def _waiting() -> Iterator[Claim]:
    model, count = "qwen3_1p7b", 8
    for name, words, need in (
        ("ahead", "may begin before its input arrives", steady_state(model, count)),
        ("waiting", "waits for its input", steady_causal(model, count)),
    ):
        yield _say(
            f"fused_stage/{name}",
            f"Steady bubble of RoundPipe on Qwen3-1.7B, {count} microbatches a call, a fused stage that {words}",
            "%",
            (need,),
            lambda run: 100 * run["bubble_steady"],
        )


# --- parity and predictions ------------------------------------------------------------------------------------


def _parity() -> Iterator[Claim]:
    for experiment in ("equivalence", "baselines_cpu"):
        needs = tuple(need_of(experiment, row) for row in read_table(experiment))
        if not needs:  # nothing of it has been accepted
            continue
        yield _say(
            f"parity/{experiment}",
            f"Runs of experiment={experiment} whose gradients and weights are plain training's in every bit",
            "runs",
            needs,
            lambda *runs: sum(run["grad_max_abs_diff"] == 0 == run["weight_max_abs_diff"] for run in runs),
            evidence="measured",
        )


def _bars() -> Iterator[Claim]:
    for number in range(NUM_BARS):
        yield _say(
            f"predictions/bar_{number + 1}",
            f"Bar {number + 1} of the predictions",
            "",
            (),
            lambda number=number: _said(_found_bars()[number]),
            evidence="predicted",
            made_from="analysis/predictions/",
        )
    yield _say(
        "predictions/held",
        f"Bars of the predictions that hold, of {NUM_BARS}",
        "bars",
        (),
        lambda: sum(bar.held for bar in _found_bars()),
        evidence="predicted",
        made_from="analysis/predictions/",
    )


def _said(bar: Bar) -> str:
    return f"{bar.name}: {'holds' if bar.held else 'missed'}, {bar.measured}"


@cache
def _found_bars() -> list[Bar]:
    return bars()
