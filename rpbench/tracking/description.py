"""Description: what a tracked run is called, and its record as configuration and summary."""

from collections.abc import Mapping
from typing import Any

from hydra.core.hydra_config import HydraConfig

from rpbench.config.request import Request
from rpbench.records.clock import under_unit
from rpbench.records.record import Record
from rpbench.tracking.metrics import units

_NOT_METRICS = ("seed", "num_devices", "num_microbatches", "num_steps", "num_stages", "num_backward_stages")
_CURVES = ("loss_curve", "loss_curve_s")
_CONFIGURED = ("run_id", "mode", "backend", "experiment", "code_version", "git_commit", "partition_layers")


def name_of(row: Mapping[str, Any]) -> str:
    """A name to read, with enough of the run's id that two runs never share one."""
    where = row["backend"] or row["mode"]
    who = row.get("contender") or row["schedule"]
    return f"{who} {row['model']} {row['num_devices']}x{row['num_microbatches']} {where} {row['run_id'][:10]}"


def group_of(request: Request) -> str:
    """What runs are gathered under: as asked, or the sweep's manifest, or the experiment, or model and cost."""
    if request.tracker.group:
        return request.tracker.group
    manifest = HydraConfig.get().job.name.rpartition("@")[0] if HydraConfig.initialized() else ""
    return manifest or request.choices.get("experiment") or f"{request.model_name}-{request.cost.name}"


def config_of(request: Request, row: Mapping[str, Any]) -> dict[str, Any]:
    """The whole resolved configuration, nested; how it was asked for; and the unit of each metric."""
    return {
        **request.subject,
        "choices": dict(request.choices),
        "overrides": list(request.overrides),
        "work": work_of(request),
        "run": {key: row.get(key) for key in _CONFIGURED},
        "units": units(),
    }


def work_of(request: Request) -> str:
    """What a run has to do, in a line: runs with the same line may be compared; schedules are no part of it."""
    tokens = request.tokens_per_step
    amount = f"{tokens:,} tokens a step" if tokens else f"{request.asked_microbatches} microbatches"
    sizes = f"{request.num_devices} devices, {amount}, {request.num_steps} steps"
    where = request.backend.name if request.backend is not None else "simulated"
    return f"{request.model_name}, {sizes}, {request.cluster.name}, cost {_cost_of(request)}, {where}"


def _cost_of(request: Request) -> str:
    """The costs by name; with their times, where those are the request's own."""
    given = {key: value for key, value in vars(request.cost).items() if key.endswith("_ms") and value}
    times = ", ".join(f"{key} {value:g}" for key, value in given.items())
    return f"{request.cost.name} ({times})" if times and request.cost.name == "constant" else request.cost.name


def tags_of(row: Record) -> list[str]:
    """Words to filter by; W&B takes up to 64 characters each."""
    words = (row["schedule"], row["model"], row["cluster"], row.get("evidence"), row["status"], row.get("contender"))
    return [word[:64] for word in dict.fromkeys(words) if word]


def summary_of(row: Record) -> dict[str, Any]:
    """The metrics of a record, one number each, so that parallel coordinates can take them; and the verdict.

    A list with a value for each device is summed up by its maximum, the curve of the loss by its lowest point. Times
    that are slots are named so.
    """
    summary: dict[str, Any] = {"status": row["status"], "reason": row["reason"], "evidence": row["evidence"]}
    for key, value in row.items():
        if key in _NOT_METRICS:
            continue
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            summary[under_unit(row, key)] = value
        elif key not in _CURVES and _is_per_device(value, row["num_devices"]):
            summary[f"{under_unit(row, key)}_max"] = max(value)
    if row.get("loss_curve"):
        summary["loss_lowest"] = min(row["loss_curve"])
    return summary


def _is_per_device(value: Any, num_devices: int) -> bool:
    return (
        isinstance(value, list) and len(value) == num_devices and all(isinstance(item, (int, float)) for item in value)
    )
