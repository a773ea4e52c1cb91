"""W&B: a run at W&B, from its first step to its verdict.

wandb is offline unless a key is set, and never asks for one. A server that does not answer costs
`tracker.init_timeout_s` once and a warning; the run is kept offline. A failing tracker costs a warning, never the run.
A run that has arrived is marked in its folder by `mirror.json`, so that a repeated sweep does not send it twice.
Nothing of the environment is sent: neither the host's name nor the command line, the program, the packages or the
repository's address.
"""

import json
import os
import sys
from collections.abc import Iterator, Mapping
from netrc import NetrcParseError, netrc
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import urlsplit

from hydra.core.hydra_config import HydraConfig

from rpbench.config.request import Request
from rpbench.drawing.timeline_svg import timeline_svg
from rpbench.ir.schedule import to_text
from rpbench.ir.timeline import Timeline
from rpbench.records.describe import clock, under_unit
from rpbench.records.record import Record, dump, write_atomically
from rpbench.tracking.metrics import HISTORY, MEMORY, STEP, SUMMARY, TIMELINE, Listener, Row, in_slots, units
from rpbench.untrusted import parsed
from rpbench.whole_file import read_text

_NOT_METRICS = ("seed", "num_devices", "num_microbatches", "num_steps", "num_stages", "num_backward_stages")
_CURVES = ("loss_curve", "loss_curve_s")
_CONFIGURED = ("run_id", "mode", "backend", "experiment", "code_version", "git_commit", "partition_layers")


def name_of(row: Mapping[str, Any]) -> str:
    """A readable name, unique by a part of the run's id."""
    where = row["backend"] or row["mode"]
    who = row.get("contender") or row["schedule"]
    return f"{who} {row['model']} {row['num_devices']}x{row['num_microbatches']} {where} {row['run_id'][:10]}"


def group_of(request: Request) -> str:
    """The W&B group: as requested, else the sweep's manifest, the experiment, or model and cost."""
    if request.tracker.group:
        return request.tracker.group
    manifest = HydraConfig.get().job.name.rpartition("@")[0] if HydraConfig.initialized() else ""
    return manifest or request.choices.get("experiment") or f"{request.model_name}-{request.cost.name}"


def config_of(request: Request, row: Mapping[str, Any]) -> dict[str, Any]:
    """The whole resolved configuration, nested; choices and overrides; and the unit of each metric."""
    return {
        **request.subject,
        "choices": dict(request.choices),
        "overrides": list(request.overrides),
        "work": work_of(request),
        "run": {key: row.get(key) for key in _CONFIGURED},
        "units": units(),
    }


def work_of(request: Request) -> str:
    """The work of a run in one line, without its schedule: runs with equal lines are comparable."""
    tokens, cost = request.tokens_per_step, request.cost.name
    amount = f"{tokens:,} tokens a step" if tokens else f"{request.asked_microbatches} microbatches"
    sizes = f"{request.num_devices} devices, {amount}, {request.num_steps} steps"
    where = request.backend.name if request.backend is not None else "simulated"
    times = [f"{key} {value:g}" for key, value in vars(request.cost).items() if key.endswith("_ms") and value]
    if times and cost == "constant":
        cost += f" ({', '.join(times)})"
    groups = ("cluster.", "cost.", "charge=")  # words of theirs change what the same work takes
    more = [item for item in request.overrides if item.lstrip("+").startswith(groups) and "_ms=" not in item]
    return ", ".join((request.model_name, sizes, request.cluster.name, f"cost {cost}", *sorted(more), where))


def tags_of(row: Record) -> list[str]:
    """Words to filter by, of at most 64 characters, as W&B allows."""
    words = (row["schedule"], row["model"], row["cluster"], row.get("evidence"), row["status"], row.get("contender"))
    return [word[:64] for word in dict.fromkeys(words) if word]


