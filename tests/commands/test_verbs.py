"""Verbs: help and version of each, what can be listed, the forms of a schedule, torch's table read again."""

import json
import subprocess
import sys

import pytest

from rpbench.cli import all_verbs, dispatch

SIZES = ("schedule=zb_v", "num_devices=2", "num_microbatches=4")


@pytest.mark.parametrize("verb", sorted(all_verbs()))
@pytest.mark.parametrize("flag", ["--help", "-h", "--version"])
def test_every_verb_answers_for_itself(verb, flag, capsys):
    assert dispatch((verb, flag)) == 0
    out, err = capsys.readouterr()
    assert out.startswith("rpbench " if flag == "--version" else f"usage: rpbench {verb} ")
    assert "ydra" not in out + err


def test_the_version_is_ours(capsys):
    assert dispatch(("--version",)) == 0
    assert capsys.readouterr().out.split()[0] == "rpbench"


def test_help_has_every_verb(capsys):
    assert dispatch(("--help",)) == 0
    out = capsys.readouterr().out
    assert all(f"\n    {verb}" in out for verb in all_verbs())


@pytest.mark.parametrize(
    "what, name",
    [
        ("schedules", "1f1b"),
        ("models", "llama31_8b"),
        ("clusters", "8x_a800"),
        ("experiments", "figure10"),
        ("gpus", "l40s"),
        ("clusters", "dgx_h100"),
        ("models", "deepseek_v3"),
    ],
)
def test_a_list_has_a_line_each(what, name, capsys):
    assert dispatch(("list", what)) == 0
    rows = {row["name"]: row["says"] for row in map(json.loads, capsys.readouterr().out.splitlines())}
    assert rows[name]
    assert all(len(says) < 400 for says in rows.values())


@pytest.mark.parametrize("words, expected", [((), "what"), (("modles",), "modles"), (("models", "--jsn"), "--jsn")])
def test_a_wrong_list_is_answered(words, expected, capsys):
    assert dispatch(("list", *words)) == 2
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize(
    "form, expected",
    [
        ("text", "# rpbench-schedule 1"),
        ("torch_csv", "0F0,"),
        ("chrome_trace", "traceEvents"),
        ("megatron_layout", "--pipeline-model-parallel-layout"),
        ("torchtitan", "pipeline_parallel_schedule"),
    ],
)
def test_a_schedule_in_another_form(form, expected, capsys):
    schedule = "schedule=interleaved_1f1b" if form == "megatron_layout" else SIZES[0]  # Megatron has no V
    assert dispatch(("show", *SIZES[1:], schedule, "model=tiny_gpt", f"format={form}")) == 0
    out, err = capsys.readouterr()
    assert expected in out
    assert "free of deadlock" in err


def test_an_unknown_form_has_the_known_ones(capsys):
    assert dispatch(("show", *SIZES, "format=csv")) == 2
    assert "torch_csv" in capsys.readouterr().err


def test_torchs_table_runs_like_the_schedule_it_is_of(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert dispatch(("show", *SIZES, "format=torch_csv")) == 0
    (tmp_path / "order.csv").write_text(capsys.readouterr().out)
    assert dispatch(("schedule_file=order.csv",)) == 0
    read = json.loads(capsys.readouterr().out)
    assert dispatch(SIZES) == 0
    made = json.loads(capsys.readouterr().out)
    assert read["makespan_s"] == made["makespan_s"]
    assert (read["schedule"], read["num_devices"], read["num_microbatches"]) == ("order", 2, 4)


@pytest.mark.parametrize("words", [("compare", "/etc/passwd", "b"), ("explain", "**", "b"), ("report",)])
def test_a_folder_without_records_is_refused_before_what_draws_is_imported(words, tmp_path):
    code = "import sys; from analysis.verbs import VERBS; from rpbench.cli import dispatch, register; register(VERBS); "
    code += "print(dispatch(sys.argv[1:]), 'matplotlib' in sys.modules or 'pandas' in sys.modules)"
    command = [sys.executable, "-c", code, *words, f"results_dir={tmp_path / 'absent'}"]
    asked = subprocess.run(command, capture_output=True, text=True, check=True)
    assert asked.stdout.split() == ["2", "False"]
    assert str(tmp_path / "absent") in asked.stderr
