"""`--dry-run`: whether a cell fits, as its run says afterwards, and how long it takes."""

import json

import pytest

LLAMA = ("model=llama31_8b", "cluster=8x_rtx4090", "cost=analytic", "num_microbatches=8")


def test_the_verdict_is_that_of_the_run(rpbench):
    words = ("-m", "schedule=1f1b,gpipe,roundpipe", *LLAMA)
    _, told, err = rpbench("--dry-run", *words)
    _, rows, _ = rpbench(*words)
    said = {row["run_id"]: (row["memory"], row["peak_memory_bytes"]) for row in told}
    found = {
        row["run_id"]: ("fits" if row["status"] == "ok" else "does not fit", max(row["peak_memory_bytes"]))
        for row in rows
    }
    assert said == found
    assert len({memory for memory, _ in said.values()}) == 2, "a case of each"
    misfits = sum(memory == "does not fit" for memory, _ in said.values())
    assert f"3 cells: 3 planned; {misfits} will not fit; about" in err
    again = rpbench("--dry-run", *words)[1]
    assert [row["state"] for row in again].count("done") == 3 - misfits
    assert all("memory" not in row for row in again), "what is there is not forecast"


def test_what_is_not_known_says_why(rpbench, tmp_path):
    for words, why in (
        (("schedule=1f1b", "num_devices=2"), "no model"),
        (("schedule=1f1b", "model=tiny_gpt", "num_devices=2"), "declares no memory"),
        (("schedule=1f1b", "tuning_budget=5", *LLAMA), "searched for first"),
        (("mode=predict", "schedule=roundpipe", *LLAMA[:3]), "as it runs"),
    ):
        _, (row,), _ = rpbench("--dry-run", "-m", *words)
        assert (row["memory"], why in row["memory_reason"]) == ("not known", True), words
    assert not list(tmp_path.glob("results/*/record.json")), "a dry run leaves nothing"


@pytest.mark.parametrize("measured", [True, False])
def test_seconds_are_those_of_runs_like_it(measured, rpbench, tmp_path):
    """A run of 2 steps of 4 microbatches that took 10 s, 8 of them training: 2 + 40 s for 5 steps of 8."""
    words = ("schedule=1f1b", "model=tiny_gpt", "backend=virtual", "num_devices=2")
    folder = tmp_path / "results" / rpbench(*words, "num_microbatches=4", "num_steps=2")[1][0]["run_id"]
    row = json.loads((folder / "record.json").read_text())
    changed = {"evidence": "measured" if measured else "emulated", "makespan_s": 8.0, "schema": 2}
    (folder / "record.json").write_text(json.dumps({k: v for k, v in row.items() if k != "digest"} | changed))
    (folder / "events.jsonl").write_text(json.dumps({"event": "finished", "seconds": 10.0}))
    _, (told,), err = rpbench("--dry-run", "-m", *words, "num_microbatches=8", "num_steps=5")
    assert told["seconds"] == pytest.approx(42 if measured else 50, abs=1)
    assert told["seconds_from"] == "1 run of tiny_gpt here"
    _, (told,), err = rpbench("--dry-run", "-m", *words, "model=mid_gpt")
    assert told["seconds"] is None
    assert "1 of which nobody knows how long" in err
