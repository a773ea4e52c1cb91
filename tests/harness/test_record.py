"""Records: identity, atomic writing, what is not a record."""

import json

import pytest

from rpbench.harness import record
from rpbench.harness.config import load, resolved
from rpbench.harness.run import run


def test_identity_follows_the_subject_and_the_code_not_the_surroundings():
    base = resolved(load(["schedule=gpipe"]))
    name = record.run_id(base, "code")
    assert name == record.run_id(
        resolved(load(["schedule=gpipe", "results_dir=x", "tracker=wandb", "force=true"])), "code"
    )
    assert name != record.run_id(resolved(load(["schedule=gpipe", "seed=1"])), "code")
    assert name != record.run_id(base, "other code")


def test_a_write_that_fails_leaves_the_old_record_and_no_rubbish(tmp_path, monkeypatch):
    folder = tmp_path / "run"
    record.write(folder, {"run_id": "run", "value": 1})
    monkeypatch.setattr(record.os, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        record.write(folder, {"run_id": "run", "value": 2})
    assert json.loads((folder / "record.json").read_text())["value"] == 1
    assert [path.name for path in folder.iterdir()] == ["record.json"]


def test_a_record_is_strict_json():
    with pytest.raises(ValueError, match="JSON"):
        record.dump({"value": float("nan")})


@pytest.mark.parametrize(
    "change, said",
    [
        (lambda row: row.pop("evidence"), "no evidence"),
        (lambda row: row.update(run_id="other"), "does not match its folder"),
        (lambda row: row.update(status="fine"), "none of ok"),
    ],
)
def test_what_is_no_record_is_said_and_not_counted(change, said, tmp_path, capsys):
    row = run(load(["num_devices=2", f"results_dir={tmp_path}"]))
    assert [found["run_id"] for found in record.read_all(tmp_path)] == [row["run_id"]]
    change(row)
    (path,) = tmp_path.glob("*/record.json")
    path.write_text(json.dumps(row))
    assert list(record.read_all(tmp_path)) == []
    assert said in capsys.readouterr().err


def test_a_run_that_breaks_leaves_a_failed_record_that_is_tried_again(tmp_path, monkeypatch):
    from rpbench.harness import run as runs

    config = load(["num_devices=2", f"results_dir={tmp_path}"])
    with monkeypatch.context() as patch:
        patch.setattr(runs, "simulate_graph", lambda *_: (_ for _ in ()).throw(RuntimeError("broken")))
        with pytest.raises(RuntimeError, match="broken"):
            run(config)
    (row,) = record.read_all(tmp_path)
    assert (row["status"], row["reason"]) == ("failed", "RuntimeError: broken")
    assert "broken" in next(tmp_path.glob("*/events.jsonl")).read_text()
    assert run(config)["status"] == "ok"


def test_events_tell_how_a_run_went(tmp_path):
    row = run(load(["num_devices=2", f"results_dir={tmp_path}"]))
    lines = (tmp_path / row["run_id"] / "events.jsonl").read_text().splitlines()
    assert [json.loads(line)["event"] for line in lines] == ["started", "finished"]
