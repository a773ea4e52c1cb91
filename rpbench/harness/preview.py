"""`--dry-run`: what a sweep would run, cell by cell, and what is there already. Nothing is run or written."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rpbench.harness import provenance, record
from rpbench.harness.composing import Composer
from rpbench.harness.lease import Leases
from rpbench.harness.manifest import ENDED, NOT_APPLICABLE, PLANNED, Manifest, read_manifest, state_of
from rpbench.harness.recording import identity
from rpbench.harness.request import request_of

LEASED, STALE = "leased", "stale"


def preview(results: Path, name: str, cells: Sequence[Sequence[str]]) -> Iterator[dict[str, Any]]:
    """A row for each cell: its overrides, its state, its run_id, and for a stale one what has changed since it ran.

    A cell is stale if the manifest has a verdict of it that another code or configuration came to; leased while
    somebody works on it.
    """
    earlier, composer, leases = read_manifest(results, name), Composer(), Leases(results)
    for number, overrides in enumerate(cells):
        row: dict[str, Any] = {"cell": number, "overrides": list(overrides)}
        try:
            run_id = record.run_id(identity(request_of(composer.compose(overrides))))
        except ValueError as error:
            yield row | {"state": NOT_APPLICABLE, "reason": str(error)}
            continue
        yield row | {"run_id": run_id, **_state(results, run_id, _before(earlier, number), leases)}


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
