"""Figure 17: all numbers that the artifact's simulator printed for 25 cells, and the bars labelled asynchronous.

Also calls back to back, and both with a fused stage whose forward waits for its input, as it must on real devices.
"""

from collections.abc import Iterator
from itertools import product
from typing import Any

from analysis.claims.claim import DECLARED, Claim, Record, bubble_percent, claim, section, stated
from analysis.exhibits.tables.published_cells import cell_numbers
from analysis.records.published import PUBLISHED_MODELS, Printed, cell, rows, throughput_run
from analysis.records.runs import SCHEDULES


@section(10, "Figure 17: the simulated bubbles", "RoundPipe, figure 17 (section 5.8.1)")
def figure17_claims() -> Iterator[Claim]:
    """Fifteen numbers for each cell, and the asynchronous bars, as labelled and as the bubble of calls back to back."""
    printed = DECLARED["printed"].items()
    for schedule, model, (column, (metric, unit)) in product(SCHEDULES, PUBLISHED_MODELS, printed):
        yield claim(
            "figure17/{schedule}/{model}/{column}",
            lambda run, column=column: cell_numbers(run)[column],
            schedule=schedule,
            model=model,
            column=column,
            metric=metric,
            unit=unit,
            tolerance=0.0 if unit == "events" else None,
        )
    for model in PUBLISHED_MODELS:
        yield claim(
            "figure17/asynchronous/{model}/label",
            lambda run: sum(cell_numbers(run)[f"{part}_ratio_percent"] for part in ("switch", "intra")),
            model=model,
        )
        called = throughput_run(model)["microbatches_per_call"]
        for count, which, why in (
            (8, "rounds", "as many as a round of the artifact holds"),  # at most one for each GPU
            (called, "benchmark", "as many as the throughput runs take"),
        ):
            name = "figure17/asynchronous/{model}/steady_state_{which}"
            yield claim(name, _steady_percent, model=model, count=count, which=which, why=why)


def _steady_percent(run: Record) -> float:
    return 100 * float(run["bubble_steady"])


@section(20, "Asynchronous steps, simulated back to back")
def back_to_back() -> Iterator[Claim]:
    """Twenty values of an independent simulation: five models with calls of 8, 9, 10 and 16 microbatches."""
    for model, name in PUBLISHED_MODELS.items():
        for row in rows("async_bubble", model=name, kind="simulated"):
            count = row["num_microbatches_per_call"]
            yield claim(
                "steady_state/{model}/{count}",
                lambda run: 100 * run["bubble_between_ends"],
                published=cell("async_bubble", "bubble_percent", row, f"{name}, {count} microbatches"),
                wide_tolerance=0.01,  # one unit of the last digit; the reference simulation is not the paper's
                model=model,
                count=count,
            )


_SENSE = "waiting can only take time"


@section(30, "Figure 17 with a causal fused stage", _SENSE)
def causal_claims() -> Iterator[Claim]:
    """The bubble of one call and of calls back to back for each model, and that waiting is never faster."""

    def not_faster(name: str, **words: Any) -> Claim:
        return claim(
            f"{name}_not_faster",
            lambda first, second: 1e3 * (float(first["step_time_s"]) - float(second["step_time_s"])),
            published=Printed("0", _SENSE),
            **words,
        )

    for model, name in PUBLISHED_MODELS.items():
        yield stated("causal/{model}/single", bubble_percent, model=model)
        yield not_faster("causal/{model}/single", model=model)
        for row in rows("async_bubble", model=name, kind="simulated"):
            count = row["num_microbatches_per_call"]
            yield stated("causal/{model}/steady_{count}", _steady_percent, model=model, count=count)
            yield not_faster("causal/{model}/steady_{count}", model=model, count=count)
