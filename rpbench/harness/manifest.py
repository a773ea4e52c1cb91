"""Manifests: what a sweep was asked for, cell by cell, and what became of each. Exhibits find their runs through them.

    <results>/manifests/<name>/plan.json        experiment, code, configuration and the cells, written before the first
    <results>/manifests/<name>/<worker>.jsonl   a line for each cell that ended, appended by the process that ran it

A worker appends to a file of its own, so that workers on several machines need no lock. A line that was torn by a kill
is as if it had not been written: its cell is still to be run, and finds its record if there is one.
"""

import hashlib
import json
import os
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from rpbench.harness import provenance
from rpbench.harness.record import Record, write_atomically

FOLDER = "manifests"
PLAN = "plan.json"

PLANNED, DONE, INFEASIBLE, OOM = "planned", "done", "infeasible", "oom"
NOT_APPLICABLE, FAILED = "not applicable", "failed"
STATES = (PLANNED, DONE, INFEASIBLE, OOM, NOT_APPLICABLE, FAILED)
_STATE_OF = {"ok": DONE, "infeasible": INFEASIBLE, "oom": OOM, "failed": FAILED}

# What a command line says beside the subject of a sweep; these do not enter a manifest's name.
_BESIDES = ("results_dir", "tracker", "force", "save_timeline", "experiment", "hydra")


class ManifestError(ValueError):
    """A manifest that cannot be read."""


@dataclass(frozen=True)
class Cell:
    """One configuration of a sweep.

    Args:
        number: its place in the plan.
        overrides: what it sets, by key.
        state: one of `STATES`.
        run_ids: the records it left; a duel leaves one for each contender.
        reason: why it did not end well.
    """

    number: int
    overrides: Mapping[str, str]
    state: str = PLANNED
    run_ids: tuple[str, ...] = ()
    reason: str = ""

    def __str__(self) -> str:
        return " ".join(f"{key}={value}" for key, value in self.overrides.items())


@dataclass(frozen=True)
class Manifest:
    """A sweep: what was asked for, and its cells."""

    name: str
    experiment: str | None
    overrides: tuple[str, ...]
    code_version: str
    conf_version: str
    cells: tuple[Cell, ...] = field(default=())

    @property
    def command(self) -> str:
        """What runs the sweep, and goes on where it stopped."""
        asked = [f"experiment={self.experiment}"] if self.experiment else []
        return " ".join(["python -m rpbench -m", *asked, *self.overrides])

    @property
    def counts(self) -> Counter[str]:
        """Cells by state."""
        return Counter(cell.state for cell in self.cells)


def manifest_name(experiment: str | None, arguments: Sequence[str]) -> str:
    """The folder of a sweep: its experiment, with a digest of what else the command line says."""
    asked = asked_of(arguments)
    digest = hashlib.sha256("\0".join(asked).encode()).hexdigest()[:8]
    return "-".join(filter(None, (experiment or "sweep", digest if asked or not experiment else "")))


def asked_of(arguments: Sequence[str]) -> tuple[str, ...]:
    """The overrides of a command line that belong to the subject of a sweep, sorted."""
    return tuple(sorted(item for item in arguments if "=" in item and not _is_beside(item)))


def _is_beside(item: str) -> bool:
    return item.lstrip("+~").partition("=")[0].replace("/", ".").split(".")[0] in _BESIDES


