"""Notebooks: one question each, an answer from data, no outputs in the source, and they run from top to bottom."""

import json
import runpy
from pathlib import Path

import jupytext
import pytest

from analysis.driver.notebooks import execute, notebooks
from analysis.exhibits import notebook as shown_by
from analysis.records.experiments import MissingRuns

HEADLESS = "02_steady_state"

_DOT = bytes.fromhex(  # a PNG of one pixel
    "89504e470d0a1a0a0000000d49484452000000010000000108000000003a7e9b550000000a49444154789c6360000000020001"
    "48afa4710000000049454e44ae426082"
)


def test_there_are_five_in_order() -> None:
    names = [path.stem for path in notebooks()]
    assert [name[:3] for name in names] == ["01_", "02_", "03_", "04_", "05_"]


@pytest.mark.parametrize("path", notebooks(), ids=lambda path: path.stem)
def test_a_notebook_asks_first_and_answers_last(path: Path) -> None:
    cells = jupytext.read(path).cells
    code = [cell for cell in cells if cell.cell_type == "code"]
    assert cells[0].cell_type == "markdown"
    assert cells[0].source.splitlines()[0].endswith("?")
    assert code[0].metadata["tags"] == ["parameters"]
    assert cells[-2].source == "## Answer"
    assert cells[-1].source.startswith("say(")
    assert not any(cell.source.lstrip().startswith(("def ", "for ", "class ")) for cell in code)


def test_headless_execution_keeps_what_was_shown(full_results: Path, tmp_path: Path) -> None:
    source = next(path for path in notebooks() if path.stem == HEADLESS)
    written = execute(source, full_results, tmp_path)
    assert written == tmp_path / f"{HEADLESS}.ipynb"
    cells = json.loads(written.read_text(encoding="utf-8"))["cells"]
    kinds = {kind for cell in cells for output in cell.get("outputs", ()) for kind in output.get("data", ())}
    assert {"image/png", "text/html", "text/markdown"} <= kinds
    answer = "".join(cells[-1]["outputs"][0]["data"]["text/markdown"])
    assert "simulated N = 8: 5.00 to 5.00 %" in answer  # the made-up records: 40 / N percent


def test_headless_execution_names_missing_records(tmp_path: Path) -> None:
    source = next(path for path in notebooks() if path.stem == HEADLESS)
    with pytest.raises(MissingRuns, match=r"20 of 20 runs of experiment=steady_state"):
        execute(source, tmp_path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("path", [path for path in notebooks() if path.stem != HEADLESS], ids=lambda path: path.stem)
def test_a_notebook_runs_as_a_script(
    path: Path, full_results: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RPBENCH_RESULTS", str(full_results))
    monkeypatch.setattr(shown_by, "png_bytes", lambda figure: _DOT)  # drawn, but not rasterised
    runpy.run_path(str(path))
    assert "Markdown object" in capsys.readouterr().out
