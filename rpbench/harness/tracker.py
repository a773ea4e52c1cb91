"""Where records also go. A tracker mirrors; the record on disk is the source.

wandb is offline unless a key is set, never asks, and never holds a run up: a server that does not answer costs
`tracker.init_timeout_s` once, a warning, and the run is kept offline.
"""

import os
import sys
from io import BytesIO
from netrc import NetrcParseError, netrc
from typing import Any
from urllib.parse import urlsplit

from rpbench.harness.choices import TrackerConfig
from rpbench.harness.record import Record
from rpbench.harness.request import Request
from rpbench.ir.timeline import Timeline

# Choices that name a run; the rest of the record's plain numbers are its summary.
_CHOICES = (
    "schedule",
    "model",
    "cluster",
    "workload",
    "cost",
    "backend",
    "partition",
    "partition_layers",
    "num_devices",
    "num_microbatches",
    "num_steps",
    "num_stages",
    "num_backward_stages",
    "seed",
    "evidence",
    "git_commit",
    "code_version",
)
_MOST_ROWS = 5_000  # of the timeline table: a dashboard is no place for a million actions

_unreachable = False  # said once per process; the runs after it go offline at once


def mirror(request: Request, row: Record, timeline: Timeline | None) -> None:
    """Send a finished record where the configuration asks; a tracker that fails costs a warning, never the run."""
    tracker = request.tracker
    if tracker.name == "none":
        return
    try:
        _to_wandb(request, tracker, row, timeline)
    except Exception as error:  # whatever a tracker does, the record is safe and the sweep goes on
        print(f"rpbench: the record is kept, but wandb failed: {type(error).__name__}: {error}", file=sys.stderr)


def _to_wandb(request: Request, tracker: TrackerConfig, row: Record, timeline: Timeline | None) -> None:
    os.environ.setdefault("WANDB_SILENT", "true")
    import wandb

    run = _start(wandb, request, tracker, row)
    try:
        run.summary.update(summary_of(row))
        if timeline is not None:
            run.log(_timeline_media(wandb, row, timeline))
    finally:
        run.finish(exit_code=0 if row["status"] != "failed" else 1)


def _start(wandb: Any, request: Request, tracker: TrackerConfig, row: Record) -> Any:
    global _unreachable
    arguments = {
        "project": tracker.project,
        "id": row["run_id"],
        "name": f"{row['schedule']}-{row['model']}-{row['num_devices']}x{row['num_microbatches']}",
        "group": tracker.group or f"{row['model']}-{row['cost']}",
        "job_type": row["backend"] or row["mode"],
        "tags": [row["schedule"], row["model"], row["evidence"], row["status"]],
        "config": {key: row.get(key) for key in _CHOICES},
        "dir": str(request.results_dir),
        "resume": "allow",
        "settings": wandb.Settings(
            init_timeout=tracker.init_timeout_s, silent=True, console="off", x_disable_stats=True, quiet=True
        ),
    }
    mode = "offline" if _unreachable else wandb_mode()
    try:
        return wandb.init(mode=mode, **arguments)
    except (wandb.errors.CommError, wandb.errors.UsageError) as error:
        if mode != "online":
            raise
        _unreachable = True
        print(
            f"rpbench: wandb did not answer within {tracker.init_timeout_s:g} s ({type(error).__name__}); this and "
            "later runs are kept offline, `wandb sync` sends them",
            file=sys.stderr,
        )
        wandb.teardown()  # the attempt that failed still holds the run's id
        return wandb.init(mode="offline", **arguments)


def wandb_mode() -> str:
    """What WANDB_MODE says; else online with a key and offline without, so that wandb never asks for one."""
    return os.environ.get("WANDB_MODE") or ("online" if _has_key() else "offline")


def _has_key() -> bool:
    """Whether a key is set where `wandb login` puts it: the environment, or .netrc for the server in use."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    server = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:
        return netrc(os.environ.get("NETRC")).authenticators(server) is not None
    except (OSError, NetrcParseError):
        return False


def summary_of(row: Record) -> dict[str, Any]:
    """The metrics of a record: numbers as they are, per-device lists by their maximum, and the verdict."""
    summary: dict[str, Any] = {"status": row["status"], "reason": row["reason"]}
    for key, value in row.items():
        if key in _CHOICES or key in ("config", "versions", "hardware"):
            continue
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            summary[key] = value
        elif isinstance(value, list) and value and all(isinstance(item, (int, float)) for item in value):
            summary[f"{key}_max"] = max(value)
    return summary


def _timeline_media(wandb: Any, row: Record, timeline: Timeline) -> dict[str, Any]:
    """The timeline as a table, and as the figure the report draws."""
    from PIL import Image

    from rpbench.harness.drawing import draw_timeline

    table = wandb.Table(columns=["device", "lane", "action", "start_s", "main_s", "end_s"])
    for _, span in zip(range(_MOST_ROWS), timeline.spans(), strict=False):
        second = timeline.units_per_second
        table.add_data(
            span.device,
            span.lane,
            str(span.action),
            span.start / second,
            span.main / second,
            span.end / second,
        )
    picture = BytesIO()
    unit = "slots" if row["cost"] == "unit" else "s"
    draw_timeline(timeline, f"{row['schedule']}, {row['model']}", unit=unit).savefig(picture, format="png", dpi=150)
    return {"timeline": table, "timeline_figure": wandb.Image(Image.open(picture))}
