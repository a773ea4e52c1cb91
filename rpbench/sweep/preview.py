"""`--dry-run`: what a sweep would run, cell by cell, and what is there already. Nothing is run or written.

Of what would be run it also says whether it fits its devices, and how long it will take.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rpbench.config.composing import Composer
from rpbench.config.request import request_of
from rpbench.records import provenance, record
from rpbench.records.manifest import ENDED, FAILED, NOT_APPLICABLE, PLANNED, Manifest, read_manifest, state_of
from rpbench.run.recording import identity
from rpbench.sweep.forecast import DOES_NOT_FIT, Forecaster
from rpbench.sweep.lease import Leases

LEASED, STALE = "leased", "stale"


def preview(results: Path, name: str, cells: Sequence[Sequence[str]]) -> Iterator[dict[str, Any]]:
    """A row for each cell: its overrides, its state, its run_id, and for a stale one what has changed since it ran.

    A cell is stale if the manifest has a verdict of it that another code or configuration came to; leased while
    somebody works on it. One that would be run has a forecast (`rpbench.sweep.forecast.Forecast`).
    """
    earlier, composer, leases = read_manifest(results, name), Composer(), Leases(results)
    forecaster = Forecaster(results)
    for number, overrides in enumerate(cells):
        row: dict[str, Any] = {"cell": number, "overrides": list(overrides)}
        try:
            request = request_of(composer.compose(overrides))
            run_id = record.run_id(identity(request))
            row |= {"run_id": run_id, **_state(results, run_id, _before(earlier, number), leases)}
            yield row | (asdict(forecaster.of(request)) if row["state"] in (PLANNED, STALE, FAILED) else {})
        except ValueError as error:
            yield row | {"state": NOT_APPLICABLE, "reason": str(error)}


class Summary:
    """Cells by state, those that do not fit, and the seconds of one worker that the others will take."""

    def __init__(self) -> None:
        self._states = Counter[str]()
        self._misfits = self._unknown = self._told = 0
        self._seconds = 0.0

    @property
    def num_cells(self) -> int:
        """Cells that it has seen."""
        return self._states.total()

    def add(self, row: Mapping[str, Any]) -> None:
        """Count a cell; a million of them are not kept."""
        self._states[row["state"]] += 1
        self._misfits += row.get("memory") == DOES_NOT_FIT
        if "seconds" in row:
            self._unknown += row["seconds"] is None
            self._told += row["seconds"] is not None
            self._seconds += row["seconds"] or 0.0

    def __str__(self) -> str:
        number = self.num_cells
        states = ", ".join(f"{n} {each}" for each, n in self._states.items())
        parts = [f"{number} cell{'s' if number != 1 else ''}: {states}"]
        if self._misfits:
            parts.append(f"{self._misfits} will not fit")
        if self._told:
            parts.append(f"about {self._seconds:.2g} s of one worker")
        if self._unknown:
            parts.append(f"{self._unknown} of which nobody knows how long")
        return "; ".join(parts)


def _state(results: Path, run_id: str, changed: list[str], leases: Leases) -> dict[str, Any]:
    known = record.read(results / run_id)
    if known is not None:
        return {"state": state_of(known)}
    if leases.is_held(run_id):
        return {"state": LEASED}
    return {"state": STALE, "changed": changed} if changed else {"state": PLANNED}


def _before(earlier: Manifest | None, number: int) -> list[str]:
    """What has changed since a cell came to a verdict; nothing, if it did not or nothing has."""
    if earlier is None or number >= len(earlier.cells) or earlier.cells[number].state not in ENDED:
        return []
    now = {"code_version": provenance.code_version(), "conf_version": provenance.conf_version()}
    return [key for key, value in now.items() if getattr(earlier, key) != value] or ["surroundings"]
