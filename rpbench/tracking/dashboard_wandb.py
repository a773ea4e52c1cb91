"""A W&B workspace and report as code: the panels people compare schedules in, over what runs log.

Needs the extra `dash` (wandb-workspaces). Building a workspace needs no network; only `save` calls W&B.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rpbench.config.choices import ConfigError

# Runs of one group did the same work by the same schedule; a bar is a group, so that bars of one work may be compared.
GROUPS = ("work", "schedule.name")


@dataclass(frozen=True)
class Panel:
    """One panel: bar, scatter, line, parallel, media or comparer, of what runs log; x is along a scatter or a line."""

    kind: str
    title: str
    metrics: tuple[str, ...] = ()
    x: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        return self.metrics if self.x is None else (*self.metrics, self.x)


SECTIONS: Mapping[str, tuple[Panel, ...]] = {
    "Schedules at equal work": (
        Panel("bar", "Pace (tokens/s)", ("tokens_per_s",)),
        Panel("bar", "Step time (s)", ("step_time_s",)),
        Panel("bar", "Bubble (fraction of the makespan)", ("bubble_makespan",)),
        Panel("bar", "Peak memory of the fullest device (B)", ("peak_memory_bytes_max",)),
        Panel("line", "Loss over tokens", ("train/loss",), x="train/tokens"),
        Panel("media", "Timelines", ("timeline",)),
    ),
    "Bubble and memory": (
        Panel("scatter", "Bubble against memory", ("bubble_makespan",), x="peak_memory_bytes_max"),
        Panel("parallel", "All in one", ("bubble_makespan", "peak_memory_bytes_max", "step_time_s", "tokens_per_s")),
    ),
    "Predicted and measured": (
        Panel("scatter", "Replayed against measured makespan (s)", ("makespan_s",), x="replay_makespan_s"),
        Panel("bar", "Makespan, with the range (s)", ("makespan_s",)),
    ),
    "Training": (
        Panel("line", "Loss against time (s)", ("train/loss",), x="train/time_s"),
        Panel("line", "Step time (s)", ("train/step_time_s",), x="train/step"),
        Panel("line", "Tokens/s", ("train/tokens_per_s",), x="train/step"),
        Panel("line", "Bubble", ("train/bubble",), x="train/step"),
        Panel("line", "Gradient norm, of runs with optimizer.clip_norm", ("train/gradient_norm",), x="train/step"),
    ),
    "Verdicts": (
        Panel("bar", "Runs by verdict: staleness in steps", ("staleness_steps",)),
        Panel("comparer", "What differs between runs"),
    ),
}


def workspace(project: str, entity: str = "") -> Any:
    """The workspace, not saved."""
    ws, wr = _modules()
    sections = [
        ws.Section(name=name, panels=[_built(wr, panel) for panel in panels], is_open=True)
        for name, panels in SECTIONS.items()
    ]
    settings = ws.RunsetSettings(
        groupby=[ws.Config(key) for key in GROUPS],
        order=[ws.Ordering(ws.Summary("tokens_per_s"), ascending=False)],
    )
    return ws.Workspace(
        name="rpbench: schedules", entity=entity, project=project, sections=sections, runset_settings=settings
    )


def report(project: str, entity: str = "") -> Any:
    """The report, not saved: one heading and one grid of panels a section. Asks W&B for the project's number."""
    _, wr = _modules()
    blocks: list[Any] = [wr.P("Every number says how it is known: see `evidence` of each run.")]
    for name, panels in SECTIONS.items():
        runset = wr.Runset(entity=entity, project=project, groupby=[wr.Config(key) for key in GROUPS])
        blocks += [wr.H2(name), wr.PanelGrid(runsets=[runset], panels=[_built(wr, panel) for panel in panels])]
    return wr.Report(project=project, entity=entity, title="Schedules compared", blocks=blocks)


def specification(project: str, entity: str = "") -> dict[str, Any]:
    """The workspace as W&B stores it, as plain data; nothing is sent."""
    found = workspace(project, entity)._to_model().model_dump(by_alias=True, mode="json")
    return dict(found)


def save(project: str, entity: str = "") -> dict[str, str]:
    """Make workspace and report at W&B; where they are. Raises ConfigError without a key, before anything is asked."""
    from rpbench.tracking.wandb_run import wandb_mode

    if wandb_mode() != "online":
        raise ConfigError("dashboard wandb: W&B is offline here; run `wandb login`, or add --dry-run to print it")
    return {"workspace": workspace(project, entity).save().url, "report": report(project, entity).save().url}


def _modules() -> tuple[Any, Any]:
    try:
        import wandb_workspaces.reports.v2 as wr
        import wandb_workspaces.workspaces as ws
    except ImportError:
        raise ConfigError(
            "dashboard wandb: wandb-workspaces is not installed; in the clone: pip install -e '.[dash]'"
        ) from None
    return ws, wr


def _built(wr: Any, panel: Panel) -> Any:
    """A panel in the words of wandb-workspaces."""
    title = panel.title
    if panel.kind == "bar":
        return wr.BarPlot(
            title=title, metrics=list(panel.metrics), groupby_aggfunc="median", groupby_rangefunc="minmax"
        )
    if panel.kind == "scatter":
        return wr.ScatterPlot(title=title, x=wr.SummaryMetric(panel.x), y=wr.SummaryMetric(panel.metrics[0]))
    if panel.kind == "line":
        return wr.LinePlot(title=title, x=panel.x, y=list(panel.metrics))
    if panel.kind == "parallel":
        columns = [wr.ParallelCoordinatesPlotColumn(metric=wr.SummaryMetric(name)) for name in panel.metrics]
        return wr.ParallelCoordinatesPlot(title=title, columns=columns)
    if panel.kind == "media":
        return wr.MediaBrowser(title=title, media_keys=list(panel.metrics))
    return wr.RunComparer(diff_only="split")
