"""Rows: the records of a folder as the page takes them, read again only where a file changed."""

import csv
import io
import re
from itertools import islice
from math import isfinite
from pathlib import Path
from typing import Any

from rpbench.records import record
from rpbench.records.clock import under_unit, unit
from rpbench.run.recording import TIMELINE

SHOWN = (
    "run_id",
    "schedule",
    "model",
    "cluster",
    "workload",
    "cost",
    "mode",
    "backend",
    "experiment",
    "contender",
    "num_devices",
    "num_microbatches",
    "seed",
    "status",
    "reason",
    "evidence",
    "tokens_per_s",
    "step_time_s",
    "makespan_s",
    "bubble_makespan",
    "loss",
)
_RUN_ID = re.compile(r"[0-9a-f]{16}")
_MOST_SPANS = 20_000


class Rows:
    """The records of a results folder.

    Args:
        results: the folder; it may be written to while this reads.
    """

    def __init__(self, results: Path) -> None:
        self._results = results
        self._known: dict[str, tuple[int, dict[str, Any] | None]] = {}

    def read(self) -> list[dict[str, Any]]:
        """A row for each sound record, by name; what is torn or not a record is left out."""
        found = {}
        for path in sorted(self._results.glob("*/record.json")):
            name = path.parent.name
            try:
                stamp = path.stat().st_mtime_ns
            except OSError:
                continue
            known = self._known.get(name)
            found[name] = known if known and known[0] == stamp else (stamp, _row(path.parent))
        self._known = found
        return [row for _, row in found.values() if row is not None]

    @property
    def stamps(self) -> dict[str, float]:
        """When each record was written, in seconds of the system's clock, by its name."""
        return {name: stamp / 1e9 for name, (stamp, _) in self._known.items()}

    def record(self, run_id: str) -> dict[str, Any] | None:
        """A record as it stands in its file; None where there is no sound one."""
        if not _RUN_ID.fullmatch(run_id):
            return None
        try:
            return record.read(self._results / run_id)
        except RecursionError:
            return None

    def curve(self, run_id: str) -> list[list[Any]]:
        """Loss of each batch and the second when its last gradient was back; empty where the run kept none."""
        found = self.record(run_id) or {}
        losses, seconds = found.get("loss_curve"), found.get("loss_curve_s")
        if not (isinstance(losses, list) and isinstance(seconds, list) and len(losses) == len(seconds)):
            return []
        points = [[step, loss, second] for step, (loss, second) in enumerate(zip(losses, seconds, strict=True))]
        return [point for point in points if all(map(_is_number, point))]

    def timeline(self, run_id: str) -> list[list[Any]] | None:
        """Device, lane, action, start and end in seconds of each action; None where none was kept, or another."""
        if not _RUN_ID.fullmatch(run_id):
            return None
        folder = self._results / run_id
        found = record.read(folder)
        text = None if found is None else record.kept_file(folder, found, TIMELINE)
        if text is None:
            return None
        try:
            return [_span(row) for row in islice(csv.DictReader(io.StringIO(text)), _MOST_SPANS)]
        except (ValueError, KeyError, TypeError, csv.Error):
            return None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)


def _span(row: dict[str, str]) -> list[Any]:
    start, end = float(row["start_s"]), float(row["end_s"])
    if not (isfinite(start) and isfinite(end)):
        raise ValueError("a time that is no number")
    return [int(row["device"]), row["lane"], row["action"], start, end]


def _row(folder: Path) -> dict[str, Any] | None:
    try:
        found = record.read(folder)
    except RecursionError:
        return None
    if found is None:
        return None
    row = {under_unit(found, key): found.get(key) for key in SHOWN}
    for key in ("peak_memory_bytes", "peak_in_flight"):  # of the fullest device
        values = found.get(key)
        row[key] = max(filter(_is_number, values), default=None) if isinstance(values, list) else None
    row["times_in"] = unit(found)
    row["has_curve"] = isinstance(found.get("loss_curve"), list)
    row["command"] = " ".join(["python -m rpbench", *map(str, found.get("overrides") or ())])
    row["has_timeline"] = (folder / TIMELINE).exists()
    return row
