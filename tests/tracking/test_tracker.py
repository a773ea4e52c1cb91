"""W&B as a mirror: offline without a key, never a prompt, never a hang, nothing secret; what its users expect."""

import json
import re
import subprocess
import sys

import pytest
from logged import logged_names

from rpbench.config.loading import load
from rpbench.run.recording import run
from rpbench.tracking import metrics, wandb_run
from rpbench.tracking.wandb_run import name_of, summary_of

CANARY = "canary-b0a7d2c4"


@pytest.fixture
def no_key(monkeypatch, tmp_path):
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))


@pytest.fixture
def offline(no_key, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")


def sent(folder):
    """The lines of an offline run as wandb reads them back."""
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(folder)]
    read = subprocess.run(command, capture_output=True, text=True, check=True)
    return [json.loads(line) for line in read.stdout.splitlines()]


def folder_of(results, row):
    (folder,) = (results / "wandb").glob(f"offline-run-*-{row['run_id']}")
    return folder


def test_mode_is_offline_without_a_key_and_never_asks(no_key, monkeypatch, tmp_path):
    assert wandb_run.wandb_mode() == "offline"
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    assert wandb_run.wandb_mode() == "online"
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert wandb_run.wandb_mode() == "disabled"
    monkeypatch.delenv("WANDB_MODE")
    monkeypatch.delenv("WANDB_API_KEY")
    netrc = tmp_path / "netrc"
    netrc.write_text("machine wandb.example.org login user password secret\n")
    netrc.chmod(0o600)
    monkeypatch.setenv("NETRC", str(netrc))
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org")
    assert wandb_run.wandb_mode() == "online"


def test_a_training_run_has_a_row_for_each_step_and_tells_nothing_secret(offline, monkeypatch, tmp_path):
    monkeypatch.setenv("MY_SECRET_TOKEN", CANARY)
    monkeypatch.setenv("WANDB_API_KEY", f"{CANARY}{'0' * 24}")
    choices = ["model=tiny_gpt", "model.num_layers=2", "model.hidden=16", "num_devices=2", "num_microbatches=2"]
    choices += ["backend=virtual", "num_steps=3", "optimizer.clip_norm=1.0", "schedule=1f1b"]
    choices += ["backend.device_memory_bytes=1000000000"]
    (row,) = run(load([*choices, f"results_dir={tmp_path}", "tracker=wandb"]))
    assert row["status"] == "ok", row["reason"]
    folder = folder_of(tmp_path, row)
    lines = sent(folder)
    history = [line["history"]["item"] for line in lines if line["type"] == "history"]
    steps = [item for item in history if metrics.STEP in item]
    assert [item[metrics.STEP] for item in steps] == [0, 1, 2]
    assert [item["train/loss"] for item in steps] == pytest.approx(row["loss_curve"])
    assert [item["train/time_slots"] for item in steps] == pytest.approx(row["loss_curve_s"])
    assert all(item["train/gradient_norm"] > 0 for item in steps)
    assert all(item[f"{metrics.MEMORY}{device}"] > 0 for item in steps for device in (0, 1))
    busy_s = sum((1 - item["train/bubble"]) * 2 * item["train/step_time_slots"] for item in steps)
    assert busy_s == pytest.approx(sum(row["busy_s"]))
    start = next(line["run"] for line in lines if line["type"] == "run")
    assert start["config"]["update"]["optimizer"]["clip_norm"] == 1.0
    assert start["config"]["update"]["choices"]["schedule"] == "1f1b"
    work = start["config"]["update"]["work"]
    assert re.match(r"tiny_gpt\S*, 2 devices, ", work)
    assert work.endswith(" tokens a step, 3 steps, local, cost unit, virtual")
    assert row["clock"] == "slots"
    assert not [name for item in steps for name in item if name in ("train/time_s", "train/tokens_per_s")]
    names = {name for item in history for name in item if not name.startswith("_")}
    roots = {name.partition(".")[0] for name in names}
    assert roots <= logged_names(roots)
    everything = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert CANARY.encode() not in everything


def test_verdicts_arrive_once_each_under_a_name_of_its_own(offline, tmp_path):
    common = ["schedule=gpipe", f"results_dir={tmp_path}", "tracker=wandb", "num_microbatches=4"]
    (row,) = run(load(["num_devices=3", *common]))
    run(load(["num_devices=3", *common]))  # found: it has arrived already
    lines = sent(folder_of(tmp_path, row))
    start = next(line["run"] for line in lines if line["type"] == "run")
    assert (start["run_group"], start["job_type"]) == ("abstract-unit", "simulate")
    assert row["run_id"][:10] in start["display_name"]
    summary = {}
    for line in lines:
        summary |= line.get("summary", {}).get("update", {})
    assert summary["bubble_makespan"] == pytest.approx(row["bubble_makespan"])
    assert (summary["peak_in_flight_max"], summary["status"]) == (4, "ok")
    artifact = next(line["artifact"] for line in lines if line["type"] == "artifact")
    assert row["run_id"] in json.dumps(artifact)