def summary_of(row: Record) -> dict[str, Any]:
    """The verdict and the metrics of a record, one number each.

    A list with a value for each device becomes its maximum, the loss curve its lowest point. Times are named by unit.
    """
    summary: dict[str, Any] = {"status": row["status"], "reason": row["reason"], "evidence": row["evidence"]}
    for key, value in row.items():
        if key in (*_NOT_METRICS, *_CURVES):
            continue
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            summary[under_unit(row, key)] = value
            continue
        is_per_device = isinstance(value, list) and len(value) == row["num_devices"]
        if is_per_device and all(isinstance(item, (int, float)) for item in value):
            summary[f"{under_unit(row, key)}_max"] = max(value)
    if row.get("loss_curve"):
        summary["loss_lowest"] = min(row["loss_curve"])
    return summary


def history_of(row: Record, tokens: int) -> Iterator[Row]:
    """The rows of a record's batches, each of so many tokens: loss, tokens and times."""
    before = 0.0
    for step, (loss, end) in enumerate(zip(*(row.get(key) or () for key in _CURVES), strict=True)):
        passed, before = end - before, end
        pace = {"train/step_time_s": passed, "train/tokens_per_s": tokens / passed} if passed > 0 else {}
        yield {STEP: step, "train/loss": loss, "train/tokens": (step + 1) * tokens, "train/time_s": end, **pace}


# --- the artifact of a run: record, schedule text, timeline as a trace and as a picture ---

_MOST_ACTIONS = 20_000  # of a trace or a picture in a dashboard


def add_artifact(run: Any, row: Record, timeline: Timeline | None) -> None:
    """Add the files of a run, and its picture for a panel."""
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
    files = {"record.json": dump(row) + "\n"}
    if timeline is None:
        return files
    files["schedule.txt"] = to_text(timeline.schedule)
    if timeline.schedule.num_actions <= _MOST_ACTIONS:
        files["trace.json"] = json.dumps(timeline.to_chrome_trace()) + "\n"
        files["timeline.svg"] = timeline_svg(timeline, f"{row['schedule']}, {row['model']}")
    return files


_EXIT_CODES = {"ok": 0, "failed": 1, "infeasible": 3, "oom": 4}  # W&B shows all but 0 as failed; a tag says why

_unreachable = False  # once the server has not answered, later runs of this process go offline at once


def start(request: Request, row: Mapping[str, Any], attempt: int) -> Any:
    """A run at W&B; later attempts have ids of their own, so that no step is sent twice."""
    os.environ.setdefault("WANDB_SILENT", "true")
    import wandb

    _make_waiting_place(request.results_dir)
    tracker = request.tracker
    arguments = {
        "project": tracker.project,
        "id": row["run_id"] + (f"-{attempt}" if attempt > 1 else ""),
        "name": name_of(row) + (f" try {attempt}" if attempt > 1 else ""),
        "group": group_of(request),
        "job_type": row["backend"] or row["mode"],
        "config": config_of(request, row),
        "dir": str(request.results_dir),
        "resume": "allow",
        "settings": wandb.Settings(
            init_timeout=tracker.init_timeout_s,
            silent=True,
            quiet=True,
            console="off",
            disable_code=True,
            disable_git=True,
            save_code=False,
            host="undisclosed",
            x_disable_stats=True,
            x_disable_meta=True,
            x_disable_machine_info=True,
            x_save_requirements=False,
        ),
    }
    run = _initialised(wandb, arguments, tracker.init_timeout_s)
    run.define_metric(STEP, hidden=True)
    for name, metric in HISTORY.items():
        run.define_metric(name, step_metric=STEP, summary=metric.get("summary"))
    run.define_metric(f"{MEMORY}*", step_metric=STEP)
    for name in SUMMARY:
        run.define_metric(name, summary="last")
    return run


def _make_waiting_place(results: Path) -> None:
    """Make the folder where artifacts wait: the user's, or beside the records for a user without a home."""
    from wandb import env

    try:
        (Path(env.get_data_dir()) / "artifacts" / "staging").mkdir(parents=True, exist_ok=True)
    except OSError:
        os.environ[env.DATA_DIR] = str(results.resolve() / "wandb")


