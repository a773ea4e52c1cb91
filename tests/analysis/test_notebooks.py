"""Notebooks: one question each, parameters that matter, an answer from data, an exercise with a check, one kernel."""

import ast
import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jupytext
import pandas as pd
import pytest
from nbclient.exceptions import CellExecutionError
from spared import spared

from analysis.driver.notebooks import Kernel, execute, needs, notebooks
from analysis.exhibits import notebook as shown_by
from analysis.exhibits.figures import timelines
from analysis.exhibits.figures.own import tuning
from analysis.exhibits.figures.paper import (
    figure2,
    figure3,
    figure5,
    figure17,
    predicted,
    predicted_curves,
    prediction,
    steady_state,
    systems,
)
from analysis.records.experiments import Experiments, MissingRuns

HEADLESS = "02_steady_state"

_DOT = bytes.fromhex(  # a PNG of one pixel
    "89504e470d0a1a0a0000000d49484452000000010000000108000000003a7e9b550000000a49444154789c6360000000020001"
    "48afa4710000000049454e44ae426082"
)
_EVERY = pytest.mark.parametrize("path", notebooks(), ids=lambda path: path.stem)
_SOME = pytest.mark.parametrize(
    "path", spared(notebooks(), lambda path: path.stem[:2] in ("01", "05")), ids=lambda path: path.stem
)

# One other value of each parameter that a figure, table or answer depends on, and one that there is not.
CHANGES: dict[str, dict[str, tuple[Any, Any]]] = {
    "01_bubbles": {
        "models": (["llama31_8b"], ["llama4"]),
        "schedules": (["gpipe"], ["zb_h9"]),
        "bars": (["relabelled"], ["bar"]),
        "value": ("switch", "model"),
        "across": ("published", "cluster"),
    },
    "02_steady_state": {
        "models": (["qwen3_32b", "gpt_oss_20b"], []),
        "counts": ([8, 16], [7]),
        "estimates": ("sync", "async"),
        "value": ("bubble_causal", "devices"),
        "down": ("run_id", "model"),
    },
    "03_tuning": {
        "models": (["qwen3_32b"], ["qwen"]),
        "rivals": (["gpipe", "1f1b"], ["pipedream"]),
        "cut": ("search, recompute ahead", "uneven"),
        "value": ("makespan_s", "seconds"),
    },
    "04_closed_forms": {
        "models": (["qwen3_1p7b"], ["qwen3"]),
        "cluster": ("8x_h100", "8x_b200"),
        "convention": ("artifact", "paper"),
    },
    "05_published_throughput": {
        "models": (["gpt_oss_20b"], ["gpt_oss_120b"]),
        "platform": ("8x-a800-80gb-sxm", "8x-h100"),
        "systems_shown": (["fsdp", "mobius", "roundpipe"], ["deepspeed"]),
    },
    "06_predictions": {
        "models": (["qwen3_1p7b"], ["qwen3-1.7b"]),
        "platform": ("8x-rtx4090-24gb", "8x_rtx4090"),
        "platforms": (["8x-a800-80gb-sxm"], ["8x-amd-w7900"]),
        "systems": (["fsdp", "roundpipe"], ["vllm"]),
        "num_devices": ([1, 8], [9]),
        "seq_len_tokens": ([512, 4096], [1000]),
        "value": ("predicted", "guessed"),
    },
}


