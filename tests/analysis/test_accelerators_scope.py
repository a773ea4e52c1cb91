"""`reproduce gpu`: dry on any machine, refused where there is nothing, and what has ended is kept when a part fails."""

import json
from pathlib import Path

import pytest
import torch
from manifests import put

from analysis.driver import accelerators, reproduce
from analysis.driver.accelerators import PARTS, run_on_accelerators
from analysis.driver.sweeps import Failure
from analysis.exhibits.figures.calibrated import ANSWER, calibration
from analysis.records.experiments import Experiments
from analysis.report.page import gather
from rpbench.cost.hardware.measured import PARTS as PARTS_OF_LAYERS


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
    assert ran == list(PARTS)
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
        if "ranks=3" in command:
            return ["calibrate ended with status 1"]
        log.parent.mkdir(exist_ok=True)
        log.write_text('measuring\n{"cluster": "this_gpu"}\n')
        return []

    monkeypatch.setattr(accelerators, "run_sweeps", lambda sweeps, results, say, tick: [])
    monkeypatch.setattr(accelerators, "_ended", ended)
    assert "calibrate ended with status 1" in run_on_accelerators(tmp_path, tmp_path, 3, lambda line: None)
    assert [set(each) & {"ranks=3", "dry=3", "device=accelerator"} for each in asked] == [
        {"ranks=3", "dry=3", "device=accelerator"},
        {"dry=3", "device=accelerator"},
    ]
    assert json.loads((tmp_path / ANSWER).read_text()) == {"cluster": "this_gpu"}


@pytest.mark.parametrize("dry, times", [(2, 0), (None, 1)])
def test_what_has_been_calibrated_dry_is_not_calibrated(
    dry: int | None, times: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ANSWER).write_text('{"evidence": "dry"}')
    asked = []
    monkeypatch.setattr(accelerators, "run_sweeps", lambda sweeps, results, say, tick: [])
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    monkeypatch.setattr(accelerators, "_ended", lambda command, log, limit_s: asked.append(command) or ["no"])
    run_on_accelerators(tmp_path, tmp_path, dry, lambda line: None)
    assert len(asked) == times


# --- the page ------------------------------------------------------------------------------------------------

ALL_ALIKE = dict.fromkeys(PARTS_OF_LAYERS, 2e-3)
SAID = {
    "copy_bytes_per_s": 25e9,
    "intra_bytes_per_s": None,
    "layers": [
        {
            "hidden": 64,
            "vocab": 5000,
            "num_tokens": 1024,
            "seconds": ALL_ALIKE | {"step": 3e-3},
            "predicted_s": ALL_ALIKE | {"forward": 1e-3},
        }
    ],
    "collectives": {
        "all_reduce": {
            "num_ranks": 2,
            "bytes_per_s": 12e9,
            "bytes_per_s_low": 11e9,
            "bytes_per_s_high": 13e9,
            "latency_s": 3e-5,
        }
    },
}


def test_what_was_calibrated_is_two_tables(tmp_path: Path) -> None:
    assert calibration(tmp_path) == []
    (tmp_path / ANSWER).write_text(json.dumps(SAID))
    layers, rates = calibration(tmp_path)
    assert layers.table
    assert rates.table
    found = {row[1].text: [cell.value for cell in row[2:]] for row in layers.table.rows}
    assert len(found) == len(PARTS_OF_LAYERS)
    assert found["forward"] == [2.0, 1.0, 2.0]
    assert found["step"] == [3.0, 2.0, 1.5]
    assert "Of 10 parts the median takes 1.000 times what is predicted, all 1.00 to 2.00 times" in layers.caption
    told = {row[0].text: [cell.text for cell in row[1:]] for row in rates.table.rows}
    assert told["link, one way while the other is busy"] == ["25", "GB/s", "–"]
    assert told["link, first device to second"] == ["–", "GB/s", "–"]
    assert told["all reduce, 2 ranks"] == ["12 (11–13)", "GB/s", "30"]
    assert (layers.evidence, rates.evidence) == (("measured", "predicted"), ("measured",))


def test_a_whole_sweep_that_no_exhibit_and_no_claim_is_about_is_compared(tmp_path: Path) -> None:
    row = {"run_id": "a" * 16, "status": "ok", "made_up": True, "tokens_per_s": 10.0, "config": {}, "choices": {}}
    row |= {"evidence": "measured", "experiment": "gpu_single", "started_at": "2026-01-01T00:00:00Z"}
    put(tmp_path, "gpu_single", [({"prefetch": 1, "seed": 0}, [row]), ({"prefetch": 0, "seed": 0}, [])])
    (tmp_path / row["run_id"]).mkdir(exist_ok=True)
    (tmp_path / row["run_id"] / "record.json").write_text(json.dumps(row))
    found = gather(Experiments(tmp_path))
    assert not found.exhibits
    assert [each.id.partition("@")[0] for each in found.own] == ["sweep_gpu_single"]


@pytest.mark.slow
def test_every_part_runs_dry(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = tmp_path / "results"
    assert reproduce.main(["gpu", "--dry", "2", "--results", str(results), "--out", str(tmp_path)]) == 0
    rows = [json.loads(path.read_text()) for path in results.glob("*/record.json")]
    assert {row["experiment"] for row in rows} == set(PARTS)
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
    said = json.loads((results / ANSWER).read_text())
    assert (said["evidence"], said["order_findings"], len(said["collectives"])) == ("dry", [], 4)
    assert not (results / "cluster").exists()
    assert [each["seconds"] for each in said["layers"]] == [{}, {}]  # not a number
    pages = "".join(path.read_text(encoding="utf-8") for path in tmp_path.glob("gpu_pages/*.html"))
    assert (tmp_path / "gpu.html").exists()
    assert "tokens/s" not in pages
    for title in ("Layers: timed against predicted", "Rates of the device, its links and its collectives"):
        assert title in pages
    assert pages.count("accelerators that are made up have no pace") >= 2
    tables = [path.read_text().splitlines() for path in tmp_path.glob("gpu_pages/figures/calibrated_*.csv")]
    assert [{line.rpartition(",")[2] for line in table[1:]} for table in tables] == [{""}, {""}]
    assert pages.count("No run of this sweep ended with numbers") >= len(PARTS)  # so nothing is drawn or compared
