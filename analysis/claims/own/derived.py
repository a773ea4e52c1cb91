"""Headline ratios computed without the simulator, or bounded by a plan that must lose.

Leads on published cuts follow from the makespans that the paper's artifact printed. No cut of the same call may beat
a searched cut. A recurrence times 1F1B on a thousand microbatches. No system of figure 10 exceeds the devices' peak.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

from analysis.claims.claim import Claim, Record, claim, lead_of_last, over_fastest, runs, section
from analysis.claims.expected import read_table
from analysis.claims.own.regression import need_of
from analysis.claims.paper.tuning import competing, printed_lead
from analysis.records.published import PUBLISHED_MODELS, Printed
from analysis.records.runs import SCHEDULES


@section(160, "Headline ratios on another road")
def claims() -> Iterator[Claim]:
    for model in PUBLISHED_MODELS:
        due = f"{printed_lead(model):.6f}"
        yield _derived("lead/published/{model}", lead_of_last, due, needs=competing("published", model), model=model)
    for schedule, model in product(SCHEDULES, PUBLISHED_MODELS):
        yield _derived("lead/searched/{schedule}/{model}", over_fastest, schedule=schedule, model=model)
    devices, microbatches = 8, 1024
    yield _derived(
        "thousand_devices/1f1b/{devices}",
        lambda run: run["makespan_s"] / one_f_one_b_s(devices, microbatches, 1e-3, 2e-3, 1e-4),
        devices=devices,
        microbatches=microbatches,
    )
    rows = [row for row in read_table("figure10") if row["status"] == "ok"]
    for model in PUBLISHED_MODELS:
        if needs := [need_of("figure10", row) for row in rows if row["cell.model"] == model]:
            form = runs(f"roofline mode.convention=corrected cluster=8x_rtx4090 model={model}")
            yield _derived("figure10/{model}/peak", _share_of_peak, needs=(*form, *needs), model=model)


def _derived(name: str, value: Callable[..., float], due: str = "1.0", **given: Any) -> Claim:
    found = claim(f"derived/{name}", value, published=Printed(due, ""), **given)
    return replace(found, published=Printed(due, found.source))


@cache
def one_f_one_b_s(devices: int, microbatches: int, forward_s: float, backward_s: float, hop_s: float) -> float:
    """Makespan of 1F1B in seconds; every rank starts an action when its input has arrived."""
    ends: dict[tuple[str, int, int], float] = {}
    waiting = {rank: deque(_order(devices - rank - 1, microbatches)) for rank in range(devices)}
    clock = [0.0] * devices
    while any(waiting.values()):
        for rank, order in waiting.items():
            while order:
                kind, number = order[0]
                source = rank - 1 if kind == "F" else rank + 1
                if 0 <= source < devices and (kind, source, number) not in ends:
                    break
                arrives = ends[kind, source, number] + hop_s if 0 <= source < devices else 0.0
                clock[rank] = max(clock[rank], arrives) + (forward_s if kind == "F" else backward_s)
                ends[kind, rank, number] = clock[rank]
                order.popleft()
    return max(clock)


def _order(warmup: int, microbatches: int) -> Iterator[tuple[str, int]]:
    """Warmup forwards, alternating forwards and backwards, then the remaining backwards."""
    first = min(warmup, microbatches)
    yield from (("F", number) for number in range(first))
    for number in range(microbatches - first):
        yield "F", first + number
        yield "B", number
    yield from (("B", number) for number in range(microbatches - first, microbatches))


def _share_of_peak(form: Record, *runs: Record) -> float:
    """FLOPs per second of the fastest run over the devices' matrix peak."""
    cluster = runs[0]["config"]["cluster"]
    # A backward takes twice the work of a forward; with frozen weights, which have no gradient, as much as a forward.
    passes = 2 if form["trainable_parameters"] < form["total_parameters"] else 3
    flops_per_s = passes * form["forward_flops_per_token"] * max(run["tokens_per_s"] for run in runs)
    return float(flops_per_s / (runs[0]["num_devices"] * cluster["wide_matmul_flops_per_s"]))
