"""Predictions beside the published 4090 figures, cell by cell."""

from dataclasses import dataclass, replace
from math import log

from analysis.predictions.cases import PLATFORMS, case_of, declared_basis
from analysis.records.paper import PUBLISHED_MODELS
from rpbench.cost.basis import Basis
from rpbench.cost.published import published_rows
from rpbench.predict import SYSTEMS, Prediction, predict
from rpbench.predict.lengths import STEP_TOKENS, longest_sequence

# The machine whose measurements are known.
KNOWN = "8x_rtx4090"


@dataclass(frozen=True)
class Cell:
    """A cell of a published table by system and model."""

    table: str  # throughput or max_seq_len
    system: str
    model: str

    @property
    def key(self) -> str:
        """As `cells` of a declaration names it."""
        return f"{self.table}/{self.system}/{PLATFORMS[KNOWN]}/{PUBLISHED_MODELS[self.model]}"


def cell_of(key: str) -> Cell:
    """The cell that a declaration names."""
    table, system, _, published = key.split("/")
    return Cell(table, system, next(name for name, known in PUBLISHED_MODELS.items() if known == published))


def published_value(cell: Cell) -> tuple[str, float | None]:
    """Status and value of a published cell: tokens per second, or 1,024 tokens."""
    column = "tokens_per_s" if cell.table == "throughput" else "max_seq_len_published_k"
    for row in published_rows(f"{cell.table}.csv"):
        if (row["system"], row["platform"], row["model"]) == (
            cell.system,
            PLATFORMS[KNOWN],
            PUBLISHED_MODELS[cell.model],
        ):
            return row["status"], float(row[column]) if row[column] else None
    return "not stated", None


def predicted(cell: Cell, basis: Basis | None = None, *, with_interval: bool = False) -> Prediction:
    """The prediction of a cell's throughput run."""
    return predict(case_of(cell.system, KNOWN, cell.model, basis=basis), with_interval=with_interval)


def error(cell: Cell, basis: Basis | None = None) -> float | None:
    """Predicted over published, less 1; None where one of them has no value."""
    _, known = published_value(cell)
    if known is None:
        return None
    if cell.table == "max_seq_len":
        found: float | None = longest_sequence(case_of(cell.system, KNOWN, cell.model, basis=basis)) / STEP_TOKENS
    else:
        found = predicted(cell, basis).tokens_per_s
    return found / known - 1 if found else None


def log_error(cell: Cell, basis: Basis) -> float:
    """Logarithm of predicted over published, as fits minimise it.

    Raises:
        ValueError: for a cell that has no value on either side.
    """
    off = error(cell, basis)
    if off is None:
        raise ValueError(f"{cell.key} has no value on one side: it cannot be fitted on")
    return log(1 + off)


def with_values(basis: Basis, values: dict[str, float]) -> Basis:
    """The same constants with some set anew."""
    return replace(basis, values={**basis.values, **values}, read=set())


def throughput_cells() -> list[Cell]:
    """Every cell of figure 10, in its order."""
    return [Cell("throughput", system, model) for system in SYSTEMS for model in PUBLISHED_MODELS]


def length_cells() -> list[Cell]:
    """Every cell of figure 11, in its order."""
    return [
        Cell("max_seq_len", system, model)
        for system in SYSTEMS
        if system != "roundpipe-sync"
        for model in PUBLISHED_MODELS
    ]


def declared() -> Basis:
    """The declared constants on the known machine."""
    return declared_basis(KNOWN)
