"""The runs behind exhibits, whole or not at all (MissingRuns): calls of figure 17, closed forms, models, sweeps."""

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
# RoundPipe with a whole step as one round, by the name of its file in `conf/schedule/`.
ONE_ROUND = "roundpipe_call"

_Item = TypeVar("_Item")
_Key = TypeVar("_Key", bound=Hashable)


def grouped(items: Iterable[_Item], key: Callable[[_Item], _Key]) -> dict[_Key, list[_Item]]:
    """Items by what a key says of each, in the order of their first ones."""
    found: dict[_Key, list[_Item]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return found


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


def calls(experiments: Experiments, partition: str = "published", schedules: Sequence[str] = SCHEDULES) -> pd.DataFrame:
    """`single_call` of every schedule on every model, in this order."""
    experiment = "figure17" if partition == "published" else "partitions"
    wanted = list(product(schedules, MODELS))
    return index(single_call(experiments, partition), ("schedule", "model"), wanted, experiment)


def closed_forms(experiments: Experiments, cluster: str, convention: str) -> pd.DataFrame:
    """Roofline records of a cluster, a model each, by how FLOPs are counted."""
    rows = succeeded(experiments.cells("roofline"))
    rows = rows if rows.empty else rows[(rows["cluster"] == cluster) & (rows["convention"] == convention)]
    return index(rows, ("model",), [(model,) for model in MODELS], "roofline")


def of_models(experiments: Experiments, experiment: str, **varied: Sequence[Any]) -> pd.DataFrame:
    """The runs of an experiment on every model, with every value of what is varied besides.

    of_models(experiments, "steady_state", num_microbatches=(8, 10))
    """
    wanted = list(product(MODELS, *varied.values()))
    return index(succeeded(experiments.cells(experiment)), ("model", *varied), wanted, experiment)


def whole(experiments: Experiments, experiment: str, **keys: str) -> pd.DataFrame:
    """Every run that the sweep of an experiment asks for, by columns and the keys of its sweep that they stand for.

    A column that records lack is read off their configuration.

    whole(experiments, "hop_latency", schedule="schedule", hop="cost.hop_ms")
    """
    rows = succeeded(experiments.cells(experiment))
    for column, key in keys.items():
        if column not in rows:
            group, _, name = key.partition(".")
            rows = rows.assign(**{column: [config[group][name] for config in rows["config"]]})
    return index(rows, tuple(keys), list(product(*(swept(experiment, key) for key in keys.values()))), experiment)
