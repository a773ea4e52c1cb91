"""Recording: from a request to its record on disk, which is found there or made by the request's mode."""

import importlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rpbench import tracking
from rpbench.config.request import Request
from rpbench.ir.timeline import Timeline
from rpbench.records import provenance, record
from rpbench.records.describe import describe, table
from rpbench.records.record import Record
from rpbench.tracking.metrics import StepFeed
from rpbench.untrusted import not_finite

Fields = dict[str, Any]

JSON = "RPBENCH_JSON"  # in the environment: records are printed on a terminal too
TIMELINE = "timeline.csv"  # in a run's folder: when each action ran


@dataclass(frozen=True)
class Outcome:
    """Fields of a run's record, with `status` and `evidence`; `words` are details of a failure for its events."""

    fields: Fields
    timeline: Timeline | None = None
    words: str = ""


@dataclass(frozen=True)
class Work:
    """A run that has been checked and can begin."""

    opening: Fields
    carry_out: Callable[[], Outcome]
    files: Mapping[str, str] = field(default_factory=dict)  # name -> text, written beside the record before the run
    is_out_of_memory: Callable[[BaseException], bool] = lambda error: isinstance(error, MemoryError)
    steps: StepFeed = field(default_factory=StepFeed)  # rows for a tracker while the run lasts


def recorded(request: Request, prepare: Callable[[Request], Work]) -> Record:
    """The record of a run, found on disk or made by the work of `prepare` and written; a failed run leaves one too."""
    name = record.run_id(identity(request))
    folder = request.results_dir / name
    record.check_writable(request.results_dir, "results_dir")
    if may_be_found(request) and (known := _finished(folder, with_timeline=request.save_timeline)):
        tracking.mirror(request, known)
        return known
    work = prepare(request)
    opening = {"run_id": name, **names(request), **work.opening, "config": dict(request.subject), **origin()}
    opening |= {"schema": record.SCHEMA, "surroundings": provenance.surroundings(measured=request.measures)}
    record.add_event(folder, "started", at=opening["started_at"])
    mirror = tracking.Mirror(request, opening)
    try:
        files: dict[str, str] = {}
        for file, text in work.files.items():
            files |= record.put_file(folder, file, text)
        with work.steps.heard_by(mirror.step):
            outcome = _carried_out(work, folder)
        if outcome.timeline is not None and request.save_timeline:
            files |= record.put_file(folder, TIMELINE, outcome.timeline.to_csv())
    except BaseException:
        mirror.abandon()
        raise
    opening |= {"files": list(files), "file_digests": files}
    row = record.write(folder, opening | {"status": "ok", "reason": None} | outcome.fields)
    mirror.end(row, outcome.timeline)
    return row


def _carried_out(work: Work, folder: Path) -> Outcome:
    """The outcome of the work; an error becomes a failed one."""
    began = time.perf_counter()
    try:
        outcome = work.carry_out()
    except Exception as error:
        if work.is_out_of_memory(error):
            record.add_event(folder, "oom", reason=str(error))
            return Outcome({"status": "oom", "reason": str(error).partition("\n")[0], "evidence": None})
        record.add_event(folder, "failed", traceback=traceback.format_exc())
        return Outcome({"status": "failed", "reason": f"{type(error).__name__}: {error}", "evidence": None})
    outcome = _of_numbers(outcome)
    status, reason = (outcome.fields.get(key) for key in ("status", "reason"))
    words = {"words": outcome.words} if outcome.words else {}
    took = time.perf_counter() - began
    record.add_event(folder, "finished", seconds=took, status=status or "ok", reason=reason, **words)
    return outcome


def _of_numbers(outcome: Outcome) -> Outcome:
    """The outcome, or a failed one if a number is infinite or NaN: records hold finite numbers only."""
    broken = list(not_finite(outcome.fields))
    if not broken:
        return outcome
    fields = {key: value for key, value in outcome.fields.items() if not any(not_finite({key: value}))}
    reason = (
        fields.get("reason") or f"{broken[0]}: no number; lower optimizer.learning_rate, or set optimizer.clip_norm"
    )
    return Outcome({**fields, "status": "failed", "reason": reason, "evidence": None}, words=" ".join(broken[:1000]))


def may_be_found(request: Request) -> bool:
    """Whether an earlier record may be returned: not for a forced run, or one that saves a checkpoint."""
    return not request.force and request.checkpoint.save_to is None


def _finished(folder: Path, *, with_timeline: bool) -> Record | None:
    """The record of a run that has ended, with its timeline if one is requested."""
    known = record.read(folder)
    if known is None or known["status"] == "failed":
        return None
    if with_timeline and known["status"] == "ok" and record.kept_file(folder, known, TIMELINE) is None:
        return None
    return known


def identity(request: Request) -> dict[str, Any]:
    """Everything that can change a run's result: the question, the code and the surroundings."""
    return {
        "subject": request.subject,
        "choices": request.choices,
        "code_version": provenance.code_version(),
        **provenance.surroundings(measured=request.measures),
    }


def names(request: Request) -> Fields:
    """The choices of a run as plain names and sizes."""
    return {
        "schedule": request.schedule.chosen,
        "generator": request.entry.name,
        "model": request.model_name,
        "cluster": request.cluster.name,
        "workload": request.workload.name,
        "cost": request.cost.name,
        "mode": request.mode.name,
        "backend": request.backend.name if request.backend else None,
        "experiment": request.choices.get("experiment"),
        "choices": dict(request.choices),
        "overrides": list(request.overrides),
        "notes": list(request.notes),
        "partition": request.partition,
        "dispatch": request.dispatch,
        "offload": request.offload,
        "num_devices": request.num_devices,
        "num_microbatches": request.asked_microbatches,
        "num_steps": request.num_steps,
        "seed": request.seed,
        **({} if request.mesh is None else {"mesh": request.mesh.plain()}),
    }


def origin() -> Fields:
    return {
        "code_version": provenance.code_version(),
        "git_commit": provenance.git_commit(),
        "versions": provenance.versions(),
        "hardware": provenance.hardware(),
        "started_at": provenance.now(),
    }


def run(request: Request) -> list[Record]:
    """Records of a request, made or found, on disk on return; ValueError if it is wrong, with nothing written."""
    mode = importlib.import_module(f"rpbench.run.modes.{request.mode.name}")  # torch, where a mode needs it
    return list(mode.records(request)) if hasattr(mode, "records") else [recorded(request, mode.prepare)]


@contextmanager
def json_if(asked: bool) -> Iterator[None]:
    """If `asked`, records are printed as JSON inside even on a terminal, in child processes too."""
    before = os.environ.get(JSON)
    if asked:
        os.environ[JSON] = "1"
    try:
        yield
    finally:
        if asked and before is None:
            del os.environ[JSON]


def emit(row: Record, *, alone: bool = False) -> None:
    """Print the record to stdout as one line of JSON, and a sentence about it to stderr.

    A terminal gets no JSON unless requested, but a short table of a single run (`alone`).
    """
    print(describe(row), file=sys.stderr, flush=True)
    for note in row.get("notes", ()):
        print(f"rpbench: {note}", file=sys.stderr, flush=True)
    if not sys.stdout.isatty() or os.environ.get(JSON):
        print(json.dumps(row, allow_nan=False), flush=True)
    elif alone:
        print("\n".join(table(row)), flush=True)
