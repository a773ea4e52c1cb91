"""`--dry-run`: the cells of a sweep, each with its state, whether it fits its devices, and the seconds it will take.

Nothing is run or written. Memory is counted from the actions of the schedule, as in a run. Seconds are those of making
the schedule just now, plus a pace of earlier runs in this folder: of simulations by action, of training with the same
model and backend by microbatch and step.
"""

import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from rpbench.config.choices import Simulate, Train
from rpbench.config.composing import Composer
from rpbench.config.loading import request_of
from rpbench.config.request import Request
from rpbench.records import provenance, record
from rpbench.records.manifest import ENDED, FAILED, NOT_APPLICABLE, PLANNED, Manifest, read_manifest, state_of
from rpbench.records.record import Record
from rpbench.run.recording import identity
from rpbench.run.scheduled import assembled_of, memory_of
from rpbench.sweep.lease import Leases
from rpbench.untrusted import parsed
from rpbench.whole_file import read_text

FITS, DOES_NOT_FIT, NOT_KNOWN = "fits", "does not fit", "not known"
SECONDS_PER_ACTION = 5e-6  # of a simulation, without earlier runs


@dataclass(frozen=True)
class Forecast:
    memory: str  # `fits`, `does not fit` or `not known`
    memory_reason: str
    peak_memory_bytes: int | None = None  # of the fullest device; None without a shape
    seconds: float | None = None  # None where unknown
    seconds_from: str = "no run like it is in this folder yet"


@dataclass(frozen=True)
class Forecaster:
    """Forecasts of cells whose records go to one folder."""

    results: Path

    def of(self, request: Request) -> Forecast:
        """The forecast of a request; ValueError if it is impossible."""
        if why := _why_not_made(request):
            return Forecast(NOT_KNOWN, why)
        began = time.perf_counter()
        assembled = assembled_of(request)
        needed, reason = memory_of(assembled)
        making = time.perf_counter() - began
        seconds, source = self._seconds(request, assembled.graph.num_actions, making)
        if needed is None:
            return Forecast(NOT_KNOWN, "no model, so no bytes", None, seconds, source)
        peak = max(needed)
        if reason:
            return Forecast(DOES_NOT_FIT, reason, peak, making, "it is not run")
        if (limit := request.cluster.usable_memory_bytes) is None:
            return Forecast(NOT_KNOWN, f"cluster {request.cluster.name} declares no memory", peak, seconds, source)
        return Forecast(FITS, f"{peak / 1e9:.2f} of {limit / 1e9:.2f} GB", peak, seconds, source)

    def _seconds(self, request: Request, num_actions: int, making: float) -> tuple[float | None, str]:
        if isinstance(request.mode, Simulate):
            known = self._paces[("simulate",)]
            source = "the schedule, made just now" + (f", and {len(known)} simulations here" if known else "")
            return making + num_actions * (median(each.pace for each in known) if known else SECONDS_PER_ACTION), source
        known = self._paces[("train", request.backend.name if request.backend else "None", request.model_name)]
        if not known:
            return None, Forecast.seconds_from
        work = request.num_microbatches * request.num_steps
        fixed, pace = (median(column) for column in zip(*known, strict=True))
        return making + fixed + work * pace, f"{len(known)} run{'s' * (len(known) > 1)} of {request.model_name} here"

    @cached_property
    def _paces(self) -> Mapping[tuple[str, ...], list["_Pace"]]:
        """Kind of run -> the pace of each run."""
        found: defaultdict[tuple[str, ...], list[_Pace]] = defaultdict(list)
        for row in record.read_all(self.results):
            if (seconds := _seconds_of(self.results, row)) is None:
                continue
            if row["mode"] == "simulate" and row.get("num_actions"):
                found[("simulate",)].append(_Pace(0.0, seconds / row["num_actions"]))
            elif row["mode"] == "train" and row.get("num_steps"):
                trained = row["makespan_s"] if row["evidence"] == "measured" else seconds
                pace = trained / (row["num_microbatches"] * row["num_steps"])
                found["train", str(row["backend"]), row["model"]].append(_Pace(max(0.0, seconds - trained), pace))
        return found


