"""Runs of a schedule, simulated or trained: the plan, its facts, and whether its memory fits.

The plan is the one a request states, or the best one of a search over every option (`tuning_budget`). A search takes
model, machine, tokens of a step and the number of steps from the request; `rpbench.plan.contest` chooses everything
else under the cluster's memory. Options of the schedule that differ from its defaults, and those of a late update, say
which method it is and stay.

Garbage collection is paused meanwhile. A large schedule is millions of small tuples in no cycle, and the collector
walks all of them each time enough are new: with 1,024 devices and as many microbatches this takes as long as the
checks. The first walk afterwards would still visit every one, so they are frozen until the next tables are made.
"""

import gc
import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from typing import Any

from rpbench.advice.causes import causes_of
from rpbench.config.choices import ConfigError
from rpbench.config.configuration import RunConfig
from rpbench.config.request import Request
from rpbench.cost.footprint.memory import classes_of, why_infeasible
from rpbench.cost.footprint.replicas import SsdBytes, host_bytes, ssd_bytes
from rpbench.cost.footprint.sizes import ModelBytes
from rpbench.cost.hardware.machine import Machine
from rpbench.cost.profiled import to_text
from rpbench.ir.analysis import Analysis
from rpbench.ir.schedule import Schedule
from rpbench.mesh.plan_search.terms import terms_of
from rpbench.plan import Choice
from rpbench.plan.contest.contender import Contender
from rpbench.plan.contest.frame import Frame, Frames, order_key
from rpbench.plan.contest.plans import Budget, Tuned
from rpbench.plan.contest.search import tune
from rpbench.plan.contest.terms import Source, Terms
from rpbench.records.describe import clock
from rpbench.records.record import as_csv
from rpbench.run.assemble import Assembled, assemble, transfer_bytes
from rpbench.run.layer_times import check_published, numbers_on
from rpbench.run.recording import Fields, Outcome, Work
from rpbench.sim.checked import check_graph
from rpbench.sim.memory import peak_in_flight

PROFILE = "profile.json"  # in a run's folder: the layer times its costs were made of
TRIED = "tried.csv"  # in a run's folder: every setting that was tried
# Actions timed in one sketch of a cut, for each timeline of the budget: 7 million for the budget of figure 10. With one
# million, one schedule in ten stayed 2 to 9 % below its best, for want of a cut that fits with little recomputation.
SKETCHED = 3_600
TIMELINES_A_RESTART = 200  # of a budget, for each random restart of a round
# The search chooses these; a request leaves them at their defaults.
CHOSEN = {"partition": "even", "chunks_per_device": None, "recompute": "all", "prefetch": RunConfig.prefetch}
CHARGED = {"offload": "none", "charge": "hops", "dispatch": "round_robin"}
_SETTING = ("microbatch_sequences", "chunks_per_device", "recompute", "prefetch")
_OUTCOME = ("tokens_per_s", "peak_bytes", "host_bytes", "fits")
MANY = 500_000  # new objects that are worth freezing: a walk through them takes a tenth of a second


@contextmanager
def collection_paused() -> Iterator[None]:
    """Garbage collection is paused inside; many objects made inside are frozen afterwards.

    Objects frozen before are collected first. Reference counting still frees objects at once.
    """
    was_on = gc.isenabled()
    gc.disable()
    if gc.get_freeze_count():
        gc.unfreeze()
        gc.collect()
    try:
        yield
    finally:
        if gc.get_count()[0] > MANY:
            gc.freeze()
        if was_on:
            gc.enable()


def assembled_of(request: Request) -> Assembled:
    """The request's schedule and all it needs, checked; ScheduleError where costs leave an action without a time."""
    with collection_paused():
        found = assemble(request) if request.tuning_budget is None else tuned(request)
    if request.backend is None or request.backend.name in ("virtual", "emulated"):  # whose clock are the costs
        for kind, stage in chain.from_iterable(found.graph.slots):
            found.costs.of(kind, stage)
    return found


