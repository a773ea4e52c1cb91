"""Tuned partitions, and the plans of the released planner."""

from collections.abc import Callable, Iterator
from itertools import product
from operator import itemgetter
from typing import Any

from analysis.claims.claim import Claim, Need, Record, bubble_percent, claim, lead_of_last, runs, section
from analysis.records.published import OUR_MODELS, PUBLISHED_MODELS, Printed, Row, cell, rows, table, where
from analysis.records.runs import BASELINES, SCHEDULES
from rpbench.cost.footprint.sizes import model_bytes
from rpbench.cost.published import published_times, published_tokens_per_microbatch
from rpbench.ir.partition import Partition
from rpbench.plan.even_and_greedy import LIMIT_24GB_CARD_BYTES, plan_released
from rpbench.workload.architecture import Architecture

_PAPER = "RoundPipe, figure 17 (section 5.8.1)"
_WELL_TUNED = ("qwen3_235b_lora",)  # a search improves nothing on its published cuts
_FIELDS = {
    "published": "on the published cuts",
    "searched": "every schedule on its searched cut",
    "ahead": "searched cuts, the baselines recomputing ahead as RoundPipe does",
}
_AHEAD = f"recompute_ahead schedule={','.join(BASELINES)}"
COMPETING = {  # the five schedules with their cuts, RoundPipe last
    "published": (f"figure17 schedule={','.join(SCHEDULES)}",),
    "searched": (f"partitions partition=search schedule={','.join(SCHEDULES)}",),
    "ahead": (_AHEAD, "partitions partition=search schedule=roundpipe"),
    "one_round": (_AHEAD, "one_round"),
}


@section(40, "Tuned partitions, for everybody", _PAPER)
def claims() -> Iterator[Claim]:
    """RoundPipe's leads with published and tuned cuts; a searched cut is never worse than the others."""
    for model in PUBLISHED_MODELS:
        for field, words in _FIELDS.items():
            yield claim(
                "tuning/{model}/smallest_bubble_{field}",
                lambda *runs: min(runs, key=lambda run: run["bubble_makespan"])["schedule"],
                needs=competing(field, model),
                published=Printed("roundpipe", _PAPER),
                model=model,
                field=field,
                words=words,
            )
        yield _best_classic(model)
        for field in _FIELDS:
            yield _lead(model, field)
    due = Printed("0", "what partition=search promises")
    for model, schedule in product(PUBLISHED_MODELS, SCHEDULES):
        name = "tuning/{model}/{schedule}/search_never_worse"
        yield claim(name, _excess_ms, published=due, model=model, schedule=schedule)


def competing(field: str, model: str) -> tuple[Need, ...]:
    return tuple(need for words in COMPETING[field] for need in runs(f"{words} model={model}"))


def printed_lead(model: str) -> float:
    """Makespan of the best classic schedule over RoundPipe's, as the paper's artifact printed them."""
    makespans = {row["scheduler"]: float(row["makespan_ms"]) for row in rows("bubble", model=PUBLISHED_MODELS[model])}
    ours = makespans.pop("roundpipe")
    return min(makespans.values()) / ours


def _best_classic(model: str) -> Claim:
    name = PUBLISHED_MODELS[model]
    best = min(
        (row for row in rows("bubble", model=name) if row["scheduler"] != "roundpipe"),
        key=lambda row: float(row["bubble_ratio_percent"]),
    )
    return claim(
        "tuning/{model}/best_classic",
        lambda *runs: 100 * min(run["bubble_makespan"] for run in runs),
        published=cell("bubble", "bubble_ratio_percent", best, f"{best['scheduler']}, {name}"),
        model=model,
    )


def _lead(model: str, field: str) -> Claim:
    words, of = _FIELDS[field], f"the best classic schedule and roundpipe, {PUBLISHED_MODELS[model]}"
    source = where("bubble", "makespan_ms", of, "ratio of the two")
    holds = field == "published" or (field == "searched" and model in _WELL_TUNED)
    return claim(
        "tuning/{model}/lead_{field}",
        lead_of_last,
        needs=competing(field, model),
        published=Printed(f"{printed_lead(model):.3f}", source),
        contradiction="" if holds else f"the published cuts of the baselines are not tuned; {words}: {{value}}",
        model=model,
        field=field,
        words=words,
    )


def _excess_ms(searched: Record, *others: Record) -> float:
    return 1e3 * (float(searched["makespan_s"]) - min(float(run["makespan_s"]) for run in others))


# --- the released planner ------------------------------------------------------------------------------------

CAPPED_PLANNER = "rpbench.plan.even_and_greedy for the model of the record, under LIMIT_24GB_CARD_BYTES"
_OTHER_COUNTS = ("gpt_oss_20b", "qwen3_32b")  # the artifact simulated other stage counts than the planner's
_COUNTS = {"forward": "num_stages", "backward": "num_backward_stages"}
_BUBBLES: dict[str, tuple[str, Callable[[Record], float]]] = {
    "sync_bubble_percent": ("bubble ratio", bubble_percent),
    "switch_plus_intra_percent": (
        "switch and intra ratio",
        lambda run: 100 * (run["switch_s"] + run["intra_s"]) / (run["num_devices"] * run["makespan_s"]),
    ),
}


@section(50, "The released planner", "independent re-run of the released planner on the artifact's timings")
def planner_claims() -> Iterator[Claim]:
    """Stage counts with and without the memory cap of a 24 GB card, bubbles of the plans, counts of the artifact."""
    for row in table("planner"):
        given: dict[str, Any] = {"model": OUR_MODELS[row["model"]]}
        if row["memory_cap"] == "none":
            for direction, count in _COUNTS.items():
                counted = {"metric": f"{direction} stages", "unit": "stages", "tolerance": 0.0, "evidence": "derived"}
                yield from _planned(row, f"{direction}_stages", itemgetter(count), **given, **counted)
            for column, (metric, value) in _BUBBLES.items():
                yield from _planned(row, column, value, **given, metric=metric, unit="%")
            continue
        for direction in _COUNTS:
            yield claim(
                "planner/{model}/{direction}_stages_24gb",
                lambda run, direction=direction: len(getattr(capped_plan(run), direction)),
                published=cell("planner", f"{direction}_stages", row, f"{row['model']}, {row['memory_cap']}"),
                made_from=CAPPED_PLANNER,
                direction=direction,
                **given,
            )
    for model, (direction, count) in product(PUBLISHED_MODELS, _COUNTS.items()):
        differs = model in _OTHER_COUNTS and direction == "forward"
        why = "the released planner makes {value} of the same timings" if differs else ""
        name = "planner/{model}/artifact_{direction}_stages"
        yield claim(name, itemgetter(count), contradiction=why, model=model, direction=direction)


def _planned(row: Row, column: str, value: Callable[[Record], float], **given: Any) -> Iterator[Claim]:
    published = cell("planner", column, row, f"{row['model']}, no memory cap")
    if published is not None:
        yield claim("planner/{model}/{column}", value, published=published, column=column, **given)


def capped_plan(run: Record) -> Partition:
    """The released planner's cut of a run's model if two consecutive stages share a 24 GB card."""
    model = Architecture(**run["config"]["model"])
    name = model.published_name or ""
    sizes = model_bytes(model, published_tokens_per_microbatch(name))
    limit = LIMIT_24GB_CARD_BYTES
    return plan_released(published_times(name), run["num_devices"], sizes=sizes, memory_limit_bytes=limit)
