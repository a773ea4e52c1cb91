"""Manifests: the cells of a sweep and their results. Exhibits find their runs through them.

    <results>/manifests/<name>/plan.json        experiment, code, configuration and cells, written before the first run
    <results>/manifests/<name>/<worker>.jsonl   a line for each cell that ended, appended by the process that ran it

Each worker appends to a file of its own, so that workers on several machines need no lock. The plan and every line have
a digest of all their values. A line that was torn by a kill, or changed, is ignored: its cell runs again, and finds its
record if there is one.
"""

import hashlib
import json
import os
import re
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rpbench.places import ORDERS, file_of
from rpbench.records import provenance, record
from rpbench.records.record import Record, append_line, write_atomically
from rpbench.untrusted import parsed
from rpbench.whole_file import read_bytes, read_text

FOLDER = "manifests"
PLAN = "plan.json"

PLANNED, DONE, INFEASIBLE, OOM = "planned", "done", "infeasible", "oom"
NOT_APPLICABLE, FAILED = "not applicable", "failed"
STATES = (PLANNED, DONE, INFEASIBLE, OOM, NOT_APPLICABLE, FAILED)
_MOST_BYTES = 2**29  # of a plan or a worker's lines; a million cells take less
_NAME = re.compile(r"\w[\w.-]{0,99}")  # of a record or an experiment
ENDED = (DONE, INFEASIBLE, OOM)  # of a cell with a verdict
_STATE_OF = {"ok": DONE, "infeasible": INFEASIBLE, "oom": OOM, "failed": FAILED, "not applicable": NOT_APPLICABLE}

# Keys of a command line that are not part of a manifest's name.
_BESIDES = ("results_dir", "tracker", "force", "save_timeline", "experiment", "hydra")


class ManifestError(ValueError):
    """A manifest that cannot be read."""


@dataclass(frozen=True)
class Cell:
    number: int
    overrides: Mapping[str, str]
    state: str = PLANNED  # one of `STATES`
    run_ids: tuple[str, ...] = ()  # of its records; a duel has one for each contender
    reason: str = ""
    machine: str | None = None  # `machine_word`, where a record depends on the machine's speed
    digests: tuple[str, ...] = ()  # of its records when it ended

    def __str__(self) -> str:
        return " ".join(f"{key}={value}" for key, value in self.overrides.items())


@dataclass(frozen=True)
class Manifest:
    name: str
    experiment: str | None
    overrides: tuple[str, ...]
    code_version: str
    conf_version: str
    cells: tuple[Cell, ...] = field(default=())

    @property
    def command(self) -> str:
        """The command that runs the sweep, or continues it."""
        asked = [f"experiment={self.experiment}"] if self.experiment else []
        return " ".join(["python -m rpbench -m", *asked, *self.overrides])

    @property
    def counts(self) -> Counter[str]:
        return Counter(cell.state for cell in self.cells)


def manifest_name(experiment: str | None, arguments: Sequence[str]) -> str:
    """The folder of a sweep: its experiment, with a digest of the rest of the command line."""
    asked = asked_of(arguments)
    digest = hashlib.sha256("\0".join(asked).encode()).hexdigest()[:8]
    return "-".join(filter(None, (experiment or "sweep", digest if asked or not experiment else "")))


def asked_of(arguments: Sequence[str]) -> tuple[str, ...]:
    """The overrides of a command line that are part of the manifest's name, sorted."""
    return tuple(sorted(item for item in arguments if "=" in item and not _is_beside(item)))


def _is_beside(item: str) -> bool:
    return item.lstrip("+~").partition("=")[0].replace("/", ".").split(".")[0] in _BESIDES


@dataclass(frozen=True)
class Plan:
    """The plan of a sweep, as workers know it."""

    name: str
    plan_id: str
    command: str = ""  # another one for each start of the sweep

    def folder(self, results: Path) -> Path:
        return results / FOLDER / self.name


def recall(results: Path, plan: Plan) -> tuple[Cell, ...]:
    """The cells of a plan with their current states; ManifestError if the plan is gone."""
    found = read_manifest(results, plan.name)
    if found is None:
        raise ManifestError(f"{plan.folder(results) / PLAN} is gone; run the sweep again")
    return found.cells


# Words of a cell whose result the plan does not decide: files, known by their bytes, and keys that need more than a
# record.
_LOOKED_INTO = (
    *("schedule_file", *ORDERS, "path", "profile", "text"),
    *("resume_from", "save_to", "save_timeline", "force", "tracker"),
)