def write_plan(results: Path, experiment: str | None, arguments: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    """Write what a sweep is going to run, and return what its workers call it: name and plan."""
    name = manifest_name(experiment, arguments)
    plan: dict[str, Any] = {
        "experiment": experiment,
        "overrides": asked_of(arguments),
        "code_version": provenance.code_version(),
        "conf_version": provenance.conf_version(),
        "git_commit": provenance.git_commit(),
        "cells": [_by_key(cell) for cell in cells],
    }
    plan_id = hashlib.sha256(json.dumps(plan, sort_keys=True).encode()).hexdigest()[:12]
    text = json.dumps({"plan": plan_id, "planned_at": provenance.now(), **plan}, indent=1)
    write_atomically(results / FOLDER / name / PLAN, text + "\n")
    return f"{name}@{plan_id}"


def _by_key(overrides: Sequence[str]) -> dict[str, str]:
    pairs = (item.lstrip("+").partition("=")[::2] for item in overrides if not _is_beside(item))
    return dict(pairs)


class Journal:
    """How one cell tells its manifest what became of it."""

    def __init__(self, folder: Path | None, plan_id: str, number: int) -> None:
        self._folder, self._plan_id, self._number = folder, plan_id, number
        self._told = False

    @classmethod
    def of_job(cls, hydra: DictConfig) -> "Journal":
        """The journal of the cell that Hydra runs."""
        name, marked, plan_id = str(hydra.job.name).rpartition("@")
        if not marked:  # a sweeper that writes no plan
            return cls.of_none()
        return cls(Path(hydra.sweep.dir) / FOLDER / name, plan_id, int(hydra.job.num))

    @classmethod
    def of_none(cls) -> "Journal":
        """The journal of a run that belongs to no sweep: it writes nothing."""
        return cls(None, "", 0)

    def ended(self, rows: Sequence[Record]) -> None:
        """The cell has left its records."""
        failed = next((row for row in rows if row["status"] == "failed"), None)
        worst = failed or next((row for row in rows if row["status"] == "ok"), rows[0])
        self._write(_STATE_OF[worst["status"]], worst.get("reason") or "", [row["run_id"] for row in rows])

    def refused(self, reason: str) -> None:
        """The cell cannot be asked for."""
        self._write(NOT_APPLICABLE, reason)

    def failed(self, reason: str) -> None:
        """The cell broke; what it left, if anything, it has told by `ended`."""
        if not self._told:
            self._write(FAILED, reason)

    def _write(self, state: str, reason: str, run_ids: Sequence[str] = ()) -> None:
        self._told = True
        if self._folder is None:
            return
        line = {"plan": self._plan_id, "cell": self._number, "state": state, "run_ids": run_ids, "reason": reason}
        path = self._folder / f"{_host()}-{os.getpid()}.jsonl"
        with path.open("a", encoding="utf-8") as journal:
            journal.write("\n" * _is_torn(path) + json.dumps(line) + "\n")


def _host() -> str:
    """A word for this host that does not tell its name."""
    return hashlib.sha256(socket.gethostname().encode()).hexdigest()[:6]


def _is_torn(path: Path) -> bool:
    """Whether the last line of a journal has no end: whoever wrote it was killed."""
    if not path.stat().st_size:
        return False
    with path.open("rb") as journal:
        journal.seek(-1, os.SEEK_END)
        return journal.read(1) != b"\n"


def read_manifest(results: Path, name: str) -> Manifest | None:
    """The manifest of that name; None if there is none.

    Raises:
        ManifestError: if its plan is torn or not what a plan is.
    """
    folder = results / FOLDER / name
    try:
        plan = json.loads((folder / PLAN).read_text(encoding="utf-8"))
        cells = [Cell(number, dict(overrides)) for number, overrides in enumerate(plan["cells"])]
        found = Manifest(
            name,
            plan["experiment"],
            tuple(plan["overrides"]),
            str(plan["code_version"]),
            str(plan["conf_version"]),
        )
        plan_id = plan["plan"]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ManifestError(
            f"{folder / PLAN}: not a readable plan ({type(error).__name__}: {error}); remove it and run the sweep again"
        ) from None
    for line in _lines(folder, plan_id):
        number = line["cell"]
        cells[number] = _settled(cells[number], line)
    return Manifest(found.name, found.experiment, found.overrides, found.code_version, found.conf_version, tuple(cells))


def manifest_names(results: Path) -> list[str]:
    """The sweeps that a folder of results knows of."""
    return sorted(path.parent.name for path in (results / FOLDER).glob(f"*/{PLAN}"))


def _lines(folder: Path, plan_id: str) -> list[dict[str, Any]]:
    """What workers of this plan have written, the oldest file first; torn lines are left out."""
    lines = []
    for path in sorted(folder.glob("*.jsonl"), key=lambda path: (path.stat().st_mtime_ns, path.name)):
        for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                line = json.loads(text)
            except ValueError:
                continue
            if isinstance(line, dict) and line.get("plan") == plan_id and line.get("state") in STATES:
                lines.append(line)
    return lines


def _settled(cell: Cell, line: Mapping[str, Any]) -> Cell:
    """A cell after one more line about it: an end that left a record outlasts one that did not."""
    if cell.state == DONE and line["state"] != DONE:
        return cell
    run_ids = tuple(map(str, line.get("run_ids") or ()))
    return Cell(cell.number, cell.overrides, line["state"], run_ids, str(line.get("reason") or ""))