def scheduled(request: Request, assembled: Assembled, execute: Callable[[], Outcome]) -> Work:
    """The work of a schedule: a verdict on its memory, and if it fits, the outcome of `execute`."""
    files = {} if assembled.profile is None else {PROFILE: to_text(assembled.profile)}
    if assembled.plan is not None:
        files[TRIED] = _tried_csv(assembled.plan)
    return Work(
        _shape(assembled, from_file=request.schedule.file is not None),
        lambda: _outcome(request, assembled, execute),
        files,
    )


def _outcome(request: Request, assembled: Assembled, execute: Callable[[], Outcome]) -> Outcome:
    facts = _facts(assembled)
    memory, reason = memory_of(assembled)
    facts["peak_memory_bytes"] = memory
    if reason:
        return Outcome({**facts, "status": "infeasible", "reason": reason, "evidence": assembled.evidence})
    found = execute()
    fields = facts | found.fields
    fields["clock"] = clock({"cost": request.cost.name, **fields})
    if fields["clock"] == "seconds" and assembled.tokens_per_step is not None and fields.get("step_time_s"):
        fields["tokens_per_s"] = assembled.tokens_per_step / fields["step_time_s"]
    return Outcome(fields, found.timeline)


def _shape(assembled: Assembled, *, from_file: bool) -> Fields:
    """Record fields: stages, cuts and updates, and the name and sizes of a schedule read from a file."""
    shape = assembled.schedule.shape
    fields: dict[str, Any] = {
        "partition_layers": str(assembled.choice.partition),
        "num_devices": shape.num_ranks,
        "num_stages": shape.num_stages,
        "num_backward_stages": shape.num_backward_stages,
        "num_updates": shape.num_steps,  # more than num_steps where a schedule updates after every microbatch
    }
    if from_file:
        fields |= {"schedule": assembled.schedule.name, "generator": None}
        fields |= {"num_microbatches": shape.num_microbatches, "num_steps": shape.num_steps}
    if assembled.keeps is not None:
        fields["kept_layers"] = list(assembled.keeps)
    return fields if assembled.plan is None else fields | _plan_fields(assembled)


def _facts(assembled: Assembled) -> Fields:
    versions, sizes, analysis = assembled.versions, assembled.sizes, _analysis(assembled)
    facts: Fields = {
        "num_plans_evaluated": assembled.choice.num_evaluated,
        "tokens_per_step": assembled.tokens_per_step,
        "tokens_per_s": None,
        "peak_memory_bytes": None,
        "weight_versions": versions.max_live,
        "staleness_steps": versions.max_staleness,
        **transfer_bytes(analysis, sizes, assembled.costs, assembled.keeps),
        **assembled.schedule.told,
    }
    if sizes is None:
        return facts
    if assembled.schedule.on_ssd:
        facts["ssd_bytes"], facts["ssd_written_bytes"] = _ssd_bytes(assembled.schedule, sizes)
    needed = host_bytes(assembled.schedule, sizes, analysis, keeps=assembled.keeps)
    return facts | {"host_memory_bytes": needed}


def _analysis(assembled: Assembled) -> Analysis:
    known = assembled.graph.analysis
    return known if known.schedule is assembled.schedule else Analysis(assembled.schedule)


def _ssd_bytes(schedule: Schedule, sizes: ModelBytes) -> SsdBytes:
    return ssd_bytes(schedule.on_ssd, sizes.under(schedule))


def memory_of(assembled: Assembled) -> tuple[list[int] | None, str]:
    """Bytes on each device, None for a model without a shape, and why they or the host's do not fit, else empty."""
    if assembled.sizes is None:
        return None, ""
    in_flight, limit = peak_in_flight(assembled.graph), assembled.cluster.usable_memory_bytes
    classes = classes_of(assembled.schedule, assembled.sizes, in_flight, assembled.keeps, _analysis(assembled))
    needed = [sum(each.values()) for each in classes]
    if assembled.plan is not None:
        return needed, why_not(assembled.plan, assembled.cluster)
    ssd = assembled.cluster.ssd
    if ssd is not None and (held := _ssd_bytes(assembled.schedule, assembled.sizes).held) > ssd.bytes:
        return needed, (
            f"{ssd.name} holds {ssd.bytes / 1e9:.1f} GB and is to hold {held / 1e9:.1f} GB: name more SSDs, as in "
            f"cluster.ssd=4x_samsung_990_pro_4tb"
        )
    on_device = "" if limit is None else why_infeasible(assembled.schedule, classes, limit)
    return needed, on_device or host_misfit(
        assembled.schedule, assembled.sizes, assembled.cluster, _analysis(assembled), assembled.keeps
    )


