"""Mirror: a run at the tracker its configuration asks for, from its first step to its verdict.

What a tracker does can cost a warning, never the run. A run that has arrived is marked in its folder by `mirror.json`,
so that a sweep that is started again does not send it twice.
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rpbench.config.request import Request
from rpbench.ir.timeline import Timeline
from rpbench.records.describe import clock
from rpbench.records.record import Record, write_atomically
from rpbench.strict_json import parsed
from rpbench.tracking.metrics import Listener, Row, in_slots
from rpbench.whole_file import read_text

MARK = "mirror.json"


class Mirror:
    """A run at no tracker."""

    step: Listener | None = None

    def end(self, row: Record, timeline: Timeline | None) -> None:
        """The run has its record."""

    def abandon(self) -> None:
        """The run was cut off."""


class WandbMirror(Mirror):
    """A run at W&B. After the first thing that fails there, nothing more is sent."""

    def __init__(self, request: Request, opening: Mapping[str, Any]) -> None:
        from rpbench.tracking import wandb_run

        self._folder = request.results_dir / opening["run_id"]
        self._attempt = int(_mark(self._folder).get("attempt", 0)) + 1
        write_atomically(self._folder / MARK, json.dumps({"attempt": self._attempt, "arrived": False}) + "\n")
        self._wandb = wandb_run
        expected = "simulated" if opening["backend"] == "virtual" else None
        self._in_slots = clock({"cost": opening["cost"], "evidence": expected}) == "slots"
        self._run: Any = None
        self._guarded(lambda: setattr(self, "_run", wandb_run.start(request, opening, self._attempt)))
        self.step = self._step

    def _step(self, row: Row) -> None:
        if self._run is not None:
            told = in_slots(row) if self._in_slots else row
            self._guarded(lambda: self._run.log(told))

    def end(self, row: Record, timeline: Timeline | None) -> None:
        if self._run is None:
            return
        self._guarded(lambda: self._wandb.finish(self._run, row, timeline, self._folder))
        if self._run is not None:
            mark = {"attempt": self._attempt, "arrived": True, "id": self._run.id}
            write_atomically(self._folder / MARK, json.dumps(mark) + "\n")

    def abandon(self) -> None:
        if self._run is not None:
            self._guarded(lambda: self._run.finish(exit_code=130))

    def _guarded(self, do: Any) -> None:
        try:
            do()
        except Exception as error:  # whatever a tracker does, the record is safe and the sweep goes on
            self._run = None
            what = f"{type(error).__name__}: {error}"
            print(f"rpbench: the record is kept, but wandb failed: {what}", file=sys.stderr)


def begun(request: Request, opening: Mapping[str, Any]) -> Mirror:
    """The mirror of a run that begins."""
    return Mirror() if request.tracker.name == "none" else WandbMirror(request, opening)


def mirror(request: Request, row: Record, timeline: Timeline | None) -> None:
    """Send a record that is already there, unless it has arrived before."""
    if request.tracker.name != "none" and not _mark(request.results_dir / row["run_id"]).get("arrived"):
        begun(request, row).end(row, timeline)


def _mark(folder: Path) -> dict[str, Any]:
    try:
        found = parsed(read_text(folder / MARK))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