def _initialised(wandb: Any, arguments: Mapping[str, Any], timeout_s: float) -> Any:
    global _unreachable
    mode = "offline" if _unreachable else wandb_mode()
    try:
        return wandb.init(mode=mode, **arguments)
    except (wandb.errors.CommError, wandb.errors.UsageError) as error:
        if mode != "online":
            raise
        _unreachable = True
        print(
            f"rpbench: wandb did not answer within {timeout_s:g} s ({type(error).__name__}); this and "
            "later runs are kept offline, `wandb sync` sends them",
            file=sys.stderr,
        )
        wandb.teardown()  # the attempt that failed still holds the run's id
        return wandb.init(mode="offline", **arguments)


def finish(run: Any, row: Record, timeline: Timeline | None) -> None:
    """Send tags, summary and artifact, and end the run."""
    try:
        run.tags = tags_of(row)
        run.summary.update(summary_of(row))
        add_artifact(run, row, timeline)
    finally:
        run.finish(exit_code=_EXIT_CODES[row["status"]])


def wandb_mode() -> str:
    """WANDB_MODE if set; else online with a key and offline without, so that wandb never asks for one."""
    return os.environ.get("WANDB_MODE") or ("online" if _has_key() else "offline")


def _has_key() -> bool:
    """Whether a key is set in the environment, or by `wandb login` in .netrc for the server in use."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    server = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:
        return netrc(os.environ.get("NETRC")).authenticators(server) is not None
    except (OSError, NetrcParseError):
        return False


MARK = "mirror.json"


class Mirror:
    """A run at W&B, if it has a tracker. After the first failure there, nothing more is sent."""

    step: Listener | None = None

    def __init__(self, request: Request, opening: Mapping[str, Any]) -> None:
        self._run: Any = None
        if request.tracker.name == "none":
            return
        self._folder = request.results_dir / opening["run_id"]
        self._attempt = int(_mark(self._folder).get("attempt", 0)) + 1
        write_atomically(self._folder / MARK, json.dumps({"attempt": self._attempt, "arrived": False}) + "\n")
        expected = "simulated" if opening["backend"] == "virtual" else None
        self._in_slots = clock({"cost": opening["cost"], "evidence": expected}) == "slots"
        self._guarded(lambda: setattr(self, "_run", start(request, opening, self._attempt)))
        self.step = self.hear

    def hear(self, row: Row) -> None:
        if self._run is not None:
            values = in_slots(row) if self._in_slots else row
            self._guarded(lambda: self._run.log(values))

    def end(self, row: Record, timeline: Timeline | None) -> None:
        if self._run is None:
            return
        self._guarded(lambda: finish(self._run, row, timeline))
        if self._run is not None:
            mark = {"attempt": self._attempt, "arrived": True, "id": self._run.id}
            write_atomically(self._folder / MARK, json.dumps(mark) + "\n")

    def abandon(self) -> None:
        """End a run that was interrupted."""
        if self._run is not None:
            self._guarded(lambda: self._run.finish(exit_code=130))

    def _guarded(self, do: Any) -> None:
        try:
            do()
        except Exception as error:  # a failing tracker must not stop the sweep; the record is safe
            self._run = None
            print(f"rpbench: the record is kept, but wandb failed: {type(error).__name__}: {error}", file=sys.stderr)


def mirror(request: Request, row: Record) -> None:
    """Send an existing record with what it holds of its steps, unless it has arrived before."""
    if request.tracker.name != "none" and not _mark(request.results_dir / row["run_id"]).get("arrived"):
        sent = Mirror(request, row)
        for step in history_of(row, request.tokens_per_step or 0):
            sent.hear(step)
        sent.end(row, None)


def _mark(folder: Path) -> dict[str, Any]:
    try:
        found = parsed(read_text(folder / MARK))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
