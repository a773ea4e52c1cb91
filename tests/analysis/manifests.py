"""Manifests as a sweep would leave them, for records that are already there."""

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.records.experiments import Experiments
from rpbench.records import record
from rpbench.records.manifest import Journal, write_plan
from rpbench.records.record import Record

# What a cell of a sweep sets, and the records it left.
Cells = Iterable[tuple[Mapping[str, Any], list[Record]]]


def put(folder: Path, experiment: str, cells: Cells, overrides: Sequence[str] = ()) -> Path:
    """Write the manifest of a sweep whose records are there, and return its folder; a cell without records is planned.

    Args:
        overrides: what narrows the sweep down.
    """
    kept = list(cells)
    chosen = [[f"{key}={value}" for key, value in cell.items()] for cell, _ in kept]
    plan = write_plan(folder, experiment, overrides, chosen)
    for number, (_, rows) in enumerate(kept):
        if rows:
            Journal(folder, plan, number).ended(rows)
    return plan.folder(folder)


def forge(manifest: Path, replaced: Mapping[str, str]) -> None:
    """Put other texts into the journals of a manifest, as somebody would who makes the digests of lines anew."""
    for journal in manifest.glob("*.jsonl"):
        lines = []
        for line in journal.read_text().splitlines():
            for old, new in replaced.items():
                line = line.replace(old, new)
            values = {key: value for key, value in json.loads(line).items() if key != "digest"}
            lines.append(json.dumps(record.sealed(values)) + "\n")
        journal.write_text("".join(lines))


def replaced(experiments: Experiments, experiment: str, rows: pd.DataFrame) -> Experiments:
    """The same experiments with other rows for one of them."""
    derived = ("_by_cell", "cells_there")
    known = {key: found for key, found in experiments._known.items() if key[0] not in derived}
    return dataclasses.replace(experiments, _known=known | {("cells", experiment): rows})
