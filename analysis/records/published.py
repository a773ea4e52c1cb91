"""Published numbers as tables."""

from functools import cache
from pathlib import Path

import pandas as pd

PUBLISHED = Path(__file__).parents[1] / "published"


@cache
def published(name: str) -> pd.DataFrame:
    """A table of `analysis/published/`, by its file name without the ending; do not write to it."""
    # Only an empty cell means "not stated": N/A is a word of the tables.
    options = {"dtype": {"layers_per_stage": str}, "keep_default_na": False, "na_values": [""]}
    return pd.read_csv(PUBLISHED / f"{name}.csv", **options)
