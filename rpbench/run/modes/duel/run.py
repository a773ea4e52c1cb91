"""A duel from request to records: plan, check, play each start in a process of its own, write all records."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rpbench import tracking
from rpbench.config.choices import Duel, Turns
from rpbench.config.request import Request
from rpbench.cost.profiled import to_text
from rpbench.engine.backends.threads import one_thread, usable_cores
from rpbench.engine.measure.calibration import Calibration, calibrate_cores
from rpbench.plan.whole import WholePlan
from rpbench.records import record
from rpbench.records.record import Record
from rpbench.run.modes.duel.contenders import BASE, LIMIT, Contender, contenders, is_reference
from rpbench.run.modes.duel.plans import chosen, complete, described, make_plans, plans_text, run_off
from rpbench.run.modes.duel.starts import Job, check_parity, planned_job, start_apart, without
from rpbench.run.modes.duel.summary import Survey, emulated_makespans, lines, summary
from rpbench.run.modes.duel.verdict import Started, timed_fields
from rpbench.run.recording import identity, may_be_found, names, origin
from rpbench.run.scheduled import PROFILE

SUMMARY = "summary.json"  # in the folder of 1F1B
CLUSTER = "cluster.yaml"  # beside it: the calibration before the first start
PLANS = "plans.json"  # beside it: the plans of all contenders

Fields = dict[str, Any]


def records(request: Request) -> list[Record]:
    """The records of every contender, made or found, all on disk on return."""
    entrants = contenders(request.mode_as(Duel).contenders)
    return found_or_made(request, entrants, lambda ids: _made(request, entrants, ids))


def found_or_made(
    request: Request, entrants: Sequence[Contender], make: Callable[[Mapping[str, str]], list[Record]]
) -> list[Record]:
    """The records of a finished duel without failures, or those that `make` writes under the given run_ids."""
    results = request.results_dir
    ids = {entrant.name: record.run_id({**identity(request), "contender": entrant.name}) for entrant in entrants}
    record.check_writable(results, "results_dir")
    found = [row for run_id in ids.values() if (row := record.read(results / run_id)) and row["status"] != "failed"]
    if not may_be_found(request) or len(found) < len(ids):
        return make(ids)
    for row in found:
        tracking.mirror(request, row)
    return found


def write_all(request: Request, rows: list[Record], verdicts: Mapping[str, Fields]) -> list[Record]:
    """Write and track records, with the verdicts on their contenders."""
    for row in rows:
        row |= verdicts.get(row["contender"], {})
        row |= record.write(request.results_dir / row["run_id"], row)
        tracking.mirror(request, row)
    return rows


def play_all(
    request: Request,
    job: Job,
    ids: Mapping[str, str],
    opening: Callable[[Contender], Fields],
    timed: Callable[[Sequence[str], Sequence[Started]], Mapping[str, Fields]],
    between: Callable[[], None] = lambda: None,
) -> list[Record]:
    """The rows of all contenders: compared with plain training and, where they pass, timed in every start.

    `opening` are fields of a contender that are known before; `between` is called before, between and after the starts.
    """
    mode = request.mode
    assert isinstance(mode, Duel | Turns)
    job.tell(f"{mode.num_starts} starts of at most {mode.budget_s:g} s each, {len(job.entrants)} contenders")
    if len(usable_cores()) < job.num_devices:
        job.tell(f"{job.num_devices} devices on {len(usable_cores())} core: one turn, and no verdict")
    parities = check_parity(job, mode.parity_seq_len)
    fit, starts = without(job, parities), []
    if any(map(is_reference, fit.names)):
        between()
        for number in range(mode.num_starts):
            starts.append(start_apart(replace(fit, order_seed=job.order_seed + number)))
            between()
    lost = {name: reason for start in starts for name, reason in start.about.get("lost", {}).items()}
    found = timed([name for name in fit.names if name not in lost], starts) if starts else {}
    rows = []
    for entrant in job.entrants:
        row = {**names(request), "contender": entrant.name, "engine": entrant.engine, **origin()}
        row |= {"status": "ok", "reason": None, "evidence": "measured", "config": dict(request.subject)}
        row |= opening(entrant) | parities[entrant.name]
        if entrant.name not in found:
            why = lost.get(entrant.name, "nobody to compare with: no reference trains as plain training does")
            status = row["status"] if row["status"] != "ok" else "failed"  # not applicable
            row |= {"status": status, "evidence": None, "reason": row["reason"] or why}
        rows.append(row | found.get(entrant.name, {}) | {"run_id": ids[entrant.name]})
    return rows


def _made(request: Request, entrants: Sequence[Contender], ids: Mapping[str, str]) -> list[Record]:
    with one_thread():
        times, shortlists = make_plans(request, entrants)
    raced = run_off(request, entrants, shortlists, start_apart)
    plans = complete(entrants, {name: chosen(own).plan for name, own in raced.items()})
    job = planned_job(request, entrants, plans)
    survey = _surveyor(request, job) if request.mode_as(Duel).calibrate else None
    for name, own in raced.items():
        if len(own) > 1:
            job.tell(described(name, own))

    def opening(entrant: Contender) -> Fields:
        plan = plans[entrant.name]
        return {
            "schedule": entrant.schedule,
            "dispatch": entrant.dispatch,
            "partition_layers": str(plan.schedule.partition),
            "num_stages": plan.schedule.shape.num_stages,
            "num_backward_stages": plan.schedule.shape.num_backward_stages,
            "round_size": plan.options.get("round_size"),
            "recompute": "except_last" if plan.keeps_last else "all",
            "num_plans_evaluated": plan.num_evaluated,
            "num_plans_raced": len(raced.get(entrant.plan_of or entrant.name, ())),
            "num_actions": plan.schedule.num_actions,
            "simulated_makespan_s": plan.makespan,
        }

    def timed(fit: Sequence[str], starts: Sequence[Started]) -> dict[str, Fields]:
        emulated = emulated_makespans({name: plans[name] for name in fit})
        return {
            name: {"emulated_makespan_s": emulated[name], **_timed(request, plans[name], name, starts, survey)}
            for name in fit
        }

    rows = play_all(request, job, ids, opening, timed, survey or (lambda: None))
    for row in rows:
        record.write_atomically(request.results_dir / row["run_id"] / PROFILE, to_text(times))
    write_all(request, rows, {})
    folder, found = request.results_dir / ids[BASE], summary(rows)
    record.write_atomically(folder / PLANS, plans_text(times, plans, raced))
    if survey is not None:
        record.write_atomically(folder / CLUSTER, survey.first_file())
    record.write_atomically(folder / SUMMARY, json.dumps(found, indent=1) + "\n")
    job.tell("\n".join(lines(found)))
    return rows


def _surveyor(request: Request, job: Job) -> Survey:
    model = request.given_model

    def measure() -> Calibration:
        job.tell("calibrating the machine")
        return calibrate_cores(job.num_devices, lambda line: None)

    return Survey(measure, model, request.workload.microbatch_sequences * model.seq_len, job.num_devices)


def _timed(request: Request, plan: WholePlan, name: str, starts: Sequence[Started], survey: Survey | None) -> Fields:
    tokens = request.tokens_per_step
    fields = timed_fields(name, starts, plan.schedule.shape.num_steps)
    busy = fields["cpu_s"] / (plan.schedule.shape.num_ranks * fields["replay_makespan_s"])
    fields |= {"bubble_makespan": max(0.0, 1 - busy)}
    fields |= {"tokens_per_step": tokens, "tokens_per_s": tokens / fields["step_time_s"]}
    if survey is not None:
        fields["calibrated_makespans_s"] = survey.makespans(plan, waits=name != LIMIT)
        fields["calibration_foreign_cores"] = survey.foreign_cores
    return fields
