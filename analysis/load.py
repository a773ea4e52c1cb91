"""Records and published numbers as tables."""

from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd

from rpbench.harness.record import read_all

PUBLISHED = Path(__file__).parent / "published"


def load_records(results: Path) -> pd.DataFrame:
    """One row per finished run under a results folder; lists and the config stay objects in their cells.

    Records that are corrupt or torn are named on stderr and left out. Of runs made with several versions of the
    code, only those of the newest are kept, so that no figure mixes programs.
    """
    rows = list(read_all(results))
    if not rows:
        return pd.DataFrame()
    newest = max(rows, key=lambda row: row["started_at"])["code_version"]
    return pd.DataFrame([row for row in rows if row["code_version"] == newest])


@cache
def published(name: str) -> pd.DataFrame:
    """A table of `analysis/published/`, by its file name without the ending; do not write to it."""
    return pd.read_csv(PUBLISHED / f"{name}.csv", dtype={"layers_per_stage": str})


def select(records: pd.DataFrame, **choices: Any) -> pd.DataFrame:
    """The successful runs that made these choices; `config__a__b` looks into the resolved config.

    select(records, schedule="roundpipe", cost="published", config__cost__fused_ahead=False)
    """
    if records.empty:
        return records
    chosen = records["status"] == "ok"
    for key, value in choices.items():
        if key.startswith("config__"):
            path = key.split("__")[1:]
            chosen &= records["config"].map(lambda config, path=path: _look(config, path)) == value
        elif key in records.columns:
            chosen &= records[key] == value
        else:
            return records.iloc[0:0]
    return records[chosen]


def _look(config: Any, path: list[str]) -> Any:
    for key in path:
        config = config.get(key) if isinstance(config, dict) else None
    return config
