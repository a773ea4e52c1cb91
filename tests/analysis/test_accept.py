"""Accepting: what changes is said, a reason is kept, and nothing is blessed while something else is red."""

import csv
import json
import os
import shutil
from pathlib import Path

import pytest
from manifests import forge

from analysis.claims import expected
from analysis.driver import accept
from rpbench.records import record
from rpbench.records.manifest import FOLDER as MANIFESTS

TABLE = "figure17"


@pytest.fixture
def tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The accepted tables, as a copy in which one makespan is another, and no claims but those of figure 17."""
    folder = tmp_path / "expected"
    shutil.copytree(expected.FOLDER, folder, ignore=shutil.ignore_patterns("*.py", "__pycache__", expected.BECAUSE))
    path = folder / f"{TABLE}.csv"
    with path.open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    rows[3]["makespan_s"] = "1.5"
    with path.open("w", newline="") as lines:
        writer = csv.DictWriter(lines, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    claims = [each for each in accept.all_claims() if any(need.experiment == TABLE for need in each.needs)]
    monkeypatch.setattr(accept, "all_claims", lambda: claims)
    for module in (expected, accept):
        monkeypatch.setattr(module, "FOLDER", folder)
    return folder


def _run(results: Path, *options: str) -> int:
    return accept.main(["--results", str(results), "--only", TABLE, *options])


def test_what_changes_is_printed_and_written_with_a_reason_alone(
    tables: Path, results: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (tables / f"{TABLE}.csv").read_bytes()
    assert _run(results) == 2
    out, err = capsys.readouterr()
    (line,) = out.splitlines()
    assert line == "figure17: qwen3_32b gpipe: makespan_s 1.5 -> 34.370094"
    assert "give --because" in err
    assert (tables / f"{TABLE}.csv").read_bytes() == before
    assert not (tables / expected.BECAUSE).exists()

    assert _run(results, "--because", "a test") == 0
    assert capsys.readouterr().out == out
    told = json.loads((tables / expected.BECAUSE).read_text())
    assert told["because"] == "a test"
    assert told["changed"] == {TABLE: 1}
    assert told["accepted_at"]
    assert "commit" in told

    assert _run(results) == 0  # nothing changes any more, and nothing needs a reason
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("forge_manifest", [False, True])
def test_nothing_is_accepted_of_falsified_records(
    tables: Path, results: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], forge_manifest: bool
) -> None:
    folder, before = tmp_path / "results", (tables / f"{TABLE}.csv").read_bytes()
    shutil.copytree(results, folder, copy_function=os.link, ignore=shutil.ignore_patterns(".*", MANIFESTS))
    shutil.copytree(results / MANIFESTS, folder / MANIFESTS)
    row = next(row for row in record.read_all(folder) if row["experiment"] == TABLE and row["schedule"] == "1f1b")
    (folder / row["run_id"] / "record.json").unlink()  # it is a link
    sealed = record.write(folder / row["run_id"], row | {"makespan_s": 1.1 * row["makespan_s"]})
    if forge_manifest:
        forge(folder / MANIFESTS / TABLE, {row["digest"]: sealed["digest"]})
    assert _run(folder, "--because", "it looks right") == 1
    err = capsys.readouterr().err
    assert "nothing is accepted while this is red" in err
    words = (
        f"consistency/experiment=figure17 (1f1b {row['model']})" if forge_manifest else f"the record {row['run_id']}"
    )
    assert words in err
    assert (tables / f"{TABLE}.csv").read_bytes() == before
    assert not (tables / expected.BECAUSE).exists()