def host_misfit(
    schedule: Schedule, sizes: ModelBytes, cluster: Machine, analysis: Analysis, keeps: Sequence[int] | None
) -> str:
    """Why a schedule does not fit its host's memory; empty where it does, or the memory is not known."""
    limit = cluster.host_memory_bytes
    if limit is None or (needed := host_bytes(schedule, sizes, analysis, keeps=keeps)) <= limit:
        return ""
    way_out = "take a host with more, adapters (model.lora_rank), or a schedule whose states stay on its devices"
    return f"the host needs {needed / 1e9:.1f} GB and has {limit / 1e9:.1f} GB: {way_out}"


# --- the best plan of a search ---


def tuned(request: Request) -> Assembled:
    """The best plan that the search finds; ValueError if nothing is left to choose, or no setting is possible."""
    terms, who = terms_of_request(request), contender_of(request)
    frames = Frames(who, terms)
    plan = tune(who, terms, budget_of(request), frames=frames)
    return _assembled_plan(plan, terms, frames.of_plan(plan))


def budget_of(request: Request) -> Budget:
    work = request.tuning_budget
    assert work is not None
    return Budget(work, SKETCHED * work, work // TIMELINES_A_RESTART)


def _assembled_plan(plan: Tuned, terms: Terms, frame: Frame) -> Assembled:
    """A plan with all its transfers, checked; `frame` is that of its partition, with all steps."""
    size = plan.setting.microbatch_sequences
    graph, versions = frame.graph, check_graph(frame.graph)
    costs = frame.costs(plan.partition, plan.outcome.keeps)
    return Assembled(
        plan.contender.entry,
        graph.schedule,
        graph,
        versions,
        costs,
        Choice(plan.partition, "contest", plan.num_timed + plan.num_sketched),
        terms.model,
        terms.cluster,
        terms.sizes(size),
        terms.tokens(size),
        evidence="simulated" if terms.source == "published" else "predicted",
        plan=plan,
        keeps=plan.outcome.keeps,
        step_terms_s=causes_of(frame, plan.partition, plan.outcome.keeps),
        order_sha256=hashlib.sha256(repr(order_key(plan, terms)).encode()).hexdigest(),
    )


def contender_of(request: Request) -> Contender:
    entry, given = request.entry, request.schedule.options
    own = {name: value for name, value in given.items() if value != entry.options[name]}
    return Contender(entry, tuple(own.items()))


def terms_of_request(request: Request) -> Terms:
    """The terms of a request; ConfigError for a cost or a choice that does not go with a search."""
    _check(request)
    source: Source = "published" if request.cost.name == "published" else "analytic"
    found = terms_of(
        request.given_model,
        request.cluster,
        numbers_on(request.cluster, request.cost, request.software),
        num_devices=request.num_devices,
        sequences_per_step=request.num_microbatches * request.workload.microbatch_sequences,
        source=source,
        num_steps=request.num_steps,
        known=request.software,
    )
    return replace(found, fused_ahead=request.cost.fused_ahead)


def _check(request: Request) -> None:
    name = f"tuning_budget={request.tuning_budget}"
    if request.schedule.file is not None:
        raise ConfigError(f"{name}: a schedule from a file has nothing to choose; leave one of both out")
    if request.entry.extra is not None:
        raise ConfigError(
            f"{name}: {request.entry.name} solves a program for every plan, and a search tries many; leave one out"
        )
    check_published(request)
    if request.model is None:
        raise ConfigError(f"{name}: memory follows from the model; take one with a shape, such as model=qwen3_1p7b")
    if request.cost.name not in ("published", "analytic"):
        raise ConfigError(
            f"{name} with cost={request.cost.name}: microbatches of several sizes need times and bytes; use "
            "cost=published or cost=analytic"
        )
    for key, usual, taken in (
        ("split_penalty", 1, "halves of a backward as they are counted"),
        ("recompute_ahead", None, "recomputation as the schedule orders it"),
        ("overlap_gain", 0, "actions that run together as they are counted"),
    ):
        if (given := getattr(request.cost, key)) != usual:
            raise ConfigError(f"cost.{key}={given} with {name}: the search takes {taken}; leave one of both out")
    for key, default in (CHOSEN | CHARGED).items():
        if (value := getattr(request, key)) != default:
            why = "the search chooses it" if key in CHOSEN else "everything that moves is charged by its bytes"
            raise ConfigError(f"{key}={value} with {name}: {why}; leave it out")


# --- record fields and files of a plan -----------------------------------------------------------------------


def _plan_fields(assembled: Assembled) -> Fields:
    """The chosen plan, the search's cost, and the digest of the order."""
    plan = assembled.plan
    assert plan is not None
    setting = plan.setting
    return {
        "partition": "contest",
        "num_microbatches": assembled.schedule.shape.num_microbatches,
        "num_steps": plan.num_steps,
        **{name: getattr(setting, name) for name in _SETTING},
        "schedule_options": dict(setting.options),
        "fixed_options": dict(plan.contender.fixed),
        "step_terms_s": dict(assembled.step_terms_s or {}),
        "order_sha256": assembled.order_sha256,
        "budget_timelines": plan.budget.work,
        "budget_sketched_actions": plan.budget.climb_work,
        "spent_timelines": plan.work,
        "num_plans_timed": plan.num_timed,
        "num_plans_sketched": plan.num_sketched,
        "num_settings_tried": len(plan.tried),
        "num_restarts": plan.restarted.number,
        "restart_gain": plan.restarted.gain,
        "pace_gap": plan.gap if plan.outcome.fits else None,
        "least_memory_bytes": plan.least_bytes or None,
    }


def why_not(plan: Tuned, cluster: Machine) -> str:
    """Why the plan that lacks least memory does not fit; empty where it does."""
    found, parts = plan.outcome, []
    if found.fits:
        return ""
    for where, needed, limit in (
        ("a device", found.peak_bytes, cluster.usable_memory_bytes),
        ("the host", found.host_bytes, cluster.host_memory_bytes),
    ):
        if limit is not None and needed > limit:
            parts.append(f"{where} needs {needed / 1e9:.1f} GB and has {max(0, limit) / 1e9:.1f} GB")
    if not parts:
        parts.append("the host's SSDs need more than they have")
    lacks = f"{' and '.join(parts)} with the plan that lacks least of {len(plan.tried)} settings"
    least, limit = plan.least_host_bytes, cluster.host_memory_bytes
    return lacks if limit is None or least <= limit else f"{lacks}; every plan takes {least / 1e9:.1f} GB of the host"


def _tried_csv(plan: Tuned) -> str:
    """Every setting that was tried, a line each; the chosen plan's pace is over all steps, other paces over few."""
    rows: list[Fields] = []
    for each in plan.tried:
        is_chosen = each.setting == plan.setting
        outcome, cut = (plan.outcome, plan.partition) if is_chosen else (each.outcome, each.partition)
        row = {name: getattr(each.setting, name) for name in _SETTING} | dict(each.setting.options)
        if outcome is not None:
            row |= {"partition": str(cut), **{name: getattr(outcome, name) for name in _OUTCOME}}
        rows.append(row | {"chosen": is_chosen, "remark": each.remark})
    return as_csv(rows, (*_SETTING, *dict(plan.setting.options), "partition", *_OUTCOME, "chosen", "remark"))
