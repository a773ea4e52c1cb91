"""Published numbers with the digits they were printed with, because the last digit says how exact they are."""

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from analysis.records.paper import PUBLISHED, PUBLISHED_MODELS

Row = dict[str, str]


@dataclass(frozen=True)
class Printed:
    """A published value: its text, and the table, row and document it stands in."""

    text: str
    source: str

    @property
    def value(self) -> float | str:
        """The number, or the text where it is none."""
        try:
            return float(self.text)
        except ValueError:
            return self.text

    @property
    def decimals(self) -> int:
        """Digits after the point."""
        return len(self.text.partition(".")[2])

    @property
    def half_unit(self) -> float:
        """Half a unit of the last printed digit: what rounding can take away."""
        return 0.5 * 10.0**-self.decimals


@cache
def table(name: str) -> tuple[Row, ...]:
    """The rows of a table of `analysis/published/`, every cell as text."""
    with (PUBLISHED / f"{name}.csv").open(newline="", encoding="utf-8") as lines:
        return tuple(csv.DictReader(lines))


def rows(name: str, **keys: str) -> Iterator[Row]:
    """The rows of a table that hold these values."""
    return (row for row in table(name) if all(row[key] == value for key, value in keys.items()))


def throughput_run(model: str) -> Row:
    """The settings of RoundPipe's throughput run of a model on eight RTX 4090."""
    of = {"system": "roundpipe", "platform": "8x-rtx4090-24gb", "model": PUBLISHED_MODELS[model]}
    return next(rows("run_settings", experiment="throughput", **of))


def printed(name: str, column: str, **keys: str) -> Printed | None:
    """A cell of a table, found by the values that identify its row; None where it is empty.

    printed("bubble", "makespan_ms", scheduler="gpipe", model="qwen3-1.7b")

    Raises:
        LookupError: if not exactly one row holds these values.
    """
    found = list(rows(name, **keys))
    if len(found) != 1:
        raise LookupError(f"{len(found)} rows of analysis/published/{name}.csv hold {keys}; exactly one has to")
    return cell(name, column, found[0], ", ".join(keys.values()))


def cell(name: str, column: str, row: Row, of: str) -> Printed | None:
    """A cell of a row at hand; `of` says in words which row it is."""
    if not row[column]:
        return None
    return Printed(row[column], where(name, column, of, row["source"]))


def where(name: str, column: str, of: str, source: str) -> str:
    """Where a number stands: table, column and row, and the document it was transcribed from."""
    return f"analysis/published/{name}.csv, {column} of {of}: {source}"
