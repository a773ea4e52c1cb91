"""The runs that claims stand on: named by experiment and choices, found by one look into an index."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pandas as pd

from analysis.records.runs import back_to_back, closed_forms, single_call
from rpbench import registry

Record = dict[str, Any]

CLUSTERS = ("8x_rtx4090", "8x_a800", "8x_rtx5090", "8x_h100")
HAND_CUT = "4-4-4-4-4-4-5-3"


@dataclass(frozen=True)
class Need:
    """One run of an experiment of `conf/experiment/`, by the choices its sweep makes."""

    experiment: str
    choices: tuple[str | int, ...]

    @property
    def command(self) -> str:
        """What makes the run, and the rest of its experiment."""
        return f"python -m rpbench -m experiment={self.experiment}"

    def __str__(self) -> str:
        return f"experiment={self.experiment} ({' '.join(map(str, self.choices))})"


def figure17(schedule: str, model: str) -> Need:
    """A cell of figure 17: published timings and partition, one call of 16 microbatches on 8 devices."""
    return Need("figure17", (schedule, model))


def causal(model: str) -> Need:
    """RoundPipe's cell with a fused stage that waits for its input."""
    return Need("causal", ("roundpipe", model))


def steady_state(model: str, num_microbatches: int) -> Need:
    """RoundPipe, 60 calls of this many microbatches back to back."""
    return Need("steady_state", (model, num_microbatches))


def steady_causal(model: str, num_microbatches: int) -> Need:
    """As `steady_state`, with a fused stage that waits for its input."""
    return Need("steady_causal", (model, num_microbatches))


def partitions(partition: str, schedule: str, model: str) -> Need:
    """A cell of figure 17 with a partition that is `even`, `greedy` or `search`."""
    return Need("partitions", (partition, schedule, model))


def recompute_ahead(schedule: str, model: str) -> Need:
    """A baseline on its searched partition that recomputes before the gradient arrives."""
    return Need("recompute_ahead", ("search", schedule, model))


def hand_cuts() -> Need:
    """1F1B on Llama-3.1-8B with one layer less beside the head."""
    return Need("hand_cuts", (HAND_CUT, "1f1b", "llama31_8b"))


def roofline(convention: str, cluster: str, model: str) -> Need:
    """Closed forms of a model on a cluster, FLOPs counted as `artifact` or `corrected`."""
    return Need("roofline", (convention, cluster, model))


class Runs:
    """Records by what experiments ask for; of equal runs the newest."""

    def __init__(self, records: pd.DataFrame) -> None:
        self._records = records
        self._indices: dict[str, dict[tuple[str | int, ...], Record]] = {}

    def find(self, need: Need) -> Record | None:
        """The record of a run, or None.

        Raises:
            LookupError: if no experiment of that name is known here.
        """
        if need.experiment not in self._indices:
            self._indices[need.experiment] = self._index(need.experiment)
        return self._indices[need.experiment].get(need.choices)

    def _index(self, experiment: str) -> dict[tuple[str | int, ...], Record]:
        if experiment not in _EXPERIMENTS:
            raise LookupError(f"no experiment {experiment!r} here; there are: {', '.join(_EXPERIMENTS)}")
        if self._records.empty:
            return {}
        keys, find = _EXPERIMENTS[experiment]
        found = pd.concat(find(self._records))
        ordered = found.sort_values("started_at", kind="stable").to_dict("records") if len(found) else []
        return {tuple(row[key] for key in keys): row for row in ordered}


_PLAIN = ("partition", "schedule", "model")


def _of_default_schedules(rows: pd.DataFrame) -> pd.DataFrame:
    """Runs whose schedule was asked for without options of its own."""
    if rows.empty:
        return rows
    defaults = {name: {"name": name, **entry.options} for name, entry in registry.entries().items()}
    plain = [config["schedule"] == defaults.get(config["schedule"].get("name")) for config in rows["config"]]
    return rows[plain]


def _figure17(records: pd.DataFrame) -> list[pd.DataFrame]:
    return [_of_default_schedules(single_call(records))]


def _causal(records: pd.DataFrame) -> list[pd.DataFrame]:
    return [_of_default_schedules(single_call(records, causal=True))]


def _partitions(records: pd.DataFrame) -> list[pd.DataFrame]:
    return [_of_default_schedules(single_call(records, cut)) for cut in ("even", "greedy", "search")]


def _recompute_ahead(records: pd.DataFrame) -> list[pd.DataFrame]:
    return [_of_default_schedules(single_call(records, "search", recompute_ahead=True))]


def _hand_cuts(records: pd.DataFrame) -> list[pd.DataFrame]:
    return [_of_default_schedules(single_call(records, HAND_CUT))]


def _steady_state(records: pd.DataFrame) -> list[pd.DataFrame]:
    return [back_to_back(records)]


def _steady_causal(records: pd.DataFrame) -> list[pd.DataFrame]:
    return [back_to_back(records, causal=True)]


def _roofline(records: pd.DataFrame) -> list[pd.DataFrame]:
    return [
        closed_forms(records, cluster, convention) for cluster in CLUSTERS for convention in ("artifact", "corrected")
    ]


_EXPERIMENTS: dict[str, tuple[tuple[str, ...], Callable[[pd.DataFrame], list[pd.DataFrame]]]] = {
    "figure17": (("schedule", "model"), _figure17),
    "causal": (("schedule", "model"), _causal),
    "steady_state": (("model", "num_microbatches"), _steady_state),
    "steady_causal": (("model", "num_microbatches"), _steady_causal),
    "partitions": (_PLAIN, _partitions),
    "recompute_ahead": (_PLAIN, _recompute_ahead),
    "hand_cuts": (_PLAIN, _hand_cuts),
    "roofline": (("convention", "cluster", "model"), _roofline),
}