class _Pace(NamedTuple):
    """Seconds of a run: fixed ones, and those an action of a simulation, or a microbatch and step of training."""

    fixed: float
    pace: float


def _why_not_made(request: Request) -> str:
    """Why a dry run does not make the schedule of a cell; empty if it does."""
    if not isinstance(request.mode, Simulate | Train):
        return f"mode={request.mode.name} decides it as it runs"
    if request.meshed is not None:
        return "a mesh is laid out as it runs"
    if request.tuning_budget is not None or request.partition == "search":
        return "its plan is searched for first"
    if request.cost.name == "profiled" and request.cost.profile is None:
        return "its layers are measured first"
    return ""


def _seconds_of(results: Path, row: Record) -> float | None:
    """Seconds of a run by its events; None where unknown."""
    try:
        last: Any = parsed(read_text(results / row["run_id"] / "events.jsonl").splitlines()[-1])
        seconds = last["seconds"]
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return float(seconds) if row["status"] == "ok" and isinstance(seconds, int | float) else None


LEASED, STALE = "leased", "stale"


def preview(results: Path, name: str, cells: Sequence[Sequence[str]]) -> Iterator[dict[str, Any]]:
    """A row for each cell: its overrides, state and run_id, and a forecast if it would run.

    A cell is stale if the verdict in the manifest comes from other code or configuration, which the row names, and
    leased while another process works on it.
    """
    earlier, composer, leases = read_manifest(results, name), Composer(), Leases(results)
    forecaster = Forecaster(results)
    for number, overrides in enumerate(cells):
        row: dict[str, Any] = {"cell": number, "overrides": list(overrides)}
        try:
            request = request_of(composer.compose(overrides))
            run_id = record.run_id(identity(request))
            row |= {"run_id": run_id, **_state(results, run_id, _before(earlier, number, run_id), leases)}
            yield row | (asdict(forecaster.of(request)) if row["state"] in (PLANNED, STALE, FAILED) else {})
        except ValueError as error:
            yield row | {"state": NOT_APPLICABLE, "reason": str(error)}


class Summary:
    """Cells by state, those that do not fit, and the seconds that the others will take one worker."""

    def __init__(self) -> None:
        self._states = Counter[str]()
        self._misfits = self._unknown = self._known = 0
        self._seconds = 0.0

    @property
    def num_cells(self) -> int:
        return self._states.total()

    def add(self, row: Mapping[str, Any]) -> None:
        """Count a cell; rows are not kept, as there may be a million."""
        self._states[row["state"]] += 1
        self._misfits += row.get("memory") == DOES_NOT_FIT
        if "seconds" in row:
            self._unknown += row["seconds"] is None
            self._known += row["seconds"] is not None
            self._seconds += row["seconds"] or 0.0

    def __str__(self) -> str:
        number = self.num_cells
        states = ", ".join(f"{n} {each}" for each, n in self._states.items())
        parts = [f"{number} cell{'s' if number != 1 else ''}: {states}"]
        if self._misfits:
            parts.append(f"{self._misfits} will not fit")
        if self._known:
            parts.append(f"about {self._seconds:.2g} s of one worker")
        if self._unknown:
            parts.append(f"{self._unknown} for an unknown time")
        return "; ".join(parts)


def _state(results: Path, run_id: str, changed: list[str], leases: Leases) -> dict[str, Any]:
    known = record.read(results / run_id)
    if known is not None:
        return {"state": state_of(known)}
    if leases.is_held(run_id):
        return {"state": LEASED}
    return {"state": STALE, "changed": changed} if changed else {"state": PLANNED}


def _before(earlier: Manifest | None, number: int, run_id: str) -> list[str]:
    """What changed since a cell ended; empty for a cell that has not ended.

    Versions or `surroundings`; `record` where its run is the same, so that its record is gone or damaged.
    """
    if earlier is None or number >= len(earlier.cells) or (cell := earlier.cells[number]).state not in ENDED:
        return []
    if run_id in cell.run_ids:
        return ["record"]
    now = {"code_version": provenance.code_version(), "conf_version": provenance.conf_version()}
    return [key for key, value in now.items() if getattr(earlier, key) != value] or ["surroundings"]
