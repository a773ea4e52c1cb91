"""Records as a table: what is read, what is left out, what is selected."""

from pathlib import Path

import pandas as pd
import pytest

from analysis.records.published import load_records, published, select
from rpbench.harness import record
from rpbench.harness.config import swept


def test_every_run_is_a_row(records: pd.DataFrame) -> None:
    assert len(records) == 25 + 40 + len(swept("atlas", "schedule"))
    assert (records["status"] == "ok").all()


def test_a_folder_without_records_is_an_empty_table(tmp_path: Path) -> None:
    assert load_records(tmp_path).empty
    assert select(load_records(tmp_path), schedule="gpipe").empty


def test_a_torn_record_is_named_and_left_out(results: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, torn = sorted(results.iterdir())[:2]
    for folder in (good, torn):
        (tmp_path / folder.name).mkdir()
    whole = (good / "record.json").read_text()
    (tmp_path / good.name / "record.json").write_text(whole)
    (tmp_path / torn.name / "record.json").write_text(whole[:100])
    assert list(load_records(tmp_path)["run_id"]) == [good.name]
    assert torn.name in capsys.readouterr().err


def test_records_of_older_code_are_left_out(results: Path, tmp_path: Path) -> None:
    new = next(record.read_all(results))
    old = new | {"run_id": "0" * 16, "code_version": "older", "started_at": "2001-01-01T00:00:00+00:00"}
    for row in (new, old):
        record.write(tmp_path / row["run_id"], row)
    assert list(load_records(tmp_path)["run_id"]) == [new["run_id"]]


def test_without_records_of_this_code_the_newest_count(results: Path, tmp_path: Path) -> None:
    row = next(record.read_all(results))
    for number, year in enumerate(("2001", "2003", "2002")):
        other = row | {"run_id": f"{number:016}", "code_version": year, "started_at": f"{year}-01-01T00:00:00+00:00"}
        record.write(tmp_path / other["run_id"], other)
    assert list(load_records(tmp_path)["code_version"]) == ["2003"]


def test_select_looks_into_records_and_their_configs(records: pd.DataFrame) -> None:
    assert set(select(records, schedule="roundpipe", backend="sim")["model"]) == set(records["model"])
    assert len(select(records, config__cost__fused_ahead=True)) == 25
    assert select(records, config__cost__fused_ahead=False).empty
    assert select(records, no_such_column=1).empty


def test_select_finds_what_is_unset(records: pd.DataFrame) -> None:
    assert len(select(records, cost="published", backend="sim", config__cost__recompute_ahead=None)) == 25
    assert select(records, backend="sim", config__cost__name=None).empty


def test_failed_runs_are_never_selected(records: pd.DataFrame) -> None:
    failed = records.assign(status="infeasible")
    assert select(failed, backend="sim").empty


def test_not_available_is_a_word_and_an_empty_cell_is_not(records: pd.DataFrame) -> None:
    status = published("throughput").set_index(["system", "model"])["status"]
    assert status["megatron-tp", "qwen3-235b-lora"] == "N/A"
    assert published("figure2")["ratio_corrected"].isna().any()
