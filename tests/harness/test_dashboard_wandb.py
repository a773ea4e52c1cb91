"""The W&B workspace: built and read back offline, over metrics that runs log."""

import json

import pytest

from rpbench.cli import dispatch
from rpbench.harness.tracking import dashboard_wandb, metrics


def test_every_metric_of_a_panel_is_one_that_runs_log():
    names = list(dashboard_wandb.metric_names())
    assert len(names) > 15
    assert [name for name in names if not metrics.is_logged(name)] == []


def test_the_workspace_is_built_and_read_back_without_asking_anybody(capsys, monkeypatch):
    workspaces = pytest.importorskip("wandb_workspaces.workspaces", reason="the extra dash is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    model = dashboard_wandb.workspace("rpbench")._to_model()
    back = workspaces.Workspace._from_model(model)
    found = [(section.name, len(section.panels)) for section in back.sections]
    assert found == [(name, len(panels)) for name, panels in dashboard_wandb.SECTIONS.items()]
    assert dispatch(["dashboard", "wandb", "--dry-run"]) == 0
    printed = capsys.readouterr().out
    json.loads(printed)
    assert all(name in printed for name in dashboard_wandb.metric_names())


def test_without_a_key_nothing_is_made_and_the_way_out_is_said(capsys, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert dispatch(["dashboard", "wandb"]) == 2
    assert "--dry-run" in capsys.readouterr().err
    assert dispatch(["dashboard", "wand"]) == 2
    assert dispatch(["dashboard", "port=99999"]) == 2
