"""Predictions made before the measurements were seen, and their outcomes: figures 12, 13, 15 and 16.

`sealed/` has the tables as committed at `SEALED_COMMIT`, before the measurements were seen. Never write there. The
model behind the present tables was changed afterwards (`README.md` says which cells decided each change), so their
agreement is not that of a prediction.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import NamedTuple

from analysis.predictions.tables import FOLDER, read
from analysis.records.published import DENSE, EXPERTS, PUBLISHED_MODELS
from rpbench.cost.published import published_rows
from rpbench.yaml_file import read_keys

SEALED, SEALED_COMMIT = FOLDER / "sealed", "90b90aa"

_DENSE, _EXPERTS = (tuple(map(PUBLISHED_MODELS.__getitem__, models)) for models in (DENSE, EXPERTS))
# Predicted table -> measured table, predicted column, measured column, key of a row.
_TABLES = {
    "throughput": ("throughput_a800", "tokens_per_s", "tokens_per_s", ("system", "platform", "model")),
    "max_seq_len": ("max_seq_len_a800", "max_seq_len_k", "max_seq_len_published_k", ("system", "platform", "model")),
    "scaling": ("scaling", "tokens_per_s", "tokens_per_s", ("platform", "model", "num_gpus")),
    "seqlen_sensitivity": ("seqlen_sensitivity", "tokens_per_s", "tokens_per_s", ("seq_len_tokens",)),
}


@dataclass(frozen=True)
class Outcome:
    """The prediction and the measurement of a cell."""

    table: str  # `throughput`, `max_seq_len`, `scaling` or `seqlen_sensitivity`
    system: str
    model: str
    key: str  # number of devices or tokens of a sequence, where these identify the cell
    # predicted, low, high: value and interval
    predicted: float | None
    low: float | None
    high: float | None
    measured: float | None  # None if the run failed
    # said, came: predicted and measured status
    said: str
    came: str

    @property
    def error(self) -> float | None:
        """Predicted over measured less 1; None without both values."""
        return self.predicted / self.measured - 1 if self.predicted and self.measured else None

    @property
    def inside(self) -> bool | None:
        """True if the measurement lies inside the interval; None without both values."""
        if self.error is None or self.low is None or self.high is None or self.measured is None:
            return None
        return self.low <= self.measured <= self.high


def outcomes(folder: Path = SEALED) -> list[Outcome]:
    """Every withheld cell, from the tables of a folder; only the scaling cell of eight devices was known."""
    return [outcome for table in _TABLES for outcome in _of_table(folder, table)]


def _of_table(folder: Path, table: str) -> Iterable[Outcome]:
    file, ours, theirs, names = _TABLES[table]
    said = {tuple(row[name] for name in names): row for row in read(table, folder)}
    for row in published_rows(f"{file}.csv"):
        if "README" in row["source"]:  # another source of the same run
            continue
        found = said[tuple(row[name] for name in names)]
        texts = (found[ours], found[f"{ours}_low"], found[f"{ours}_high"], row[theirs])
        value, low, high, measured = (float(text) if text else None for text in texts)
        key = row.get("seq_len_tokens") or row.get("num_gpus") or ""
        status = found["status"], row["status"]
        yield Outcome(table, row["system"], row["model"], key, value, low, high, measured, *status)


class Group(NamedTuple):
    """Cells that are judged together: those of a table, some systems and some models; of all if these are empty."""

    name: str
    table: str
    systems: tuple[str, ...] = ()
    models: tuple[str, ...] = ()

    def holds(self, cell: Outcome) -> bool:
        asked = ((cell.system, self.systems), (cell.model, self.models))
        return cell.table == self.table and all(not names or name in names for name, names in asked)

    def errors(self, found: Iterable[Outcome]) -> list[float]:
        """Absolute errors of its cells in ascending order."""
        return sorted(abs(cell.error) for cell in found if cell.error is not None and self.holds(cell))


_MODELS = {"dense": _DENSE, "experts": _EXPERTS}
GROUPS = tuple(
    Group(**row | {"systems": tuple(row.get("systems", ())), "models": _MODELS.get(row.get("models"), ())})
    for row in read_keys(Path(__file__).with_suffix(".yaml"))["groups"]
)


def verdicts(found: Sequence[Outcome], table: str) -> tuple[int, int]:
    """The number of cells whose status was predicted, and of all cells of a table."""
    own = [cell for cell in found if cell.table == table]
    return sum(cell.said == cell.came for cell in own), len(own)


def coverage(found: Sequence[Outcome], tables: Sequence[str] = tuple(_TABLES)) -> tuple[int, int]:
    """The number of measurements inside their intervals, and of all with an interval."""
    inside = [cell.inside for cell in found if cell.table in tables and cell.inside is not None]
    return sum(inside), len(inside)


def text(*, only_sealed: bool = False) -> str:
    """Scores, verdicts and coverage of the sealed and the present tables; or of the sealed ones, with every cell."""
    lines = []
    for name, folder in (("sealed", SEALED),) if only_sealed else (("sealed", SEALED), ("present", FOLDER)):
        found = outcomes(folder)
        lines.append(f"{name}:")
        for group in GROUPS:
            errors = group.errors(found)
            words = f"  {group.name:28s} {len(errors):3d} cells  median {median(errors):6.1%}  "
            near = sum(error <= 0.25 for error in errors)
            lines.append(f"{words}largest {errors[-1]:6.1%}  within 25 %: {near}")
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