def test_a_run_that_is_there_is_sent_with_its_steps_and_not_made_again(offline, tmp_path):
    """Who listens is no part of a run: with a tracker it is the same one."""
    asked = ["model=tiny_gpt", "model.num_layers=2", "model.hidden=16", "num_devices=2", "num_microbatches=2"]
    asked += ["backend=virtual", "num_steps=3", "schedule=1f1b", "cost=constant", f"results_dir={tmp_path}"]
    (row,) = run(load(asked))
    assert run(load([*asked, "tracker=wandb"])) == [row]
    run(load([*asked, "tracker=wandb", "force=true"]))
    found, live = (_steps(folder) for folder in sorted((tmp_path / "wandb").glob(f"offline-run-*-{row['run_id']}*")))
    assert len(found) == len(live) == 3
    for step, heard in zip(found, live, strict=True):
        assert step == {name: pytest.approx(heard[name]) for name in step}
        assert heard.keys() - step.keys() == {"train/wall_s", "train/bubble"}


def _steps(folder):
    """What an offline run has logged of each step."""
    history = [line["history"]["item"] for line in sent(folder) if line["type"] == "history"]
    rows = [{name: item[name] for name in item if name.startswith("train/")} for item in history]
    return [row for row in rows if row]


def test_what_cannot_fit_is_no_finished_run(offline, tmp_path):
    """One GiB holds no 8B model."""
    asked = ["schedule=gpipe", "model=llama31_8b", "num_devices=2", "cluster=8x_rtx4090", "num_microbatches=2"]
    (row,) = run(load([*asked, "cluster.device_memory_bytes=1000000000", f"results_dir={tmp_path}", "tracker=wandb"]))
    assert row["status"] == "infeasible"
    lines = sent(folder_of(tmp_path, row))
    assert next(line["exit"] for line in lines if line["type"] == "exit")["exit_code"] == 3
    assert "infeasible" in json.dumps([line for line in lines if line["type"] == "run"])


def test_summary_has_single_numbers_and_no_curve():
    row = {"run_id": "0" * 16, "num_devices": 2, "status": "ok", "reason": None, "evidence": "measured"}
    row |= {"loss_curve": [3.0, 2.0], "loss_curve_s": [1.0, 2.0], "busy_s": [1.0, 4.0], "seed": 7, "tokens_per_s": 9.0}
    assert summary_of(row) == {
        "status": "ok",
        "reason": None,
        "evidence": "measured",
        "busy_s_max": 4.0,
        "tokens_per_s": 9.0,
        "loss_lowest": 2.0,
    }


def test_runs_that_differ_in_anything_have_different_names():
    row = {"schedule": "1f1b", "model": "m", "num_devices": 2, "num_microbatches": 4, "mode": "train", "backend": "cpu"}
    assert name_of(row | {"run_id": "0" * 16}) != name_of(row | {"run_id": "1" * 16})
    assert re.match(r"1f1b m 2x4 cpu [0-9a-f]{10}$", name_of(row | {"run_id": "0" * 16}))


def test_a_server_that_does_not_answer_costs_seconds_and_one_warning(no_key, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setattr(wandb_run, "_unreachable", False)
    common = [f"results_dir={tmp_path}", "tracker=wandb", "tracker.init_timeout_s=2", "num_microbatches=4"]
    rows = [run(load([f"num_devices={devices}", *common]))[0] for devices in (2, 3)]
    assert [row["status"] for row in rows] == ["ok", "ok"]
    assert capsys.readouterr().err.count("did not answer within 2 s") == 1
    for row in rows:
        assert folder_of(tmp_path, row)


def test_a_tracker_that_breaks_costs_a_warning_not_the_run(offline, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(wandb_run, "start", lambda *_: (_ for _ in ()).throw(RuntimeError("no")))
    (row,) = run(load(["num_devices=2", f"results_dir={tmp_path}", "tracker=wandb"]))
    assert row["status"] == "ok"
    assert "the record is kept, but wandb failed: RuntimeError: no" in capsys.readouterr().err


@pytest.mark.benchmarks
def test_ten_runs_cost_at_most_three_seconds_offline(offline, tmp_path):
    """Processor time, over that of ten runs that are not mirrored; the first run of each pays for its imports."""
    from time import process_time

    taken = {}
    for tracker in ("none", "wandb"):
        for devices in (2, *range(3, 13)):
            asked = ["schedule=1f1b", f"num_devices={devices}", "num_microbatches=8", f"tracker={tracker}"]
            run(load([*asked, f"results_dir={tmp_path / tracker}"]))
            if devices == 2:
                began = process_time()
        taken[tracker] = process_time() - began
    assert taken["wandb"] - taken["none"] <= 3.0
