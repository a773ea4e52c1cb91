"""The runs that several exhibits share: one step of figure 17 by its cut, and closed forms by their count."""

import pandas as pd

from analysis.records.experiments import Experiments, succeeded
from analysis.records.paper import PUBLISHED_MODELS

MODELS = tuple(PUBLISHED_MODELS)
BASELINES = ("gpipe", "1f1b", "interleaved_1f1b", "looped_bfs")
SCHEDULES = (*BASELINES, "roundpipe")
# RoundPipe with a whole step as one round, by the name of its file in `conf/schedule/`.
ONE_ROUND = "roundpipe_call"


def models_of(rows: pd.DataFrame) -> list[str]:
    """The models that a table has rows of, in the paper's order."""
    return [model for model in MODELS if model in set(rows["model"])]


def schedules_of(rows: pd.DataFrame) -> list[str]:
    """The schedules that a table has rows of, RoundPipe last."""
    return [schedule for schedule in SCHEDULES if schedule in set(rows["schedule"])]


def single_call(experiments: Experiments, partition: str = "published") -> pd.DataFrame:
    """One call of 16 microbatches, as in figure 17, with its cuts: published, even, greedy or searched."""
    if partition == "published":
        return succeeded(experiments.cells("figure17"))
    rows = succeeded(experiments.cells("partitions"))
    return rows if rows.empty else rows[rows["partition"] == partition]


def closed_forms(experiments: Experiments, cluster: str, convention: str) -> pd.DataFrame:
    """Roofline records of a cluster, by how FLOPs are counted."""
    rows = succeeded(experiments.cells("roofline"))
    return rows if rows.empty else rows[(rows["cluster"] == cluster) & (rows["convention"] == convention)]
