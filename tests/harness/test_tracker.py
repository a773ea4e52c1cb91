"""W&B as a mirror: offline without a key, never a prompt, never a hang; everything a dashboard needs."""

import json
import subprocess
import sys

import pytest

from rpbench.harness import tracker
from rpbench.harness.request import load
from rpbench.harness.run import run


@pytest.fixture
def no_key(monkeypatch, tmp_path):
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))


def test_mode_is_offline_without_a_key_and_never_asks(no_key, monkeypatch, tmp_path):
    assert tracker.wandb_mode() == "offline"
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    assert tracker.wandb_mode() == "online"
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert tracker.wandb_mode() == "disabled"
    monkeypatch.delenv("WANDB_MODE")
    monkeypatch.delenv("WANDB_API_KEY")
    netrc = tmp_path / "netrc"
    netrc.write_text("machine wandb.example.org login user password secret\n")
    netrc.chmod(0o600)
    monkeypatch.setenv("NETRC", str(netrc))
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org")
    assert tracker.wandb_mode() == "online"


def test_an_offline_run_holds_group_config_summary_table_and_figure(no_key, tmp_path):
    (row,) = run(
        load(
            [
                "schedule=gpipe",
                "num_devices=3",
                "num_microbatches=4",
                f"results_dir={tmp_path}",
                "tracker=wandb",
            ]
        )
    )
    (folder,) = (tmp_path / "wandb").glob(f"offline-run-*-{row['run_id']}")
    read = subprocess.run(
        [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(folder)],
        capture_output=True,
        text=True,
        check=True,
    )
    lines = [json.loads(line) for line in read.stdout.splitlines()]
    start = next(line["run"] for line in lines if line["type"] == "run")
    assert (start["run_group"], start["job_type"]) == ("abstract-unit", "simulate")
    assert {"gpipe", "abstract", "simulated", "ok"} <= set(start["tags"])
    assert start["config"]["update"]["schedule"] == "gpipe"
    summary = {}
    for line in lines:
        summary |= line.get("summary", {}).get("update", {})
    assert summary["bubble_makespan"] == pytest.approx(row["bubble_makespan"])
    assert summary["peak_in_flight_max"] == 4
    media = sorted(path.name.split("_0_")[0] for path in (folder / "files" / "media").rglob("*.*"))
    assert media == ["timeline", "timeline_figure"]


def test_a_server_that_does_not_answer_costs_seconds_and_one_warning(no_key, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setattr(tracker, "_unreachable", False)
    common = [f"results_dir={tmp_path}", "tracker=wandb", "tracker.init_timeout_s=2", "num_microbatches=4"]
    rows = [run(load([f"num_devices={devices}", *common]))[0] for devices in (2, 3)]
    assert [row["status"] for row in rows] == ["ok", "ok"]
    assert capsys.readouterr().err.count("did not answer within 2 s") == 1
    for row in rows:
        assert list((tmp_path / "wandb").glob(f"offline-run-*-{row['run_id']}"))


def test_a_tracker_that_breaks_costs_a_warning_not_the_run(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(tracker, "_to_wandb", lambda *_: (_ for _ in ()).throw(RuntimeError("no")))
    (row,) = run(load(["num_devices=2", f"results_dir={tmp_path}", "tracker=wandb"]))
    assert row["status"] == "ok"
    assert "the record is kept, but wandb failed: RuntimeError: no" in capsys.readouterr().err
