"""`reproduce gpu`: dry on any machine, refused where there is nothing, and what has ended is kept when a part fails."""

import json
from pathlib import Path

import pytest
import torch

from analysis.driver import accelerators, reproduce
from analysis.driver.accelerators import PARTS, run_on_accelerators
from analysis.driver.sweeps import LOGS, Failure


@pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has an accelerator")
def test_without_an_accelerator_there_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert reproduce.main(["gpu", "--results", str(tmp_path / "results"), "--out", str(tmp_path)]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert err.startswith("gpu: torch finds no accelerator on this machine; --dry N")
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", ["0", "many"])
def test_a_number_of_accelerators_is_a_number(number: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        reproduce.main(["gpu", "--dry", number])
    assert "how many accelerators to make up, 1 or more" in capsys.readouterr().err


def test_a_part_that_fails_leaves_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []

    def failing(sweeps, results, say, tick):
        ran.extend(sweep.experiment for sweep in sweeps)
        return [Failure(sweep, 1, "the device is gone", tmp_path / "log") for sweep in sweeps[:1]]

    monkeypatch.setattr(accelerators, "run_sweeps", failing)
    monkeypatch.setattr(accelerators, "_calibrated", lambda *_: ["calibrate ended with status 1"])
    problems = run_on_accelerators(tmp_path, tmp_path, 2, lambda line: None)
    assert ran == [part.experiment for part in PARTS]
    assert sum("the device is gone" in problem for problem in problems) == len(PARTS)
    assert "no finished sweep in it" in problems[-1]  # so that there is no page


def test_when_the_time_is_over_what_is_left_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerators, "LIMIT_S", -1.0)
    monkeypatch.setattr(accelerators, "run_sweeps", lambda sweeps, results, say, tick: tick(""))
    monkeypatch.setattr(accelerators, "_calibrated", lambda *_: [])
    problems = run_on_accelerators(tmp_path, tmp_path, 2, lambda line: None)
    assert "are over: gpu_gradients, gpu_single, gpu_duel did not end" in problems[0]


def test_rates_of_one_are_kept_where_its_collectives_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def ended(command, log, limit_s):
        asked.append(command)
        return ["calibrate ended with status 1"] if "ranks=3" in command else []

    monkeypatch.setattr(accelerators, "run_sweeps", lambda sweeps, results, say, tick: [])
    monkeypatch.setattr(accelerators, "_ended", ended)
    assert "calibrate ended with status 1" in run_on_accelerators(tmp_path, tmp_path, 3, lambda line: None)
    assert [set(each) & {"ranks=3", "dry=3", "device=accelerator"} for each in asked] == [
        {"ranks=3", "dry=3", "device=accelerator"},
        {"dry=3", "device=accelerator"},
    ]


@pytest.mark.slow
def test_every_part_runs_dry(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = tmp_path / "results"
    assert reproduce.main(["gpu", "--dry", "2", "--results", str(results), "--out", str(tmp_path)]) == 0
    rows = [json.loads(path.read_text()) for path in results.glob("*/record.json")]
    assert {row["experiment"] for row in rows} == {part.experiment for part in PARTS}
    duel = {row["contender"]: row for row in rows if row["experiment"] == "gpu_duel"}
    assert list(map(len, (rows, duel))) == [len({row["run_id"] for row in rows}), 5]
    assert {name for name, row in duel.items() if (row["status"], row["evidence"]) == ("ok", "dry")} >= {"own", "fsdp2"}
    assert all("tokens_per_s" not in row or row["tokens_per_s"] is None for row in duel.values())
    for row in rows:
        if row["experiment"] == "gpu_duel":
            continue
        assert (row["status"], row["evidence"], row["tokens_per_s"]) == ("ok", "dry", None)
        assert row["order_findings"] == []
        assert len(row["accelerators"]) == len(row["accelerator_peak_memory_bytes"]) == 2
    compared = [row for row in rows if row["experiment"] == "gpu_gradients"]
    assert {row["device_grad_max_abs_diff"] for row in compared} == {0.0}
    said = json.loads((results / LOGS / "calibrate.log").read_text().splitlines()[-1])
    assert (said["evidence"], said["order_findings"], len(said["collectives"])) == ("dry", [], 4)
    assert not (results / "cluster").exists()
    pages = "".join(path.read_text(encoding="utf-8") for path in tmp_path.glob("gpu_pages/*.html"))
    assert (tmp_path / "gpu.html").exists()
    assert "tokens/s" not in pages
    assert pages.count("No run of this sweep ended with numbers") >= len(PARTS)  # so nothing is drawn or compared
