"""Partitions searched for, for RoundPipe and for every baseline: an untuned baseline is a straw man."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from analysis.claims.claim import Claim, Record, section
from analysis.claims.evidence import Need, figure17, partitions, recompute_ahead
from analysis.claims.printed import Printed, cell, printed, rows, where
from analysis.exhibits.style import method_name, model_name
from analysis.records.paper import PUBLISHED_MODELS
from analysis.records.runs import BASELINES, SCHEDULES

_PAPER = "RoundPipe, figure 17 (section 5.8.1)"
# Models whose published cuts leave nothing to find.
_WELL_TUNED = ("qwen3_235b_lora",)
_OURS = "what partition=search promises"


@dataclass(frozen=True)
class _Field:
    """Who competes: the five schedules, the last of them RoundPipe, each with its cut."""

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
        value=lambda *runs: min(run["makespan_s"] for run in runs[:-1]) / runs[-1]["makespan_s"],
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
