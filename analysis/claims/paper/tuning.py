"""Tuned partitions, and what the released planner makes."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from analysis.claims.claim import (
    Claim,
    Need,
    Record,
    bubble_percent,
    figure17,
    lead_of_last,
    partitions,
    recompute_ahead,
    section,
)
from analysis.exhibits.style import method_name, model_name
from analysis.records.published import OUR_MODELS, PUBLISHED_MODELS, Printed, Row, cell, printed, rows, table, where
from analysis.records.runs import BASELINES, SCHEDULES
from rpbench.cost.footprint.sizes import model_bytes
from rpbench.cost.published import published_times, published_tokens_per_microbatch
from rpbench.ir.partition import Partition
from rpbench.plan.even_and_greedy import LIMIT_24GB_CARD_BYTES, plan_released
from rpbench.workload.architecture import Architecture

_PAPER = "RoundPipe, figure 17 (section 5.8.1)"
# Models whose published cuts leave nothing to find.
_WELL_TUNED = ("qwen3_235b_lora",)
_OURS = "what partition=search promises"


@dataclass(frozen=True)
class _Field:
    """The competing runs: the five schedules, RoundPipe last, each with its cut."""

    name: str
    words: str
    needs: Callable[[str], tuple[Need, ...]]


def _with_published_cuts(model: str) -> tuple[Need, ...]:
    return tuple(figure17(schedule, model) for schedule in SCHEDULES)


def _with_searched_cuts(model: str) -> tuple[Need, ...]:
    return tuple(partitions("search", schedule, model) for schedule in SCHEDULES)


def _recomputing_ahead(model: str) -> tuple[Need, ...]:
    baselines = tuple(recompute_ahead(schedule, model) for schedule in BASELINES)
    return (*baselines, partitions("search", "roundpipe", model))


_PUBLISHED = _Field("published", "on the published cuts", _with_published_cuts)
_SEARCHED = _Field("searched", "every schedule on its searched cut", _with_searched_cuts)
_AHEAD = _Field("ahead", "searched cuts, the baselines recomputing ahead as RoundPipe does", _recomputing_ahead)


@section(40, "Tuned partitions, for everybody", _PAPER)
def claims() -> Iterator[Claim]:
    """RoundPipe leads with published and with tuned cuts; by how much; and the search keeps its promise."""
    for model in PUBLISHED_MODELS:
        for field in (_PUBLISHED, _SEARCHED, _AHEAD):
            yield _smallest_bubble(model, field)
        yield _best_classic(model)
        for field in (_PUBLISHED, _SEARCHED, _AHEAD):
            yield _lead(model, field)
    for model in PUBLISHED_MODELS:
        for schedule in SCHEDULES:
            yield _never_worse(schedule, model)


# --- RoundPipe against the rest ------------------------------------------------------------------------------


def _smallest_bubble(model: str, field: _Field) -> Claim:
    return Claim(
        id=f"tuning/{model}/smallest_bubble_{field.name}",
        statement=f"{model_name(model)}: RoundPipe has the smallest bubble of the five schedules, {field.words}",
        metric="schedule with the smallest bubble",
        published=Printed("roundpipe", _PAPER),
        needs=field.needs(model),
        value=lambda *runs: min(runs, key=lambda run: run["bubble_makespan"])["schedule"],
    )


def _best_classic(model: str) -> Claim:
    name = PUBLISHED_MODELS[model]
    best = min(
        (row for row in rows("bubble", model=name) if row["scheduler"] != "roundpipe"),
        key=lambda row: float(row["bubble_ratio_percent"]),
    )
    return Claim(
        id=f"tuning/{model}/best_classic",
        statement=f"{model_name(model)}: smallest bubble of a classic schedule, on the published cuts",
        metric="bubble ratio of the best classic schedule",
        unit="%",
        published=cell("bubble", "bubble_ratio_percent", best, f"{best['scheduler']}, {name}"),
        needs=_with_published_cuts(model)[:-1],
        value=lambda *runs: 100 * min(run["bubble_makespan"] for run in runs),
    )


def _lead(model: str, field: _Field) -> Claim:
    """Makespan of the best classic schedule over RoundPipe's."""
    name = PUBLISHED_MODELS[model]
    makespans = {row["scheduler"]: float(row["makespan_ms"]) for row in rows("bubble", model=name)}
    ours = makespans.pop("roundpipe")
    source = where("bubble", "makespan_ms", f"the best classic schedule and roundpipe, {name}", "ratio of the two")
    holds = field is _PUBLISHED or (field is _SEARCHED and model in _WELL_TUNED)
    return Claim(
        id=f"tuning/{model}/lead_{field.name}",
        statement=f"{model_name(model)}: time of the best classic schedule over RoundPipe's, one call, {field.words}",
        metric="lead of RoundPipe",
        unit="x",
        published=Printed(f"{min(makespans.values()) / ours:.3f}", source),
        needs=field.needs(model),
        value=lead_of_last,
        contradiction="" if holds else f"the published cuts of the baselines are not tuned; {field.words}: {{value}}",
    )


# --- the search ----------------------------------------------------------------------------------------------


