"""A W&B workspace and report as code: panels that compare schedules by what their runs log.

Needs the extra `dash` (wandb-workspaces). Building a workspace needs no network; only `save` calls W&B.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rpbench.config.choices import ConfigError
from rpbench.yaml_file import read_keys

# Runs of one group did the same work with the same schedule; a bar is a group, so bars of the same work are comparable.
GROUPS = ("work", "schedule.name")
Panel = Mapping[str, Any]
SECTIONS: Mapping[str, list[Panel]] = read_keys(Path(__file__).with_name("panels.yaml"))


def workspace(project: str, entity: str = "") -> Any:
    """The workspace, not saved."""
    ws, wr = _modules()
    sections = [
        ws.Section(name=name, panels=[_built(wr, panel) for panel in panels], is_open=True)
        for name, panels in SECTIONS.items()
    ]
    settings = ws.RunsetSettings(
        groupby=[ws.Config(key) for key in GROUPS], order=[ws.Ordering(ws.Summary("tokens_per_s"), ascending=False)]
    )
    return ws.Workspace(
        name="rpbench: schedules", entity=entity, project=project, sections=sections, runset_settings=settings
    )


def report(project: str, entity: str = "") -> Any:
    """The report, not saved: a heading and a grid of panels a section. Asks W&B for the project's number."""
    _, wr = _modules()
    blocks: list[Any] = [wr.P("Every number says how it is known: see `evidence` of each run.")]
    for name, panels in SECTIONS.items():
        runset = wr.Runset(entity=entity, project=project, groupby=[wr.Config(key) for key in GROUPS])
        blocks += [wr.H2(name), wr.PanelGrid(runsets=[runset], panels=[_built(wr, panel) for panel in panels])]
    return wr.Report(project=project, entity=entity, title="Schedules compared", blocks=blocks)


def specification(project: str, entity: str = "") -> dict[str, Any]:
    """The workspace as plain data, as W&B stores it; nothing is sent."""
    return dict(workspace(project, entity)._to_model().model_dump(by_alias=True, mode="json"))


def save(project: str, entity: str = "") -> dict[str, str]:
    """Save workspace and report at W&B, and return their URLs; ConfigError without a key, before any request."""
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
    title, metrics, x = panel["title"], panel["metrics"], panel.get("x")
    if panel["kind"] == "bar":
        return wr.BarPlot(title=title, metrics=metrics, groupby_aggfunc="median", groupby_rangefunc="minmax")
    if panel["kind"] == "scatter":
        return wr.ScatterPlot(title=title, x=wr.SummaryMetric(x), y=wr.SummaryMetric(metrics[0]))
    if panel["kind"] == "line":
        return wr.LinePlot(title=title, x=x, y=metrics)
    if panel["kind"] == "parallel":
        columns = [wr.ParallelCoordinatesPlotColumn(metric=wr.SummaryMetric(name)) for name in metrics]
        return wr.ParallelCoordinatesPlot(title=title, columns=columns)
    if panel["kind"] == "media":
        return wr.MediaBrowser(title=title, media_keys=metrics)
    return wr.RunComparer(diff_only="split")
