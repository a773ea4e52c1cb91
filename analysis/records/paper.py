"""Published numbers by the names this project uses, each with the words that say where it comes from."""

from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

PUBLISHED = Path(__file__).parents[1] / "published"


@cache
def published(name: str) -> pd.DataFrame:
    """A table of `analysis/published/`, by its file name without the ending; do not write to it."""
    # Only an empty cell means "not stated": N/A is a word of the tables.
    options = {"dtype": {"layers_per_stage": str}, "keep_default_na": False, "na_values": [""]}
    return pd.read_csv(PUBLISHED / f"{name}.csv", **options)


# The paper's names of models, from its own tables, in their order.
PUBLISHED_MODELS = {
    "qwen3_1p7b": "qwen3-1.7b",
    "llama31_8b": "llama-3.1-8b",
    "gpt_oss_20b": "gpt-oss-20b",
    "qwen3_32b": "qwen3-32b",
    "qwen3_235b_lora": "qwen3-235b-lora",
}
OUR_MODELS = {name: model for model, name in PUBLISHED_MODELS.items()}


def models_in(rows: pd.DataFrame) -> dict[str, str]:
    """The paper's names of the models that a published table has rows of, by ours."""
    return {model: name for model, name in PUBLISHED_MODELS.items() if name in set(rows["model"])}


class Published(NamedTuple):
    """A value and its source: table and row."""

    value: Any
    source: str


def look_up(table: str, column: str, **keys: Any) -> Published:
    """One published value; its value is None where the cell is empty or there is no such row.

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
