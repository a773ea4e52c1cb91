"""Artifact: the files of a run as W&B keeps them: record, schedule text, timeline as a trace and as a picture."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rpbench.drawing.timeline_svg import timeline_svg
from rpbench.ir.schedule import to_text
from rpbench.ir.timeline import Timeline
from rpbench.records.record import Record, dump
from rpbench.tracking.metrics import TIMELINE

_MOST_ACTIONS = 20_000  # of a trace or a picture: a dashboard is no place for a million actions


def add_artifact(run: Any, row: Record, timeline: Timeline | None, folder: Path) -> None:
    """Add what a run left; also the picture, as a panel shows it."""
    import wandb

    with TemporaryDirectory() as scratch:
        artifact = wandb.Artifact(f"run-{row['run_id']}", type="run", metadata={"status": row["status"]})
        for name, text in files_of(row, timeline).items():
            path = Path(scratch) / name
            path.write_text(text, encoding="utf-8")
            artifact.add_file(str(path), name)
            if path.suffix == ".svg":
                run.log({TIMELINE: wandb.Html(text, inject=False)})
        run.log_artifact(artifact)


def files_of(row: Record, timeline: Timeline | None) -> dict[str, str]:
    """The files of a run by name."""
    files = {"record.json": dump(row) + "\n"}
    if timeline is None:
        return files
    files["schedule.txt"] = to_text(timeline.schedule)
    if timeline.schedule.num_actions <= _MOST_ACTIONS:
        files["trace.json"] = json.dumps(timeline.to_chrome_trace()) + "\n"
        files["timeline.svg"] = timeline_svg(timeline, f"{row['schedule']}, {row['model']}")
    return files
