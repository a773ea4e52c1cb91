"""Published numbers by the names this project uses, with their sources and printed digits."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import pandas as pd

from rpbench.cost.published import DATA, published_rows


@cache
def published(name: str) -> pd.DataFrame:
    """The table `analysis/published/<name>.csv`; do not write to it."""
    # Only an empty cell means "not stated": N/A is a word of the tables.
    options = {"dtype": {"layers_per_stage": str}, "keep_default_na": False, "na_values": [""]}
    return pd.read_csv(DATA / f"{name}.csv", **options)


# Our names of models -> the paper's, in the order of its tables.
PUBLISHED_MODELS = {
    "qwen3_1p7b": "qwen3-1.7b",
    "llama31_8b": "llama-3.1-8b",
    "gpt_oss_20b": "gpt-oss-20b",
    "qwen3_32b": "qwen3-32b",
    "qwen3_235b_lora": "qwen3-235b-lora",
}
DENSE, EXPERTS = ("qwen3_1p7b", "llama31_8b", "qwen3_32b"), ("gpt_oss_20b", "qwen3_235b_lora")
RTX4090, A800 = "8x-rtx4090-24gb", "8x-a800-80gb-sxm"  # the paper's names of machines
OUR_MODELS = {name: model for model, name in PUBLISHED_MODELS.items()}


def models_in(rows: pd.DataFrame) -> dict[str, str]:
    """Our name -> the paper's, for the models in a published table."""
    return {model: name for model, name in PUBLISHED_MODELS.items() if name in set(rows["model"])}


class Published(NamedTuple):
    """A value and its source: table and row."""

    value: Any
    source: str


def look_up(table: str, column: str, **keys: Any) -> Published:
    """One published value, None for an empty cell or a missing row.

    look_up("bubble", "makespan_ms", scheduler="gpipe", model="qwen3-1.7b")
    """
    where = f"analysis/published/{table}.csv, {column} of {', '.join(map(str, keys.values()))}"
    for row in _rows(table):
        if all(row[key] == value for key, value in keys.items()):
            if pd.isna(row[column]):
                break
            return Published(row[column], f"{where}: {row['source']}")
    return Published(None, where)


@cache
def _rows(table: str) -> list[dict[str, Any]]:
    return published(table).to_dict("records")


Row = dict[str, str]


@dataclass(frozen=True)
class AsText:
    """A value as text."""

    text: str

    @property
    def value(self) -> float | str:
        """The number, or the text if it is no number."""
        try:
            return float(self.text)
        except ValueError:
            return self.text


@dataclass(frozen=True)
class Printed(AsText):
    """A published value as printed, and its source: table, row and document."""

    source: str

    @property
    def decimals(self) -> int:
        return len(self.text.partition(".")[2])

    @property
    def half_unit(self) -> float:
        """Half a unit of the last printed digit: the largest rounding error."""
        return 0.5 * 10.0**-self.decimals


def table(name: str) -> tuple[Row, ...]:
    """The rows of `analysis/published/<name>.csv`, every cell as text."""
    return published_rows(f"{name}.csv")


def rows(name: str, **keys: str) -> Iterator[Row]:
    return (row for row in table(name) if all(row[key] == value for key, value in keys.items()))


def throughput_run(model: str) -> Row:
    of = {"system": "roundpipe", "platform": RTX4090, "model": PUBLISHED_MODELS[model]}
    return next(rows("run_settings", experiment="throughput", **of))


def printed(name: str, column: str, **keys: str) -> Printed | None:
    """A cell of a table by the values that identify its row, as of `look_up`; None if it is empty.

    LookupError if not exactly one row holds these values.
    """
    found = list(rows(name, **keys))
    if len(found) != 1:
        raise LookupError(f"{len(found)} rows of analysis/published/{name}.csv hold {keys}; exactly one has to")
    return cell(name, column, found[0], ", ".join(keys.values()))


def cell(name: str, column: str, row: Row, of: str) -> Printed | None:
    """A cell of a row; `of` names the row in its source."""
    return Printed(row[column], where(name, column, of, row["source"])) if row[column] else None


def where(name: str, column: str, of: str, source: str) -> str:
    """The source of a number: table, column and row, and the document it was transcribed from."""
    return f"analysis/published/{name}.csv, {column} of {of}: {source}"
