"""`--dry-run`: whether a cell fits, as its run says afterwards, and how long it takes."""

import json

import pytest

from rpbench.config.loading import load
from rpbench.run.recording import run
from rpbench.sweep.preview import Forecaster

LLAMA = ("model=llama31_8b", "cluster=8x_rtx4090", "cost=analytic", "num_microbatches=8")


@pytest.mark.parametrize("schedule", ["1f1b", "roundpipe"])
def test_the_verdict_is_that_of_the_run(schedule, tmp_path):
    request = load([f"schedule={schedule}", *LLAMA, f"results_dir={tmp_path / 'results'}"])
    told = Forecaster(tmp_path).of(request)
    assert not list(tmp_path.iterdir()), "nothing is run or written"
    (row,) = run(request)
    assert told.memory == {"ok": "fits", "infeasible": "does not fit"}[row["status"]]
    assert told.peak_memory_bytes == max(row["peak_memory_bytes"])
    assert (told.memory == "fits") == (schedule == "roundpipe"), "a case of each"


@pytest.mark.parametrize(
    "words, why",
    [
        (("schedule=1f1b", "num_devices=2"), "no model"),
        (("schedule=1f1b", "model=tiny_gpt", "num_devices=2"), "declares no memory"),
        (("schedule=1f1b", "tuning_budget=5", *LLAMA), "searched for first"),
        (("mode=predict", "schedule=roundpipe", *LLAMA[:3]), "as it runs"),
    ],
)
def test_what_is_not_known_says_why(words, why, tmp_path):
    told = Forecaster(tmp_path).of(load(words))
    assert (told.memory, why in told.memory_reason) == ("not known", True)


def test_a_cell_that_is_there_is_not_forecast(rpbench):
    words = ("-m", "schedule=1f1b,gpipe", "num_devices=2", "cost=constant")
    rpbench("schedule=1f1b", *words[2:])
    _, rows, err = rpbench("--dry-run", *words)
    assert [(row["state"], "memory" in row) for row in rows] == [("done", False), ("planned", True)]
    assert "2 cells: 1 done, 1 planned; about" in err


def test_a_damaged_record_is_what_changed(rpbench, tmp_path):
    words = ("-m", "schedule=1f1b,gpipe", "num_devices=2", "cost=constant", f"results_dir={tmp_path}")
    _, (ended, _), _ = rpbench(*words)
    (tmp_path / ended["run_id"] / "record.json").write_text("{")
    _, rows, _ = rpbench("--dry-run", *words)
    assert [(row["state"], row.get("changed")) for row in rows] == [("stale", ["record"]), ("done", None)]


@pytest.mark.parametrize("measured", [True, False])
def test_seconds_are_those_of_runs_like_it(measured, tmp_path):
    """A run of 2 steps of 4 microbatches that took 10 s, 8 of them training: 2 + 40 s for 5 steps of 8."""
    words = ("schedule=1f1b", "model=tiny_gpt", "backend=virtual", "num_devices=2", f"results_dir={tmp_path}")
    folder = tmp_path / run(load([*words, "num_microbatches=4", "num_steps=2"]))[0]["run_id"]
    row = json.loads((folder / "record.json").read_text())
    changed = {"evidence": "measured" if measured else "emulated", "makespan_s": 8.0, "schema": 2}
    (folder / "record.json").write_text(json.dumps({k: v for k, v in row.items() if k != "digest"} | changed))
    (folder / "events.jsonl").write_text(json.dumps({"event": "finished", "seconds": 10.0}))
    told = Forecaster(tmp_path).of(load([*words, "num_microbatches=8", "num_steps=5"]))
    assert told.seconds == pytest.approx(42 if measured else 50, abs=1)
    assert told.seconds_from == "1 run of tiny_gpt here"
    other = Forecaster(tmp_path).of(load([*words, "model=mid_gpt"]))
    assert (other.seconds, other.seconds_from) == (None, "no run like it is in this folder yet")
