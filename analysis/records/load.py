"""Records and published numbers as tables."""

from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd

from rpbench.harness.provenance import code_version
from rpbench.harness.record import read_all

PUBLISHED = Path(__file__).parents[1] / "published"


def load_records(results: Path) -> pd.DataFrame:
    """One row per finished run under a results folder; lists and the config stay objects in their cells.

    Records that are corrupt or torn are named on stderr and left out. Of runs made with several versions of
    the code, only those of the present one are kept, or of the newest where it made none, so that no figure
    mixes programs.
    """
    rows = list(read_all(results))
    if not rows:
        return pd.DataFrame()
    kept = code_version()
    if not any(row.get("code_version") == kept for row in rows):
        kept = max(rows, key=lambda row: row["started_at"]).get("code_version", "")
    return pd.DataFrame([row for row in rows if row.get("code_version", "") == kept])


@cache
def published(name: str) -> pd.DataFrame:
    """A table of `analysis/published/`, by its file name without the ending; do not write to it."""
    # Only an empty cell means "not stated": N/A is a word of the tables.
    options = {"dtype": {"layers_per_stage": str}, "keep_default_na": False, "na_values": [""]}
    return pd.read_csv(PUBLISHED / f"{name}.csv", **options)


def select(records: pd.DataFrame, **choices: Any) -> pd.DataFrame:
    """The successful runs that made these choices; None means unset, `config__a__b` looks into the config.

    select(records, schedule="roundpipe", cost="published", config__cost__fused_ahead=False)
    """
    if records.empty:
        return records
    chosen = records["status"] == "ok"
    for key, value in choices.items():
        if key.startswith("config__"):
            path = key.split("__")[1:]
            chosen &= _equal(records["config"].map(lambda config, path=path: _look(config, path)), value)
        elif key in records.columns:
            chosen &= _equal(records[key], value)
        else:
            return records.iloc[0:0]
    return records[chosen]


def _equal(column: pd.Series, value: Any) -> pd.Series:
    return column.isna() if value is None else column == value


def _look(config: Any, path: list[str]) -> Any:
    for key in path:
        config = config.get(key) if isinstance(config, dict) else None
    return config
