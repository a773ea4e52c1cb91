"""Published numbers by the names this project uses, each with the words that say where it comes from."""

from functools import cache
from typing import Any, NamedTuple

import pandas as pd

from analysis.records.published import published

# The paper's names of models, from its own tables, in their order.
PUBLISHED_MODELS = {
    "qwen3_1p7b": "qwen3-1.7b",
    "llama31_8b": "llama-3.1-8b",
    "gpt_oss_20b": "gpt-oss-20b",
    "qwen3_32b": "qwen3-32b",
    "qwen3_235b_lora": "qwen3-235b-lora",
}


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
