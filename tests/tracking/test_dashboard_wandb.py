"""The W&B workspace: built and read back offline, over metrics that runs log."""

import json

import pytest
from logged import logged_names

from rpbench.cli import dispatch
from rpbench.config.loading import load
from rpbench.tracking import dashboard_wandb
from rpbench.tracking.wandb_run import work_of


def named_by_panels():
    panels = [panel for section in dashboard_wandb.SECTIONS.values() for panel in section]
    return [name for panel in panels for name in (*panel["metrics"], *([panel["x"]] if "x" in panel else []))]


def test_every_metric_of_a_panel_is_one_that_runs_log():
    names = named_by_panels()
    assert len(names) > 15
    assert set(names) <= logged_names(names)


def test_the_workspace_is_built_and_read_back_without_asking_anybody(capsys, monkeypatch):
    workspaces = pytest.importorskip("wandb_workspaces.workspaces", reason="the extra dash is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    model = dashboard_wandb.workspace("rpbench")._to_model()
    back = workspaces.Workspace._from_model(model)
    found = [(section.name, len(section.panels)) for section in back.sections]
    assert found == [(name, len(panels)) for name, panels in dashboard_wandb.SECTIONS.items()]
    assert [group.name for group in back.runset_settings.groupby] == ["work", "schedule.name"]
    first, kinds = back.sections[0], {"BarPlot": "metrics", "LinePlot": "y", "MediaBrowser": "media_keys"}
    compared = {
        getattr(name, "name", name) for panel in first.panels for name in getattr(panel, kinds[type(panel).__name__])
    }
    wanted = {"tokens_per_s", "step_time_s", "bubble_makespan", "peak_memory_bytes_max", "train/loss", "timeline"}
    assert (first.name, compared) == ("Schedules at equal work", wanted)
    assert all(panel.groupby is None for panel in first.panels if type(panel).__name__ == "BarPlot")
    assert dispatch(["dashboard", "wandb", "--dry-run"]) == 0
    printed = capsys.readouterr().out
    json.loads(printed)
    assert all(name in printed for name in named_by_panels())


def test_the_work_of_runs_says_whether_they_may_be_compared():
    common = ["model=tiny_gpt", "num_devices=2", "num_microbatches=4"]
    works = [
        work_of(load([*common, *more]))
        for more in (
            ["schedule=gpipe"],
            ["schedule=1f1b"],
            ["schedule=1f1b", "num_microbatches=8", "workload.microbatch_sequences=2"],
            ["schedule=1f1b", "num_microbatches=8"],
            ["schedule=1f1b", "cost=constant", "cost.forward_ms=2"],
            ["schedule=1f1b", "cost=constant", "cost.forward_ms=2", "cost.overlap_gain=0.5"],
            ["schedule=1f1b", "cluster.transfer_latency_s=1"],
        )
    ]
    assert works[0] == works[1] == works[2]
    assert len(set(works[2:])) == 5


def test_without_a_key_nothing_is_made_and_the_way_out_is_said(capsys, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert dispatch(["dashboard", "wandb"]) == 2
    assert "--dry-run" in capsys.readouterr().err
    assert dispatch(["dashboard", "wand"]) == 2
    assert dispatch(["dashboard", "port=99999"]) == 2
