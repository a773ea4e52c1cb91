"""The runs behind an exhibit: found by the choices that made them, or named as missing."""

from collections.abc import Sequence
from typing import Any

import pandas as pd

from analysis.records.load import select
from analysis.records.paper import PUBLISHED_MODELS

MODELS = tuple(PUBLISHED_MODELS)
BASELINES = ("gpipe", "1f1b", "interleaved_1f1b", "looped_bfs")
SCHEDULES = (*BASELINES, "roundpipe")
# RoundPipe with a whole step as one round, by the name of its file in `conf/schedule/`.
ONE_ROUND = "roundpipe_call"

# What all simulated experiments share: the published timings on eight devices, in the published setting.
_SIMULATED: dict[str, Any] = {
    "backend": "sim",
    "cost": "published",
    "cluster": "local",
    "workload": "synthetic",
    "num_devices": 8,
    "seed": 0,
    "config__chunks_per_device": None,
    "config__schedule_file": None,
}


# Where schedules are compared as such: equal work everywhere, whole layers, one step.
_UNIT_WORK: dict[str, Any] = {
    "backend": "sim",
    "cost": "constant",
    "cluster": "local",
    "workload": "synthetic",
    "dispatch": "round_robin",
    "num_steps": 1,
    "seed": 0,
    "config__chunks_per_device": None,
    "config__schedule_file": None,
    "config__cost__forward_ms": 1,
    "config__cost__input_grad_ms": 1,
    "config__cost__weight_grad_ms": 1,
    "config__cost__overlap_gain": 0,
    "config__cost__recompute_ahead": None,
}


class MissingRuns(LookupError):
    """Records that an exhibit needs and that are not there."""


def single_call(
    records: pd.DataFrame,
    partition: str = "published",
    *,
    causal: bool = False,
    recompute_ahead: bool | None = None,
    dispatch: str = "round_robin",
) -> pd.DataFrame:
    """One call of 16 microbatches, as in figure 17.

    Args:
        causal: the forward of RoundPipe's fused stage waits for its input.
        dispatch: how RoundPipe's stages find their devices.
        recompute_ahead: may recomputation begin before the gradient arrives? None: as the schedule does.
    """
    return select(
        records,
        **_SIMULATED,
        partition=partition,
        dispatch=dispatch,
        **({"config__schedule__round_size": None} if dispatch == "round_robin" else {}),
        num_steps=1,
        num_microbatches=16,
        config__cost__fused_ahead=not causal,
        config__cost__recompute_ahead=recompute_ahead,
    )


def with_halves(records: pd.DataFrame) -> pd.DataFrame:
    """Searched cuts on the published layer times, backward split; everybody recomputes ahead, inputs are waited for."""
    found = select(
        records,
        **_SIMULATED,
        partition="search",
        dispatch="round_robin",
        num_microbatches=16,
        config__cost__fused_ahead=False,
        config__cost__recompute_ahead=True,
        config__cost__split_backward=True,
    )
    return _by_round(found)


def one_round(records: pd.DataFrame) -> pd.DataFrame:
    """RoundPipe with all 16 microbatches in one round, on the published layer times and cuts searched for that."""
    return select(
        records,
        **_SIMULATED,
        schedule="roundpipe",
        partition="search",
        dispatch="round_robin",
        num_steps=1,
        num_microbatches=16,
        config__schedule__round_size=16,
        config__cost__fused_ahead=True,
        config__cost__recompute_ahead=None,
        config__cost__split_backward=False,
    )


def back_to_back(records: pd.DataFrame, *, causal: bool = False) -> pd.DataFrame:
    """RoundPipe, 60 calls one after another with the rotation carried on; a call is one round."""
    rows = select(
        records,
        **_SIMULATED,
        schedule="roundpipe",
        partition="published",
        dispatch="round_robin",
        num_steps=60,
        config__schedule__asynchronous=True,
        config__cost__fused_ahead=not causal,
        config__cost__recompute_ahead=None,
    )
    return rows[_is_one_round(rows)]


def unit_work(records: pd.DataFrame, **choices: Any) -> pd.DataFrame:
    """Runs in which forward, input gradient and weight gradient of a device's share take a millisecond each.

    Unless `choices` say otherwise, the model is nothing but equal layers, cut evenly and kept in memory.
    """
    usual: dict[str, Any] = {"model": "abstract", "partition": "even"}
    usual |= {"config__cost__recompute_ms": 0, "config__cost__head_share": 0}
    return _by_round(select(records, **_UNIT_WORK, **(usual | choices)))


def _by_round(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows with RoundPipe under two names, told by the size of its rounds."""
    return rows if rows.empty else rows.assign(schedule=rows["schedule"].mask(_is_one_round(rows), ONE_ROUND))


def _is_one_round(rows: pd.DataFrame) -> list[bool]:
    return [row.config["schedule"].get("round_size") == row.num_microbatches for row in rows.itertuples()]


def closed_forms(records: pd.DataFrame, cluster: str, convention: str) -> pd.DataFrame:
    """Roofline records of a cluster, by how FLOPs are counted."""
    return select(
        records,
        backend="roofline",
        cluster=cluster,
        convention=convention,
        num_devices=8,
        num_microbatches=16,
    )


def index(rows: pd.DataFrame, keys: Sequence[str], wanted: Sequence[tuple[Any, ...]], experiment: str) -> pd.DataFrame:
    """The rows by `keys`, in the order of `wanted`; of equal runs the newest.

    Raises:
        MissingRuns: if one is not there; it names the experiment that makes it.
    """
    found = {} if rows.empty else {_key(row, keys): number for number, row in _by_age(rows, keys)}
    missing = [key for key in wanted if key not in found]
    if missing:
        some = ", ".join(" ".join(map(str, key)) for key in missing[:3])
        raise MissingRuns(
            f"{len(missing)} of {len(wanted)} runs of experiment={experiment}: "
            f"{some}{' ...' if len(missing) > 3 else ''}"
        )
    return rows.loc[[found[key] for key in wanted]]


def _by_age(rows: pd.DataFrame, keys: Sequence[str]) -> list[tuple[Any, dict[str, Any]]]:
    ordered = rows.sort_values("started_at", kind="stable")
    return list(zip(ordered.index, ordered[list(keys)].to_dict("records"), strict=True))


def _key(row: dict[str, Any], keys: Sequence[str]) -> tuple[Any, ...]:
    return tuple(row[key] for key in keys)
