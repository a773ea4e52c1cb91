"""The runs behind exhibits: calls of figure 17, closed forms, runs of all models, whole sweeps.

Each function raises MissingRuns if one of its runs is missing.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import product
from typing import Any, TypeVar

import pandas as pd

from analysis.records.experiments import Experiments, index, succeeded
from analysis.records.published import PUBLISHED_MODELS
from rpbench.config.configuration import swept

MODELS = tuple(PUBLISHED_MODELS)
BASELINES = ("gpipe", "1f1b", "interleaved_1f1b", "looped_bfs")
SCHEDULES = (*BASELINES, "roundpipe")
ONE_ROUND = "roundpipe_call"  # RoundPipe with a whole step as one round, as in `conf/schedule/`

_Item = TypeVar("_Item")
_Key = TypeVar("_Key", bound=Hashable)


def grouped(items: Iterable[_Item], key: Callable[[_Item], _Key]) -> dict[_Key, list[_Item]]:
    """Items by their key, in the order of first occurrence."""
    found: dict[_Key, list[_Item]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return found


def models_of(rows: pd.DataFrame) -> list[str]:
    """The models in a table, in the paper's order."""
    return [model for model in MODELS if model in set(rows["model"])]


def schedules_of(rows: pd.DataFrame) -> list[str]:
    """The schedules in a table, RoundPipe last."""
    return [schedule for schedule in SCHEDULES if schedule in set(rows["schedule"])]


def calls(experiments: Experiments, partition: str = "published", schedules: Sequence[str] = SCHEDULES) -> pd.DataFrame:
    """Calls of 16 microbatches of every schedule on every model, as in figure 17 or with cuts that are not published.

    The other partitions are `even`, `greedy` and `search`.
    """
    experiment = "figure17" if partition == "published" else "partitions"
    rows = succeeded(experiments.cells_there(experiment))
    if partition != "published" and not rows.empty:
        rows = rows[rows["partition"] == partition]
    return index(rows, ("schedule", "model"), list(product(schedules, MODELS)), experiment)


def calls_there(experiments: Experiments) -> pd.DataFrame:
    """The calls of figure 17 of which a record is there, in the order of `calls`; MissingRuns without any."""
    rows, wanted = succeeded(experiments.cells_there("figure17")), list(product(SCHEDULES, MODELS))
    there = set() if rows.empty else set(zip(rows["schedule"], rows["model"], strict=True))
    return index(rows, ("schedule", "model"), [key for key in wanted if key in there] or wanted, "figure17")


def closed_forms(experiments: Experiments, cluster: str, convention: str) -> pd.DataFrame:
    """Roofline records of every model on a cluster; `convention` is how FLOPs are counted."""
    rows = succeeded(experiments.cells("roofline"))
    rows = rows if rows.empty else rows[(rows["cluster"] == cluster) & (rows["convention"] == convention)]
    return index(rows, ("model",), [(model,) for model in MODELS], "roofline")


def of_models(experiments: Experiments, experiment: str, **varied: Sequence[Any]) -> pd.DataFrame:
    """The runs of an experiment on every model with all combinations of other values.

    of_models(experiments, "steady_state", num_microbatches=(8, 10))
    """
    wanted = list(product(MODELS, *varied.values()))
    return index(succeeded(experiments.cells(experiment)), ("model", *varied), wanted, experiment)


def whole(experiments: Experiments, experiment: str, **keys: str) -> pd.DataFrame:
    """Every run of an experiment's sweep; a column's keyword is its key in the sweep.

    A column that records lack is taken from their configuration.

    whole(experiments, "hop_latency", schedule="schedule", hop="cost.hop_ms")
    """
    rows = succeeded(experiments.cells(experiment))
    for column, key in keys.items():
        if column not in rows:
            group, _, name = key.partition(".")
            rows = rows.assign(**{column: [config[group][name] for config in rows["config"]]})
    return index(rows, tuple(keys), list(product(*(swept(experiment, key) for key in keys.values()))), experiment)
