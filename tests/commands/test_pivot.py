"""`pivot` and `query`: medians that say what they are of, baselines of any type, and what is refused."""

import io
import json
import shutil
from contextlib import redirect_stderr, redirect_stdout

import pandas
import pytest

from rpbench.cli import dispatch
from rpbench.commands.recorded.pivot import Pivot, _merged
from rpbench.records import provenance
from rpbench.records.differing import differing

SWEEP = ("-m", "schedule=1f1b,gpipe", "num_microbatches=4,8", "cost=constant")
ASKED = ("pivot", "--rows", "schedule", "--columns", "num_microbatches", "--value", "makespan_s")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Results of four runs."""
    results = tmp_path_factory.mktemp("pivot") / "results"
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        assert dispatch((*SWEEP, "num_devices=2", f"results_dir={results}")) == 0
    return results


@pytest.fixture
def swept(rpbench, made, tmp_path):
    """The command line in a folder with a copy of them."""
    shutil.copytree(made, tmp_path / "results")
    return rpbench


def test_a_cell_is_the_run_of_its_keys(swept):
    """(m + p - 1) slots of 3 ms: 15 and 27 ms with two devices."""
    status, rows, err = swept(*ASKED)
    assert status == 0
    assert rows[0] == {"schedule": "1f1b", "4": pytest.approx(0.015), "8": pytest.approx(0.027)}
    assert "median" not in err
    status, rows, _ = swept(*ASKED, "--baseline", "4")  # a column whose name is a number
    assert (status, rows[0]["8"]) == (0, pytest.approx(27 / 15))


def test_a_cell_of_several_runs_says_so(swept):
    swept(*SWEEP, "num_devices=4")
    assert "a cell is the median of up to 2 runs that differ in num_devices" in swept(*ASKED)[2]


def test_a_cell_of_runs_by_other_code_says_so(swept, monkeypatch):
    monkeypatch.setattr(provenance, "code_version", lambda: "other")
    swept(*SWEEP, "num_devices=2")
    assert "a cell is the median of up to 2 runs that differ in code_version" in swept(*ASKED)[2]


def _options(number):
    """Groups whose first or last key differs, or whose kind does; a text with marks of JSON."""
    groups = ({"a": number}, {"b": number % 4, "name": "x"}, {"a": number, "name": "x"}, {}, "none", [1, number])
    text = f'{number % 5}, "key": {{'
    return {"cost": groups[number % 6], "text": text, "deep": {"er": {"a": number // 30}}, "seed": number}


@pytest.mark.parametrize(("first", "step"), [(0, 1), (0, 6), (1, 6), (2, 6), (3, 6), (4, 3), (5, 6), (1, 3), (7, 60)])
def test_what_differs_in_a_cell_is_found_in_few_of_its_runs(first, step, monkeypatch):
    """Reading 10,000 configurations took 0.6 s."""
    rows = [
        {"model": "m", "schedule": str(at % 2), "config": _options(at), "choices": {"seed": at, "c": at % 7 < 6}}
        for at in range(first, 600, step)
    ]
    cells = [[row for row in rows if row["schedule"] == name] for name in ("0", "1")]
    expected = {name for cell in cells if len(cell) > 1 for name in differing(cell)}
    read = []
    monkeypatch.setattr("rpbench.commands.recorded.pivot.differing", lambda cell: read.extend(cell) or differing(cell))
    texts = [row | {key: json.dumps(row[key], sort_keys=True) for key in ("config", "choices")} for row in rows]
    (said,) = _merged(pandas.DataFrame(texts), "model", "schedule")
    assert set(said.rpartition("differ in ")[2].split(", ")) == expected
    assert len(read) <= 120


def test_imported_runs_of_one_cell_are_a_median(rpbench, tmp_path):
    """Records of other programs have no overrides."""
    (tmp_path / "runs.csv").write_text("schedule,tokens_per_s,seed\n1f1b,100,1\n1f1b,120,2\n")
    rpbench("import", "csv", str(tmp_path / "runs.csv"), "results_dir=elsewhere")
    status, rows, err = rpbench("pivot", "--rows", "schedule", "--columns", "model", "results_dir=elsewhere")
    assert (status, rows) == (0, [{"schedule": "1f1b", "elsewhere": 110.0}])
    assert "a cell is the median of up to 2 runs that differ in seed" in err


def test_options_that_are_no_fields_of_a_record_are_keys_too(swept):
    swept(*SWEEP, "num_devices=2", "cost.forward_ms=2")
    asked = ("pivot", "--rows", "num_microbatches", "--value", "makespan_s", "--columns")
    _, rows, err = swept(*asked, "cost.forward_ms")
    assert rows[0] == {"num_microbatches": 4, "1.0": pytest.approx(0.015), "2.0": pytest.approx(0.02)}
    assert "differ in schedule\n" in err
    assert "up to 4 runs that differ in schedule, cost.forward_ms" in swept(*asked, "num_devices")[2]
    assert "unknown column 'cost.sideways_ms'" in swept(*asked, "cost.sideways_ms")[2]


def test_slots_are_named_and_not_mixed_with_seconds(swept):
    swept(*SWEEP, "num_devices=2", "cost=unit")
    status, _, err = swept(*ASKED)
    assert status == 2
    assert "some of the runs count slots (cost=unit) and others seconds; take rows=cost" in err
    status, rows, err = swept("pivot", "--rows", "cost", "--columns", "schedule", "--value", "makespan_s")
    assert [row["cost"] for row in rows] == ["constant", "unit"]
    assert "times of cost=unit are slots, the others seconds" in err  # all of them were called slots
    assert "times are slots, not seconds" not in err


def test_slots_stay_slots_over_an_export_and_an_import(rpbench):
    for cost in ("unit", "constant"):
        rpbench("num_devices=2", "num_microbatches=2", f"cost={cost}")
    assert rpbench("export", "out=runs.csv")[0] == rpbench("import", "csv", "runs.csv", "results_dir=back")[0] == 0
    words = ("pivot", "--rows", "schedule", "--columns", "model", "--value", "makespan_s", "results_dir=back")
    status, _, err = rpbench(*words)
    assert (status, "some of the runs count slots" in err) == (2, True)


def test_steps_that_are_updates_within_a_batch_are_named(rpbench):
    """PipeDream updates after every microbatch, so that its step is a quarter of a batch or less."""
    rpbench("-m", "schedule=1f1b,pipedream", "num_devices=2", "num_microbatches=4", "num_steps=3")
    asked = ("pivot", "--rows", "model", "--columns", "schedule", "--value")
    _, rows, err = rpbench(*asked, "step_time_s")
    assert rows[0]["pipedream"] < rows[0]["1f1b"] / 4
    assert "pipedream: updates within a batch, and a step is one update; makespan_s is" in err
    assert "updates" not in rpbench(*asked, "makespan_s")[2]


def test_runs_without_a_choice_are_a_row(swept):
    """Simulations have no backend; none of them may vanish."""
    _, rows, err = swept("pivot", "--rows", "backend", "--columns", "schedule", "--value", "makespan_s")
    assert [row["backend"] for row in rows] == ["none"]
    assert "differ in num_microbatches" in err


WRONG = [
    ((*ASKED[:2], "schedule", "--columns", "schedule", "--value", "makespan_s"), "three keys that differ"),
    ((*ASKED[:-1], "tokens_per_s"), "none of the 4 runs has it"),
    ((*ASKED, "--baseline", "5"), "unknown baseline '5'"),
    ((*ASKED, "--format", "pdf"), "unknown format 'pdf'"),
    ((*ASKED, "out=table.csv"), "choose what it holds"),
    (("query", ""), "selects nothing"),
    (("query", "select nothing from runs"), "query: Binder Error"),
    (("query", "select 1; select 2"), "2 statements"),
]


def test_what_cannot_be_asked_is_answered(swept):
    for words, said in WRONG:
        status, _, err = swept(*words)
        assert (status, said in err, "Traceback" in err) == (2, True, False), (words, err)


def test_documents_hold_what_the_table_does(swept, tmp_path, capsys):
    def text(form, *words):
        assert dispatch((*ASKED[:-1], "num_actions", "--format", form, *words)) == 0
        return capsys.readouterr().out

    assert text("csv").splitlines() == ["schedule,4,8", "1f1b,16.0,32.0", "gpipe,16.0,32.0"]
    assert text("latex").splitlines()[1:3] == [r"schedule & 4 & 8 \\", r"1f1b & 16.0 & 32.0 \\"]
    assert "<td>32.0</td>" in text("html")
    assert text("csv", f"out={tmp_path / 'table.csv'}") == ""
    assert (tmp_path / "table.csv").read_text().startswith("schedule,4,8")


def test_markup_in_names_is_text():
    frame = pandas.DataFrame({"<b>_&{x}": [1.0]}, index=pandas.Index(["<script>"], name="own"))
    assert "<script>" not in Pivot(frame, ()).text("html")
    assert r"<b>\_\&\{x\}" in Pivot(frame, ()).text("latex")
