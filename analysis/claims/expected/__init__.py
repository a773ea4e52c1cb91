"""Expected values of contradictions and of our own statements, with tolerances.

`python -m analysis.driver.accept` writes the tables beside this file from a folder of results; their changes are
reviewed line by line.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from analysis.predictions import tables
from analysis.records.published import AsText

FOLDER = Path(__file__).parent
CONTRADICTIONS = "contradictions"
STATEMENTS = "statements"
BECAUSE = "because.jsonl"  # why values were accepted: date, commit, reason, and how many of each table


@dataclass(frozen=True)
class Expected(AsText):
    """A declared value with its tolerance."""

    tolerance: float


def expected(claim_id: str) -> Expected | None:
    """The declared value of a contradiction, if there is one."""
    return _declared(CONTRADICTIONS).get(claim_id)


def statement(claim_id: str) -> Expected:
    """The declared value of one of our own statements with its printed digits, or `undeclared`."""
    return _declared(STATEMENTS).get(claim_id, Expected("undeclared", 0.0))


@cache
def _declared(name: str) -> Mapping[str, Expected]:
    return {row["claim"]: Expected(row["value"], float(row["tolerance"] or 0)) for row in read_table(name)}


def held_experiments() -> list[str]:
    """The experiments that have a table, by name."""
    return sorted({path.stem for path in FOLDER.glob("*.csv")} - {CONTRADICTIONS, STATEMENTS})


def read_table(name: str) -> tuple[dict[str, str], ...]:
    """The rows of an expected table, every cell as text; none where there is no such table."""
    return tuple(tables.read(name, FOLDER)) if (FOLDER / f"{name}.csv").exists() else ()
