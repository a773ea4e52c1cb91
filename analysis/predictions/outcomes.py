"""Predictions made before the measurements were seen, and their outcomes: figures 12, 13, 15 and 16.

    python -m analysis.predictions outcomes            the sealed tables, and the present ones
    python -m analysis.predictions outcomes --sealed   the sealed tables alone, every cell

`sealed/` holds the tables as they were committed before the measurements were seen, at `SEALED_COMMIT`. Never write
there. The present tables come from a model that has been changed in sight of them: `README.md` says on which cells
each change was decided; their agreement is not that of a prediction.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import NamedTuple

from analysis.predictions.tables import FOLDER, Row, read
from analysis.records.published import DENSE, EXPERTS, PUBLISHED_MODELS
from rpbench.cost.published import published_rows
from rpbench.yaml_file import read_keys

SEALED, SEALED_COMMIT = FOLDER / "sealed", "90b90aa"

_DENSE, _EXPERTS = (tuple(map(PUBLISHED_MODELS.__getitem__, models)) for models in (DENSE, EXPERTS))
# Table of the prediction, table of the measurement, column predicted, column measured, what identifies a row.
_TABLES = {
    "throughput": ("throughput_a800", "tokens_per_s", "tokens_per_s", ("system", "platform", "model")),
    "max_seq_len": ("max_seq_len_a800", "max_seq_len_k", "max_seq_len_published_k", ("system", "platform", "model")),
    "scaling": ("scaling", "tokens_per_s", "tokens_per_s", ("platform", "model", "num_gpus")),
    "seqlen_sensitivity": ("seqlen_sensitivity", "tokens_per_s", "tokens_per_s", ("seq_len_tokens",)),
}


@dataclass(frozen=True)
class Outcome:
    """A cell that was withheld: its prediction and its measurement.

    Args:
        table: `throughput`, `max_seq_len`, `scaling` or `seqlen_sensitivity`.
        key: what identifies the cell there besides system and model: devices, or tokens of a sequence.
        predicted, low, high: value and interval; None without a value.
        measured: None where the run failed.
        said, came: status predicted and status measured.
    """

    table: str
    system: str
    model: str
    key: str
    predicted: float | None
    low: float | None
    high: float | None
    measured: float | None
    said: str
    came: str

    @property
    def error(self) -> float | None:
        """Predicted over measured less 1; None where one has no value."""
        return self.predicted / self.measured - 1 if self.predicted and self.measured else None

    @property
    def inside(self) -> bool | None:
        """True if the measurement lies inside the interval; None where one has no value."""
        if self.error is None or self.low is None or self.high is None or self.measured is None:
            return None
        return self.low <= self.measured <= self.high


def outcomes(folder: Path = SEALED) -> list[Outcome]:
    """Every cell that was withheld, from the tables of a folder; the scaling cell of eight devices was known."""
    return [outcome for table in _TABLES for outcome in _of_table(folder, table)]


def _of_table(folder: Path, table: str) -> Iterable[Outcome]:
    file, ours, theirs, names = _TABLES[table]
    said = {tuple(row[name] for name in names): row for row in read(table, folder)}
    for row in published_rows(f"{file}.csv"):
        if "README" in row["source"]:  # the same run reported once more elsewhere
            continue
        found = said[tuple(row[name] for name in names)]
        yield Outcome(
            table,
            row["system"],
            row["model"],
            row.get("seq_len_tokens") or row.get("num_gpus") or "",
            _number(found[ours]),
            _number(found[f"{ours}_low"]),
            _number(found[f"{ours}_high"]),
            _number(row[theirs]),
            found["status"],
            row["status"],
        )


def _number(text: str) -> float | None:
    return float(text) if text else None


# --- the score -----------------------------------------------------------------------------------------------


class Group(NamedTuple):
    """Cells that are judged together: those of a table, of some systems and of some models; of all if empty."""

    name: str
    table: str
    systems: tuple[str, ...] = ()
    models: tuple[str, ...] = ()

    def holds(self, cell: Outcome) -> bool:
        """True if a cell belongs to it."""
        asked = ((cell.system, self.systems), (cell.model, self.models))
        return cell.table == self.table and all(not names or name in names for name, names in asked)

    def errors(self, found: Iterable[Outcome]) -> list[float]:
        """Sizes of the errors of its cells, the smallest first."""
        return sorted(abs(cell.error) for cell in found if cell.error is not None and self.holds(cell))


_MODELS = {"dense": _DENSE, "experts": _EXPERTS}
GROUPS = tuple(
    Group(**row | {"systems": tuple(row.get("systems", ())), "models": _MODELS.get(row.get("models"), ())})
    for row in read_keys(Path(__file__).with_suffix(".yaml"))["groups"]
)


def score(found: Sequence[Outcome]) -> list[Row]:
    """A row a group: cells, median and largest error, share within a quarter."""
    return [
        {
            "cells": group.name,
            "count": len(errors),
            "median_error": f"{median(errors):.3f}",
            "largest_error": f"{errors[-1]:.3f}",
            "within_a_quarter": sum(error <= 0.25 for error in errors),
        }
        for group in GROUPS
        for errors in [group.errors(found)]
    ]


def verdicts(found: Sequence[Outcome], table: str) -> tuple[int, int]:
    """Cells whose status was predicted, and all."""
    own = [cell for cell in found if cell.table == table]
    return sum(cell.said == cell.came for cell in own), len(own)


def coverage(found: Sequence[Outcome], tables: Sequence[str] = tuple(_TABLES)) -> tuple[int, int]:
    """Measurements inside their intervals, and all that have one."""
    inside = [cell.inside for cell in found if cell.table in tables and cell.inside is not None]
    return sum(inside), len(inside)


def text(*, only_sealed: bool = False) -> str:
    """The score of the sealed and of the present tables, verdicts and coverage; of the sealed alone, every cell."""
    lines = []
    for name, folder in (("sealed", SEALED),) if only_sealed else (("sealed", SEALED), ("present", FOLDER)):
        found = outcomes(folder)
        lines.append(f"{name}:")
        for row in score(found):
            words = f"  {row['cells']:28s} {row['count']:3d} cells  median {float(row['median_error']):6.1%}  "
            lines.append(f"{words}largest {float(row['largest_error']):6.1%}  within 25 %: {row['within_a_quarter']}")
        right = {table: verdicts(found, table) for table in ("throughput", "max_seq_len")}
        lines += [f"  verdicts of {table}: {met} of {asked}" for table, (met, asked) in right.items()]
        inside = {table: coverage(found, (table,)) for table in _TABLES}
        lines += [f"  inside the interval, {table}: {met} of {asked}" for table, (met, asked) in inside.items()]
        lines += map(_cell, found if only_sealed else ())
    return "\n".join(lines)


def _cell(cell: Outcome) -> str:
    off = "" if cell.error is None else f"{cell.error:+.1%} {'inside' if cell.inside else 'OUTSIDE'}"
    wrong = "" if cell.said == cell.came else f"said {cell.said}, came {cell.came}"
    return f"  {cell.table:18s} {cell.system:14s} {cell.model:16s} {cell.key:>5s}  {off} {wrong}"