def is_settled(results: Path, cell: Cell, overrides: Sequence[str]) -> list[Record] | None:
    """The records of a cell with a verdict, if the manifest alone shows that they still hold; else None.

    The plan stands for code, configuration and packages. Where anything else can change a result, or more than the
    record is needed, `recording` checks everything.
    """
    if cell.state not in ENDED or not cell.run_ids or (cell.machine or machine_word()) != machine_word():
        return None
    text = " ".join(overrides)
    name = cell.overrides.get("experiment") or next((o[11:] for o in overrides if o.startswith("experiment=")), None)
    if name:
        file = file_of("experiment", name) if _NAME.fullmatch(name) else None
        if file is None:
            return None
        text += read_text(file)
    if any(word in text for word in _LOOKED_INTO):
        return None
    rows = [record.read(results / run_id) for run_id in cell.run_ids]
    sound = [row for row in rows if row is not None]
    asked = {f"{key}={value}" for key, value in cell.overrides.items()}
    answer = all(asked <= set(row.get("overrides") or ()) for row in sound)
    return sound if len(sound) == len(rows) and answer and _worst(sound) == cell.state else None


def machine_word() -> str:
    """A digest of everything that decides this machine's speed."""
    text = json.dumps(provenance.surroundings(measured=True), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def write_plan(results: Path, experiment: str | None, arguments: Sequence[str], cells: Sequence[Sequence[str]]) -> Plan:
    name = manifest_name(experiment, arguments)
    plan: dict[str, Any] = {
        "experiment": experiment,
        "overrides": asked_of(arguments),
        "code_version": provenance.code_version(),
        "conf_version": provenance.conf_version(),
        "git_commit": provenance.git_commit(),
        "calibrated": provenance.calibrated_version(),
        "surroundings": provenance.surroundings(measured=False),
        "cells": [
            dict(item.lstrip("+").partition("=")[::2] for item in cell if not _is_beside(item)) for cell in cells
        ],
    }
    plan_id = hashlib.sha256(json.dumps(plan, sort_keys=True).encode()).hexdigest()[:12]
    text = json.dumps(record.sealed({"plan": plan_id, "planned_at": provenance.now(), **plan}), indent=1)
    write_atomically(results / FOLDER / name / PLAN, text + "\n")
    return Plan(name, plan_id, uuid.uuid4().hex[:12])


def state_of(row: Record) -> str:
    return _STATE_OF[row["status"]]


def _worst(rows: Sequence[Record]) -> str:
    """The state of a cell with these records: failed if one is, else done if one is."""
    states = [state_of(row) for row in rows]
    return next((state for state in (FAILED, DONE) if state in states), states[0])


class Journal:
    """Writes the end of one cell to its manifest; a run of no sweep has no plan and writes nothing."""

    def __init__(self, results: Path | None = None, plan: Plan | None = None, number: int = 0) -> None:
        self._results, self._plan, self._number = results, plan, number
        self._is_written = False

    def ended(self, rows: Sequence[Record]) -> None:
        worst = next((row for row in rows if state_of(row) == _worst(rows)), rows[0])
        self._write(_worst(rows), worst.get("reason") or "", rows)

    def refused(self, reason: str) -> None:
        """The cell is not applicable."""
        self._write(NOT_APPLICABLE, reason)

    def failed(self, reason: str) -> None:
        """The cell broke; nothing is added if `ended` has written its records."""
        if not self._is_written:
            self._write(FAILED, reason)

    def _write(self, state: str, reason: str, rows: Sequence[Record] = ()) -> None:
        self._is_written = True
        if self._results is None or self._plan is None:
            return
        line: dict[str, Any] = {"plan": self._plan.plan_id, "cell": self._number, "state": state, "reason": reason}
        line |= {"run_ids": [row["run_id"] for row in rows], "digests": [row.get("digest", "") for row in rows]}
        if any(row.get("evidence") in ("measured", "emulated") for row in rows):
            line["machine"] = machine_word()
        if self._plan.command:
            line["command"] = self._plan.command
        path = self._plan.folder(self._results) / f"{provenance.host_word()}-{os.getpid()}.jsonl"
        append_line(path, json.dumps(record.sealed(line)))


class Ends:
    """The numbers of the cells that have ended under one command; every look reads what its workers wrote since."""

    def __init__(self, results: Path, plan: Plan) -> None:
        self._folder, self._plan = plan.folder(results), plan
        self._read: dict[Path, int] = {}  # bytes
        self._numbers: set[Any] = set()

    def __contains__(self, number: int) -> bool:
        for path in self._folder.glob("*.jsonl"):
            before = self._read.get(path, 0)
            if not path.is_file() or path.stat().st_size == before:
                continue
            with path.open("rb") as file:
                file.seek(before)
                text = file.read(_MOST_BYTES)
            whole = text[: text.rfind(b"\n") + 1]
            self._read[path] = before + len(whole)
            lines = _sound_lines(whole, self._plan.plan_id)
            self._numbers |= {line.get("cell") for line in lines if line.get("command") == self._plan.command}
        return number in self._numbers


def read_manifest(results: Path, name: str) -> Manifest | None:
    """The manifest of that name, if there is one; ManifestError if its plan is torn or malformed."""
    folder = results / FOLDER / name
    path = folder / PLAN
    try:
        plan = parsed(read_text(path, _MOST_BYTES))
        if problem := _defect(plan):
            raise ValueError(problem)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ManifestError(f"{path}: not a readable plan ({error}); remove it and run the sweep again") from None
    cells = [Cell(number, overrides) for number, overrides in enumerate(plan["cells"])]
    for line in _lines(folder, plan["plan"]):
        number = line.get("cell")
        if type(number) is int and 0 <= number < len(cells):
            cells[number] = _settled(cells[number], line)
    asked = (plan["experiment"], tuple(plan["overrides"]), plan["code_version"], plan["conf_version"])
    return Manifest(name, *asked, tuple(cells))


def _defect(plan: Any) -> str | None:
    """The fault of a parsed plan; None for a sound one."""
    if not isinstance(plan, dict):
        return "a plan is one JSON object"
    for key in ("plan", "code_version", "conf_version"):
        if not isinstance(plan.get(key), str):
            return f"its {key} is no text"
    if not isinstance(plan.get("experiment", ()), str | None):
        return "its experiment is no name"
    if not _is_list_of_texts(plan.get("overrides")):
        return "its overrides are no list of texts"
    cells = plan.get("cells")
    if not isinstance(cells, list) or not all(
        isinstance(cell, dict) and _is_list_of_texts([*cell.values()]) for cell in cells
    ):
        return "its cells are no list of objects with texts"
    return None if record.is_sealed(plan) else "its values are not those that its digest was made of"


def _is_list_of_texts(found: Any) -> bool:
    return isinstance(found, list) and all(isinstance(item, str) for item in found)


def _is_sound(line: Any, plan_id: str) -> bool:
    """Whether a line of a journal is whole and of this plan; run_ids must be names, never paths."""
    if not isinstance(line, dict) or line.get("plan") != plan_id or line.get("state") not in STATES:
        return False
    run_ids = line.get("run_ids") or []
    texts = _is_list_of_texts(run_ids) and _is_list_of_texts(line.get("digests") or [])
    return texts and all(map(_NAME.fullmatch, run_ids)) and record.is_sealed(line)


def manifest_names(results: Path) -> list[str]:
    return sorted(path.parent.name for path in (results / FOLDER).glob(f"*/{PLAN}"))


def read_manifests(results: Path) -> list[Manifest]:
    """Every readable manifest of a folder of results."""
    found = []
    for name in manifest_names(results):
        with suppress(ManifestError):
            found.append(read_manifest(results, name))
    return [manifest for manifest in found if manifest is not None]


def no_sweep_in(results: Path) -> str:
    return (
        f"results_dir={results}: no finished sweep in it; make one first, as in: "
        f"python -m rpbench -m experiment=figure17 results_dir={results}"
    )


def _lines(folder: Path, plan_id: str) -> list[dict[str, Any]]:
    """The sound lines that workers of this plan have written, the oldest file first."""
    files = [path for path in folder.glob("*.jsonl") if path.is_file()]
    files.sort(key=lambda path: (path.stat().st_mtime_ns, path.name))
    return [line for path in files for line in _sound_lines(read_bytes(path, _MOST_BYTES), plan_id)]


def _sound_lines(text: bytes, plan_id: str) -> list[dict[str, Any]]:
    """The lines of a journal that are whole and of this plan."""
    lines = []
    for row in text.decode("utf-8", "replace").split("\n"):
        with suppress(ValueError):
            line = parsed(row)
            if _is_sound(line, plan_id):
                lines.append(line)
    return lines


def _settled(cell: Cell, line: Mapping[str, Any]) -> Cell:
    """A cell after one more line about it: a verdict is kept over a failure, and numbers over both."""
    if cell.state == DONE and line["state"] != DONE:
        return cell
    if cell.state in ENDED and line["state"] not in ENDED:
        return cell
    run_ids, digests = (tuple(line.get(key) or ()) for key in ("run_ids", "digests"))
    reason, machine = str(line.get("reason") or ""), line.get("machine")
    return Cell(cell.number, cell.overrides, line["state"], run_ids, reason, machine, digests)