class Cells:
    """A notebook's cells run in this process; what they would display is kept, of a figure the rows it is drawn of."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, results: Path) -> None:
        monkeypatch.setenv("RPBENCH_RESULTS", str(results))
        self.shown: list[str] = []
        self.read: dict[str, pd.DataFrame] = {}
        real = Experiments.cells

        def cells(experiments: Experiments, name: str) -> pd.DataFrame:
            if name not in self.read:
                self.read[name] = real(experiments, name)
            return self.read[name]

        monkeypatch.setattr(Experiments, "cells", cells)
        for name in ("picture", "rows", "say"):
            monkeypatch.setattr(shown_by, name, lambda *shown: self.shown.extend(map(str, shown)))
        for module in (figure2, figure3, figure5, figure17, predicted, predicted_curves, prediction, steady_state,
                       systems, timelines, tuning):  # fmt: skip
            for name in [name for name in vars(module) if name.startswith("draw")]:
                monkeypatch.setattr(module, name, lambda *drawn: " ".join(map(_text, drawn)))

    def run(
        self, path: Path, parameters: dict[str, Any] | None = None, exercise: str = "", *, only_check: bool = False
    ) -> list[str]:
        """Everything that a notebook shows, as text, with parameters set and its exercise answered.

        Args:
            only_check: parameters, imports, exercise and check alone.
        """
        space: dict[str, Any] = {}
        self.shown.clear()
        code = [cell for cell in jupytext.read(path).cells if cell.cell_type == "code"]
        for cell in [*code[:2], *code[-2:]] if only_check else code:
            tree = ast.parse(cell.source)
            last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
            exec(compile(tree, path.name, "exec"), space)
            if isinstance(last, ast.Expr):
                self.shown.append(_text(eval(compile(ast.Expression(last.value), path.name, "eval"), space)))
            if "parameters" in cell.metadata.get("tags", ()):
                space |= parameters or {}
            if "exercise" in cell.metadata.get("tags", ()):
                exec(exercise, space)
        return list(self.shown)


def _text(shown: Any) -> str:
    return shown.to_csv() if isinstance(shown, pd.DataFrame) else str(shown)


@pytest.fixture
def cells(monkeypatch: pytest.MonkeyPatch, full_results: Path) -> Cells:
    return Cells(monkeypatch, full_results)


def _path(stem: str) -> Path:
    return next(path for path in notebooks() if path.stem == stem)


def test_they_are_numbered_and_together_show_figures_10_to_17() -> None:
    assert [path.stem[:3] for path in notebooks()] == ["01_", "02_", "03_", "04_", "05_", "06_"]
    text = "\n".join(cell.source for path in notebooks() for cell in jupytext.read(path).cells)
    headings = re.findall(r"^## Figures? (\d+)(?: and (\d+))?", text, re.MULTILINE)
    assert {int(number) for pair in headings for number in pair if number} >= set(range(10, 18))


@_EVERY
def test_a_notebook_asks_first_answers_and_ends_with_an_exercise(path: Path) -> None:
    found = jupytext.read(path).cells
    code = [cell for cell in found if cell.cell_type == "code"]
    assert found[0].cell_type == "markdown"
    assert found[0].source.splitlines()[0].endswith("?")
    assert code[0].metadata["tags"] == ["parameters"]
    assert [cell.metadata.get("tags") for cell in found[-2:]] == [["exercise"], ["check"]]
    assert found[-3].source.startswith("## Exercise\n")
    assert found[-5].source == "## Answer"
    assert found[-4].source.startswith("say(")
    assert "judge(" in found[-1].source
    assert not any(cell.source.lstrip().startswith(("def ", "for ", "class ")) for cell in code)


def test_every_parameter_of_a_notebook_but_folder_and_headings_is_varied_below() -> None:
    for path in notebooks():
        code = next(cell for cell in jupytext.read(path).cells if cell.metadata.get("tags") == ["parameters"])
        names = {name for line in re.findall(r"^([\w, ]+) = ", code.source, re.MULTILINE) for name in line.split(", ")}
        assert names - {"results", "down", "across", "value"} <= set(CHANGES[path.stem]), path.stem


@_SOME
def test_parameters_change_what_is_shown_and_the_header_names_what_is_read(path: Path, cells: Cells) -> None:
    before = cells.run(path)
    assert set(cells.read) - {"steady_causal"} == set(needs(jupytext.read(path)))  # that one may be missing
    for name, (other, unknown) in CHANGES[path.stem].items():
        assert cells.run(path, {name: other}) != before, f"{name} does nothing"
        with pytest.raises(ValueError, match=r"choose among|take some of"):
            cells.run(path, {name: unknown})


# Answers to the exercises on the made-up records, and what is said of them.
ANSWERS = [
    ("01_bubbles", "num_microbatches = 30", "Right. With 30 microbatches it idles 18.92 %, RoundPipe 19.07 %"),
    ("01_bubbles", "num_microbatches = 29", "Not yet. With 29 microbatches it idles 19.44 %, .*: not less"),
    ("01_bubbles", "num_microbatches = 31", "Not yet. .*: less, but a smaller step does it too"),
    ("02_steady_state", "guess_percent = 1.5", "Right. 60 calls of 12 microbatches leave [012]"),
    ("02_steady_state", "guess_percent = 20", "Not yet. 60 calls of 12 microbatches leave less idle than 20 %"),
    ("03_tuning", "own_cut = '5-4-4-4-4-4-4-3'", "Right. The step takes"),
    ("03_tuning", "own_cut = '3-4-4-4-4-4-4-5'", "Not yet. .*: not shorter"),
    ("03_tuning", "own_cut = '4-4'", "Not yet. That is no cut of this model for this schedule"),
    ("04_closed_forms", "link_bytes_per_s = 32e9 * 5.75", "Right. Over 184 GB/s reloading takes 2.9"),
    (
        "04_closed_forms",
        "link_bytes_per_s = 32e9",
        "Not yet. Over 32 GB/s reloading takes 16.78 ms, recomputing takes 2.92",
    ),
    ("05_published_throughput", "usd_per_hour = 2.32 * 84691.82 / 65416.83", "Right. For 3.00"),
    ("05_published_throughput", "usd_per_hour = 8.16", "Not yet. For 8.16 US dollars .* cost 26.76 .* 9.85"),
    ("06_predictions", "longest = 2048", "Right. With 2,048 tokens a sequence, 94"),
    ("06_predictions", "longest = 1024", "Not yet. .*, but a longer one keeps 90% too"),
    ("06_predictions", "longest = 4096", "Not yet. .*: less than 90"),
    ("06_predictions", "longest = 3000", "Not yet. Nothing is predicted of 3,000 tokens"),
]


@pytest.mark.parametrize("stem, exercise, said", ANSWERS)
def test_the_check_tells_right_from_wrong(stem: str, exercise: str, said: str, cells: Cells) -> None:
    cells.run(_path(stem), exercise=exercise, only_check=True)
    assert re.search(said, cells.shown[-2].replace("*", "")), cells.shown[-2]


@_SOME
def test_the_cells_of_a_notebook_run_one_after_another(
    path: Path, full_results: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RPBENCH_RESULTS", str(full_results))
    monkeypatch.setattr(shown_by, "png_bytes", lambda figure: _DOT)  # drawn, but not rasterised
    exec(compile(jupytext.writes(jupytext.read(path), "py"), str(path), "exec"), {})
    assert "Markdown object" in capsys.readouterr().out


# --- headless ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_headless_execution_keeps_what_was_shown(
    full_results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(  # in the kernel too, made-up records answer their cells
        "from analysis.records import identity\nidentity.problem = lambda *_: None\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(tmp_path), str(Path(__file__).parents[2]))))
    written = execute(_path(HEADLESS), full_results, tmp_path)
    assert written == tmp_path / f"{HEADLESS}.ipynb"
    found = json.loads(written.read_text(encoding="utf-8"))["cells"]
    kinds = {kind for cell in found for output in cell.get("outputs", ()) for kind in output.get("data", ())}
    assert {"image/png", "text/html", "text/markdown"} <= kinds
    answer = "".join(found[-4]["outputs"][0]["data"]["text/markdown"])
    assert "simulated N = 8: 5.00 to 5.00 %" in answer  # the made-up records: 40 / N percent
    assert "**Open.**" in "".join(found[-1]["outputs"][0]["data"]["text/markdown"])


def test_no_kernel_starts_for_records_that_are_not_there(tmp_path: Path) -> None:
    class NoKernel(Kernel):
        def run(self, content: Any) -> None:
            raise AssertionError("started")

    with pytest.raises(
        MissingRuns,
        match=r"experiment=figure17 has not been run here: python -m rpbench -m experiment=figure17",
    ):
        execute(_path(HEADLESS), tmp_path, tmp_path / "out", NoKernel(tmp_path))
    assert not (tmp_path / "out").exists()


@pytest.fixture
def written(tmp_path: Path) -> Callable[..., Path]:
    def write(name: str, *sources: str) -> Path:
        path = tmp_path / f"{name}.py"
        path.write_text("".join(f"# %%\n{source}\n\n" for source in ('# %% tags=["parameters"]\nx = 1', *sources)))
        return path

    return write


@pytest.fixture
def kernel(tmp_path: Path) -> Iterator[Kernel]:
    with Kernel(tmp_path) as running:
        yield running


def _texts(path: Path) -> list[str]:
    found = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return ["".join(output.get("text", "")) for cell in found for output in cell.get("outputs", ())]


@pytest.mark.slow
def test_notebooks_of_one_kernel_do_not_see_each_other_and_a_broken_one_is_named(
    written: Callable[..., Path], kernel: Kernel, tmp_path: Path
) -> None:
    first = written("first", "import os\nmine = 7\nprint(os.getpid(), x)")
    second = written("second", "import os\nprint(os.getpid(), 'mine' in globals())")
    out = tmp_path / "out"
    (said,) = _texts(execute(first, tmp_path, out, kernel))
    pid = said.split()[0]
    assert said == f"{pid} 1\n"
    with pytest.raises(CellExecutionError, match="went wrong"):
        execute(written("broken", "raise RuntimeError('went wrong')"), tmp_path, out, kernel)
    assert _texts(execute(second, tmp_path, out, kernel)) == [f"{pid} False\n"]
    with pytest.raises(Exception, match=r"[Kk]ernel"):
        execute(written("dead", "import os\nos._exit(1)"), tmp_path, out, kernel)
    (after,) = _texts(execute(second, tmp_path, out, kernel))
    assert after.endswith(" False\n")
    assert not after.startswith(pid), "a new kernel for the next one"
