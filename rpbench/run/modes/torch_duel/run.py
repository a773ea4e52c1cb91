"""A torch duel from configuration to records: cut, check, play each start in its own process, write all records."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from statistics import median
from typing import Any

from rpbench import registry, tracking
from rpbench.config.choices import ConfigError, TorchDuel
from rpbench.config.request import Request
from rpbench.engine.backends.cpu import usable_cores
from rpbench.records import record
from rpbench.records.record import Record
from rpbench.run.assemble import Assembled
from rpbench.run.modes.duel.rows import other_cores
from rpbench.run.modes.duel.started import Started
from rpbench.run.modes.duel.verdict import Rules
from rpbench.run.modes.torch_duel.entrants import OWN, TWIN, Entrant, entrants
from rpbench.run.modes.torch_duel.findings import derived_fields
from rpbench.run.modes.torch_duel.start import Job, check_parity, start_apart
from rpbench.run.recording import identity, may_be_found, names, origin
from rpbench.run.scheduled import assembled_of
from rpbench.run.training.tensors import one_thread
from rpbench.torch_runtime.own_schedules import SAME_NAME
from rpbench.torch_runtime.request import TorchRequest, make_request


def records(request: Request) -> list[Record]:
    """The records of every entrant, made or found; all are on disk when this returns.

    Raises:
        ValueError: if the request is wrong; nothing is written then.
    """
    mode, results = request.mode, request.results_dir
    assert isinstance(mode, TorchDuel)
    everybody = entrants(mode.schedules)
    ids = {each.name: record.run_id({**identity(request), "contender": each.name}) for each in everybody}
    record.check_writable(results, "results_dir")
    known = [record.read(results / run_id) for run_id in ids.values()]
    if may_be_found(request) and all(row is not None and row["status"] != "failed" for row in known):
        return [row for row in known if row is not None]
    _check(mode.schedules)
    with one_thread():
        cuts = {name: assembled_of(_of_schedule(request, name)) for name in mode.schedules}
    rows = _rows(request, everybody, cuts)
    for row in rows:
        row |= {"run_id": ids[row["contender"]], "config": dict(request.subject)}
    derived = derived_fields({row["contender"]: row for row in rows})
    for row in rows:
        row |= derived.get(row["contender"], {})
        row |= record.write(results / row["run_id"], row)
        tracking.mirror(request, row, None)
    return rows


def _check(schedules: Sequence[str]) -> None:
    """Refuse schedules that torch has none of its own for.

    Raises:
        ConfigError: naming those it has.
    """
    unknown = [name for name in schedules if name not in SAME_NAME]
    if unknown or not schedules:
        raise ConfigError(
            f"mode.schedules={','.join(unknown or schedules)}: torch has {', '.join(SAME_NAME)} of its own; take some "
            "of these"
        )


def _of_schedule(request: Request, name: str) -> Request:
    """The request of one schedule, for one step of it."""
    entry = registry.entry(name)
    schedule = replace(request.schedule, chosen=name, entry=entry, options=entry.options)
    return replace(request, schedule=schedule, num_steps=1, recompute="none")


def _rows(request: Request, everybody: list[Entrant], cuts: Mapping[str, Assembled]) -> list[Record]:
    mode = request.mode
    assert isinstance(mode, TorchDuel)
    job = _job(request, everybody, cuts)
    _tell(f"{mode.num_starts} starts of at most {mode.budget_s:g} s each, {len(everybody)} entrants")
    parities = check_parity(job, mode.parity_seq_len)
    fit = tuple(each for each in everybody if parities[each.name]["parity"])
    starts = []
    if len(usable_cores()) < request.num_devices:
        _tell(f"{request.num_devices} devices on {len(usable_cores())} core: one turn, and no verdict")
    if any(each.is_reference for each in fit):
        numbers = range(mode.num_starts)
        starts = [start_apart(replace(job, entrants=fit, order_seed=request.seed + number)) for number in numbers]
    rows = []
    for each in everybody:
        row = _opening(request, each, cuts[each.schedule]) | parities[each.name]
        if each not in fit or not starts:
            lost = "nobody to compare with: torch's own schedule does not train as plain training does"
            rows.append(row | {"status": "failed", "evidence": None, "reason": row["reason"] or lost})
        else:
            rows.append(row | _timed(each.name, starts))
    return rows


def _job(request: Request, everybody: Sequence[Entrant], cuts: Mapping[str, Assembled]) -> Job:
    mode = request.mode
    assert isinstance(mode, TorchDuel)
    return Job(
        entrants=tuple(everybody),
        requests={each.name: _asked(request, each, cuts[each.schedule]) for each in everybody},
        costs={name: cut.costs for name, cut in cuts.items()},
        rules=Rules(half_width=mode.half_width, least_starts=max(Rules.least_starts, mode.num_starts)),
        budget_s=mode.budget_s,
        order_seed=request.seed,
        stall_s=mode.stall_s,
    )


def _asked(request: Request, entrant: Entrant, cut: Assembled) -> TorchRequest:
    assert request.model is not None  # or the request had been refused
    return make_request(
        cut.schedule,
        request.model,
        microbatch_sequences=request.workload.microbatch_sequences,
        seed=request.seed,
        dtype=request.dtype,
        optimizer=None,
        order_of=SAME_NAME[entrant.schedule] if entrant.role in (OWN, TWIN) else "table",
    )


def _opening(request: Request, entrant: Entrant, cut: Assembled) -> Record:
    shape = cut.schedule.shape
    return {
        **names(request),
        "schedule": entrant.schedule,
        "generator": entrant.schedule,
        "contender": entrant.name,
        "role": entrant.role,
        "engine": entrant.engine,
        **origin(),
        "status": "ok",
        "reason": None,
        "evidence": "measured",
        "partition_layers": str(cut.schedule.partition),
        "num_stages": shape.num_stages,
        "num_actions": cut.schedule.num_actions,
        "optimizer": asdict(request.optimizer)["name"],
    }


def _timed(name: str, starts: Sequence[Started]) -> dict[str, Any]:
    """An entrant's runs of every start, and the medians over starts of the medians within each."""
    runs = [start.columns[name] for start in starts]
    others = [cores for cores in map(other_cores, runs) if cores is not None]

    def middle(key: str) -> float:
        return median(median(own[key]) for own in runs)

    return {
        "makespan_s": middle("wall_s"),
        "step_time_s": middle("wall_s"),
        "replay_makespan_s": middle("replay_s"),
        "cpu_s": middle("cpu_s"),
        "foreign_cpu_share": median(others) if others else None,
        "starts": [start.about for start in starts],
        "runs": runs,
    }


def _tell(line: str) -> None:
    print(f"torch duel: {line}", file=sys.stderr, flush=True)