def _never_worse(schedule: str, model: str) -> Claim:
    published = printed("bubble", "makespan_ms", scheduler=schedule.replace("_", "-"), model=PUBLISHED_MODELS[model])
    assert published is not None  # figure 17 has every cell
    return Claim(
        id=f"tuning/{model}/{schedule}/search_never_worse",
        whose="ours against ours",
        statement_id="tuning/search_never_worse",
        source=_OURS,
        statement=(
            f"{method_name(schedule)} on {model_name(model)}: the searched cut is no slower than the published, the "
            "even and the greedy one"
        ),
        metric="excess makespan of the searched cut",
        unit="ms",
        published=Printed("0", _OURS),
        relation="<=",
        tolerance=0.0,
        needs=(*(partitions(cut, schedule, model) for cut in ("search", "even", "greedy")), figure17(schedule, model)),
        value=_excess_ms,
    )


def _excess_ms(searched: Record, *others: Record) -> float:
    return 1e3 * (float(searched["makespan_s"]) - min(float(run["makespan_s"]) for run in others))


CAPPED_PLANNER = "rpbench.plan.even_and_greedy for the model of the record, under LIMIT_24GB_CARD_BYTES"

# Models for which the artifact simulated another number of stages than the planner makes.
_OTHER_COUNTS = ("gpt_oss_20b", "qwen3_32b")


@section(50, "The released planner", "independent re-run of the released planner on the artifact's timings")
def planner_claims() -> Iterator[Claim]:
    """Counts with and without the memory cap of a 24 GB card, bubbles of the plans, counts of the artifact."""
    for row in table("planner"):
        if row["memory_cap"] == "none":
            yield from _uncapped(row)
        else:
            yield from _capped(row)
    for model in PUBLISHED_MODELS:
        yield from _counts_of_the_artifact(model)


_COUNTS: dict[str, tuple[str, Callable[[Record], float]]] = {
    "forward_stages": ("forward stages", lambda run: run["num_stages"]),
    "backward_stages": ("backward stages", lambda run: run["num_backward_stages"]),
}

_BUBBLES: dict[str, tuple[str, Callable[[Record], float]]] = {
    "sync_bubble_percent": ("bubble ratio", bubble_percent),
    "switch_plus_intra_percent": (
        "switch and intra ratio",
        lambda run: 100 * (run["switch_s"] + run["intra_s"]) / (run["num_devices"] * run["makespan_s"]),
    ),
}


def _uncapped(row: Row) -> Iterator[Claim]:
    model = OUR_MODELS[row["model"]]
    for column, (metric, value) in (_COUNTS | _BUBBLES).items():
        published = cell("planner", column, row, f"{row['model']}, no memory cap")
        if published is not None:
            counts = column in _COUNTS
            yield Claim(
                id=f"planner/{model}/{column}",
                whose="another public source's",
                statement=f"{model_name(model)}: {metric} of the released planner's cut, no memory cap",
                metric=metric,
                unit="stages" if counts else "%",
                published=published,
                tolerance=0.0 if counts else None,
                evidence="derived" if counts else "simulated",
                needs=(partitions("greedy", "roundpipe", model),),
                value=value,
            )


def _capped(row: Row) -> Iterator[Claim]:
    model = OUR_MODELS[row["model"]]
    for column, direction in (("forward_stages", "forward"), ("backward_stages", "backward")):
        yield Claim(
            id=f"planner/{model}/{column}_24gb",
            whose="another public source's",
            statement=f"{model_name(model)}: {direction} stages of the released planner's cut, cap of a 24 GB card",
            metric=f"{direction} stages, capped",
            unit="stages",
            published=cell("planner", column, row, f"{row['model']}, {row['memory_cap']}"),
            tolerance=0.0,
            evidence="derived",
            needs=(figure17("roundpipe", model),),
            made_from=CAPPED_PLANNER,
            value=lambda run, direction=direction: len(getattr(capped_plan(run), direction)),
        )


def capped_plan(run: Record) -> Partition:
    """The released planner's cut of a run's model when a stage and the next one share a 24 GB card."""
    model = Architecture(**run["config"]["model"])
    tokens = published_tokens_per_microbatch(model.published_name or "")
    times = published_times(model.published_name or "")
    return plan_released(
        times, run["num_devices"], sizes=model_bytes(model, tokens), memory_limit_bytes=LIMIT_24GB_CARD_BYTES
    )


def _counts_of_the_artifact(model: str) -> Iterator[Claim]:
    for direction, (metric, value) in zip(("forward", "backward"), _COUNTS.values(), strict=True):
        differs = model in _OTHER_COUNTS and direction == "forward"
        yield Claim(
            id=f"planner/{model}/artifact_{direction}_stages",
            source="RoundPipe, artifact, partitions behind figure 17",
            statement=f"{model_name(model)}: the simulated cut has as many {direction} stages as the planner makes",
            metric=metric,
            unit="stages",
            published=printed(
                "partitions", "num_stages", scheduler="roundpipe", model=PUBLISHED_MODELS[model], direction=direction
            ),
            tolerance=0.0,
            evidence="derived",
            needs=(partitions("greedy", "roundpipe", model),),
            value=value,
            contradiction="the released planner makes {value} of the same timings" if differs else "",
        )
