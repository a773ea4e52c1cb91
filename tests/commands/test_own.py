"""What is the user's own: found outside the clone and named apart; what a wrong word and a run are answered with."""

import json
import os
from contextlib import redirect_stdout

import pytest

from rpbench import places, registry
from rpbench.cli import dispatch
from rpbench.config.loading import load
from rpbench.records.describe import label

MODEL = "# Mine.\nname: mine\nnum_layers: 4\nhidden: 64\nheads: 2\nvocab: 99\n"
SCHEDULE = """
from baselines.synchronous.gpipe import gpipe
from rpbench.registry import schedule

@schedule("NAME", source="here")
def own(shape):
    return gpipe(shape)
"""
SMALL = ("num_devices=2", "num_microbatches=2")


@pytest.fixture
def place(tmp_path):
    folder = tmp_path / "place"
    for group in ("model", "schedule"):
        (folder / group).mkdir(parents=True)
    (folder / "model" / "mine.yaml").write_text(MODEL)
    return folder


@pytest.mark.parametrize("kind", ["model", "cluster", "gpu", "schedule"])
def test_new_writes_a_file_that_runs_at_once(kind, rpbench, tmp_path):
    status, (said,), err = rpbench("new", kind, "my_own")
    assert status == 0
    assert said["command"] in err
    assert "path: [own]" in (tmp_path / "rpbench.yaml").read_text()
    words = {"model": (), "cluster": ("model=tiny_gpt",), "gpu": ("model=tiny_gpt",), "schedule": ("num_devices=3",)}
    chosen = "cluster=4x_my_own" if kind == "gpu" else f"{kind}=my_own"
    status, (row,), _ = rpbench(chosen, *words[kind], "num_microbatches=4")
    assert (status, row["status"]) == (0, "ok")
    assert row["cluster" if kind == "gpu" else kind] == chosen.partition("=")[2]
    assert rpbench("new", kind, "my_own")[0] == 2  # nothing is written over


def test_what_new_writes_in_a_clone_leaves_the_clones_own_files_out(rpbench, tmp_path):
    """The folder of a clone was the place, and every later run there was refused for `conf/config.yaml`."""
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "config.yaml").write_text("hydra:\n  run:\n    dir: .\n")
    assert rpbench("new", "schedule", "deeper")[0] == 0
    assert rpbench("schedule=deeper", *SMALL)[0] == 0


def test_the_schedule_that_new_writes_is_drawn_in_it(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    dispatch(("new", "schedule", "deeper"))
    capsys.readouterr()
    assert dispatch(("show", "schedule=deeper", "num_devices=3", "num_microbatches=4")) == 0
    rows = [line.partition(": ")[2] for line in capsys.readouterr().out.splitlines() if line[0].isdigit()]
    text = (tmp_path / "own" / "schedule" / "deeper.py").read_text()
    drawn = [line.split(maxsplit=2)[2] for line in text.splitlines()[5:8]]
    assert rows == drawn


@pytest.mark.slow
def test_the_schedule_that_new_writes_trains_like_plain_training(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    dispatch(("new", "schedule", "deeper"))
    capsys.readouterr()
    status = dispatch(("schedule=deeper", "backend=virtual", "model=tiny_gpt", "verify=true", "dtype=float64", *SMALL))
    assert status == 0
    assert json.loads(capsys.readouterr().out)["grad_max_abs_diff"] == 0


@pytest.mark.parametrize("words", [("new",), ("new", "model"), ("new", "house", "x"), ("new", "model", "1x")])
def test_new_says_how_it_is_written(words, rpbench):
    status, _, err = rpbench(*words)
    assert status == 2
    assert "rpbench new model" in err or "a letter first" in err


@pytest.mark.parametrize(
    "name, group", [("llama31_8b", "model"), ("8x_a800", "cluster"), ("gpipe", "schedule"), ("l40s", "gpu")]
)
def test_new_takes_no_name_that_is_taken(name, group, rpbench):
    assert rpbench("new", group, name)[0] == 2


@pytest.mark.parametrize("name", ["null", "true", "yes", "off", "nan"])
def test_new_takes_no_name_that_is_no_text(name, rpbench, tmp_path):
    """`model=null` chooses nothing, and `name: yes` in a file is true: the command that `new` prints was refused."""
    status, _, err = rpbench("new", "model", name)
    assert (status, list(tmp_path.rglob("model/*"))) == (2, [])
    assert f"name '{name}': a YAML file or a command line takes it for no text; take another, my_{name}" in err


@pytest.mark.parametrize(
    "old, new, rule",
    [
        ("sustained_16: 0.55", "sustained_16: 1.5", "a share of the peak, at most 1"),
        ("multiprocessors: 142", "multiprocesors: 142", "did you mean multiprocessors?"),
        ("multiprocessors: 142", "", "has no multiprocessors"),
        ("  flash2: 160.0e+12", "  flash9: 1.0", "rates of flash1, flash2, flash3"),
    ],
)
def test_a_device_of_ones_own_that_cannot_be_is_refused(old, new, rule, rpbench, tmp_path):
    assert rpbench("new", "gpu", "my_own")[0] == 0
    path = tmp_path / "own" / "gpu" / "my_own.yaml"
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    status, _, err = rpbench("advise", "model=tiny_gpt", "gpu=my_own", "num_devices=2")
    assert status == 2
    assert rule in err


@pytest.mark.parametrize("way", ["flag", "variable", "file"])
def test_each_way_of_naming_a_place_finds_what_is_in_it(way, rpbench, place, tmp_path, monkeypatch):
    words = ("model=mine", *SMALL)
    assert rpbench(*words)[0] == 2
    if way == "variable":
        monkeypatch.setenv("RPBENCH_PATH", f"{place}{os.pathsep}")
    if way == "file":
        (tmp_path / "rpbench.yaml").write_text("path: place\n")
    flag = ("--config-dir", "place") if way == "flag" else ()
    status, (row,), _ = rpbench(*flag, *words)
    assert (status, row["model"], row["config"]["model"]["hidden"]) == (0, "mine", 64)
    (listed,) = [row for row in rpbench("list", "models", *flag)[1] if row["name"] == "mine"]
    assert listed == {"name": "mine", "says": "Mine.", "path": str(place / "model" / "mine.yaml")}
    if way == "flag":
        assert rpbench(*words)[0] == 2  # one command's folder is no other's


def test_a_sweep_takes_orders_in_files_beside_schedules(rpbench, tmp_path):
    words, order = ("-m", "schedule=1f1b,order.txt", *SMALL), tmp_path / "order.txt"
    for name in ("gpipe", "zb_h1"):
        with order.open("w") as file, redirect_stdout(file):
            assert dispatch(("show", f"schedule={name}", *SMALL)) == 0
        (first, second), again = rpbench(*words)[1], rpbench(*words)[1]
        (alone,) = rpbench(f"schedule={name}", *SMALL)[1]
        assert (first["schedule"], second["schedule"]) == ("1f1b", name)
        assert second["makespan_s"] == alone["makespan_s"]
        assert [row["run_id"] for row in again] == [first["run_id"], second["run_id"]]
    assert rpbench("schedule=absent.txt", *SMALL)[0] == 2


def test_an_own_experiment_is_swept(rpbench, place):
    (place / "experiment").mkdir()
    text = "# @package _global_\nhydra:\n  sweeper:\n    params:\n      model: mine,tiny_gpt\n      num_devices: 2\n"
    (place / "experiment" / "try_mine.yaml").write_text(text)
    status, rows, _ = rpbench("-m", "experiment=try_mine", "num_microbatches=2", "--config-dir=place")
    assert (status, [row["model"] for row in rows]) == (0, ["mine", "tiny_gpt"])
    alone = ("experiment=try_mine", "num_microbatches=2", "--config-dir=place", "num_devices=2")
    assert "experiment=try_mine is a sweep over model, and without -m this is one run" in rpbench(*alone)[2]
    assert "without -m" not in rpbench(*alone, "model=mine")[2]
    assert "--config-dir: plaice is no folder" in rpbench("experiment=try_mine", "--config-dir=plaice")[2]


@pytest.mark.parametrize(
    "group, text, expected",
    [
        ("experiment", "num_devices: 2\n", "experiment/bent: its keys are those of a whole run; begin the file with"),
        (
            "experiment",
            "# @package _global_\nnum_device: 2\n",
            "experiment/bent: unknown key 'num_device'; did you mean",
        ),
        ("experiment", "# @package _global_\nnum_devices: [2]\n", "experiment/bent: num_devices=[2]: a whole number"),
        (
            "model",
            "defaults: [bent, _self_]\n",
            "a file of it is none that Hydra reads (its defaults lead back to it)",
        ),
    ],
    ids=["no package", "an unknown key", "a list", "itself"],
)
def test_a_wrong_file_of_options_is_told_by_its_key(group, text, expected, rpbench, place):
    (place / group).mkdir(exist_ok=True)
    (place / group / "bent.yaml").write_text(text)
    status, rows, err = rpbench(f"{group}=bent", *SMALL, "--config-dir=place")
    assert (status, rows) == (2, [])
    assert expected in err


def test_an_edited_schedule_is_a_new_run(rpbench, place):
    path = place / "schedule" / "own.py"
    path.write_text(SCHEDULE.replace("NAME", "own_order"))
    words = ("--config-dir", "place", "schedule=own_order", *SMALL)
    first = rpbench(*words)[1][0]
    assert rpbench(*words)[1][0]["run_id"] == first["run_id"]
    path.write_text(path.read_text() + "# another\n")
    assert rpbench(*words)[1][0]["run_id"] != first["run_id"]
    assert "own_order" not in registry.entries()


@pytest.mark.parametrize(
    "text, expected",
    [
        ("import nothing_of_the_kind\n", "line 1: ModuleNotFoundError"),
        ("x = 1\ndef f(:\n", "line 2: SyntaxError"),
        (SCHEDULE.replace("NAME", "1f1b"), "two schedules are named '1f1b'"),
        ("import sys\nsys.exit('usage')\n", "line 2: SystemExit: usage"),
    ],
)
def test_a_broken_schedule_file_is_named_with_its_line(text, expected, rpbench, place):
    (place / "schedule" / "broken.py").write_text(text)
    status, _, err = rpbench("--config-dir", "place", "schedule=broken", *SMALL)
    assert status == 2
    assert "broken.py" in err
    assert expected in err
    assert "Traceback" not in err


def test_a_broken_schedule_file_stops_only_itself(rpbench, place):
    own = SCHEDULE.replace("NAME", "own_order")
    (place / "schedule" / "own.py").write_text(own)
    broken = place / "schedule" / "broken.py"
    broken.write_text(own.replace("own_order", "half_read") + "def f():\n    return 1 / 0\n\nf()\n")
    told = ""
    for name in ("1f1b", "own_order"):
        status, (row,), err = rpbench("--config-dir", "place", f"schedule={name}", *SMALL)
        assert (status, row["schedule"]) == (0, name)
        told += err
    assert told.count(f"left out: {broken}, line 9: ZeroDivisionError") == 1  # of one process
    status, rows, err = rpbench("--config-dir", "place", "schedule=half_read", *SMALL)
    assert (status, rows) == (2, [])
    status, (row,), err = rpbench("--config-dir", "place", "-m", "schedule=1f1b,half_read,broken", *SMALL)
    assert (status, row["schedule"]) == (1, "1f1b")
    assert "2 (schedule=broken num_devices=2 num_microbatches=2): " + f"{broken}, line 9: ZeroDivisionError" in err
    assert "broken.py, line 9, in f: return 1 / 0" in err
    assert "3 cells: 1 done, 2 failed" in err
    assert not {"broken", "half_read"} & {row["name"] for row in rpbench("list", "schedules", "--config-dir=place")[1]}
    broken.write_text(own.replace("own_order", "half_read"))
    registry._entries_of.cache_clear()  # as a new process
    assert rpbench("--config-dir", "place", "schedule=half_read", *SMALL)[0] == 0


RETURNS = """
from rpbench.ir.action import Action, Kind
from rpbench.ir.schedule import Schedule, Shape
from rpbench.registry import schedule


@schedule("broken", source="ours")
def broken(shape):
    row = lambda rank: [Action(kind, rank, mb) for mb in range(shape.num_microbatches) for kind in (Kind.F, Kind.B)]
    return {}
"""


@pytest.mark.parametrize("words", [(), ("plan",), ("advise",)])
@pytest.mark.parametrize(
    "returned, expected",
    [
        ("Schedule(shape, ((),) * shape.num_ranks)", "the rows hold 0 actions"),
        ("Schedule(Shape(1, 1, 1), (row(0)[:2],))", "asked for 2 stages on 2 ranks and returned 1 on 1"),
        ("Schedule(shape, [row(rank + 7) for rank in range(shape.num_ranks)])", "stage 7 is out of range"),
        ("Schedule(shape, [(Action(Kind.F, rank),) * 99 for rank in range(2)])", "0F names no microbatch"),
        (
            "Schedule(shape, [[each._replace(microbatch='0') for each in row(rank)] for rank in range(2)])",
            "whole numbers",
        ),
    ],
    ids=["empty", "another shape", "another stage", "no microbatch", "a word"],
)
def test_what_a_generator_returns_is_checked_before_it_is_read(words, returned, expected, rpbench, place, capsys):
    (place / "schedule" / "own.py").write_text(RETURNS.replace("{}", returned))
    run = ("schedule=broken", *SMALL, "cost=constant", "model=tiny_gpt")
    advised = ("model=tiny_gpt", "gpu=rtx4090", "num_devices=2", "sequences_per_step=4", "schedules=broken")
    status = dispatch(("--config-dir", "place", *words, *(advised if words == ("advise",) else run)))
    assert (status, expected in capsys.readouterr().err) == (2, True)


def test_what_a_generator_orders_has_the_registered_name(rpbench, place, capsys, tmp_path):
    """Also where it is another's order, as here GPipe's: the text that `show` prints runs under its own name."""
    (place / "schedule" / "own.py").write_text(SCHEDULE.replace("NAME", "mine_own"))
    assert dispatch(("--config-dir", "place", "show", "schedule=mine_own", *SMALL)) == 0
    shown = capsys.readouterr()
    assert "# name=mine_own " in shown.out
    assert shown.err.startswith("mine_own (")
    (tmp_path / "order.txt").write_text(shown.out)
    _, (row,), err = rpbench("schedule_file=order.txt")
    assert (row["schedule"], err.split()[0]) == ("mine_own", "mine_own")


def test_an_error_in_a_generator_shows_the_calls_from_its_file_on(rpbench, place):
    text = SCHEDULE.replace("NAME", "mine_own").replace("return gpipe(shape)", "return gpipe(7)")
    (place / "schedule" / "own.py").write_text(text)
    status, _, err = rpbench("--config-dir", "place", "schedule=mine_own", *SMALL)
    assert status == 2
    assert "own.py, line 7: AttributeError" in err
    assert "own.py, line 7, in own: return gpipe(7)" in err
    assert "gpipe.py, line" in err


def test_an_error_in_a_generator_is_that_of_its_cells(rpbench, place):
    """They were not applicable, and the sweep ended as if all was well."""
    text = SCHEDULE.replace("NAME", "mine_own").replace("return gpipe(shape)", "return gpipe(7)")
    (place / "schedule" / "own.py").write_text(text)
    words = [word for word in SMALL if not word.startswith("schedule=")]
    status, (row,), err = rpbench("--config-dir", "place", "-m", "schedule=mine_own,1f1b", *words)
    assert (status, row["schedule"]) == (1, "1f1b")
    assert "own.py, line 7, in own: return gpipe(7)" in err
    assert "2 cells: 1 done, 1 failed" in err


@pytest.mark.parametrize(
    "line, expected",
    [
        ("return None", "own of schedule mine_own returned None; a generator returns a Schedule of actions"),
        ("return Schedule(shape, ((('compute', ('0F0',)),),) * 2)", "a generator returns a Schedule of actions"),
        ("return 1 / 0", "broken.py, line 7: ZeroDivisionError: division by zero; mend the file"),
        ("return max([])", "broken.py, line 7: ValueError: max() arg is an empty sequence; mend the file"),
        ("return Schedule(shape, ((('F', 0, 0),),) * 2)", "line 7: ScheduleError: (('F', 0, 0),) is no row: a row has"),
        ("return Schedule(shape, (3, 4))", "line 7: ScheduleError: 3 is no row"),
    ],
)
def test_a_generator_that_returns_no_schedule_is_named(line, expected, rpbench, place):
    text = SCHEDULE.replace("NAME", "mine_own").replace("return gpipe(shape)", line)
    path = place / "schedule" / "broken.py"
    path.write_text(text.replace("import gpipe", "import gpipe; from rpbench.ir.schedule import Schedule"))
    status, rows, err = rpbench("--config-dir", "place", "schedule=mine_own", *SMALL)
    assert (status, rows) == (2, [])
    assert str(path) in err
    assert expected in err


@pytest.mark.parametrize(
    "text, expected",
    [("path: [nowhere]\n", "is no folder"), ("folders: [x]\n", "unknown key 'folders'"), ("path: [", "no YAML")],
)
def test_a_wrong_rpbench_yaml_is_answered(text, expected, rpbench, tmp_path):
    (tmp_path / "rpbench.yaml").write_text(text)
    status, _, err = rpbench(*SMALL)
    assert (status, expected in err) == (2, True)


def test_a_folder_that_holds_too_much_is_refused(rpbench, place, monkeypatch):
    monkeypatch.setattr(places, "MOST_FILES", 3)
    status, _, err = rpbench("--config-dir", "place", *SMALL)
    assert (status, "place holds more than 3 files; name the folder in which model/" in err) == (2, True)


def test_a_name_of_two_files_is_refused(rpbench, place):
    (place / "model" / "tiny_gpt.yaml").write_text(MODEL)
    status, _, err = rpbench("--config-dir", "place", "model=tiny_gpt", *SMALL)
    assert (status, "two files have this name" in err) == (2, True)


def test_all_missing_keys_are_said_at_once_with_units(rpbench, place):
    (place / "model" / "half.yaml").write_text("name: half\nhidden: 64\n")
    _, _, err = rpbench("--config-dir", "place", "model=half", *SMALL)
    assert all(f"  {key}: " in err for key in ("num_layers", "heads", "vocab"))
    _, _, err = rpbench("model=qwen3_1p7b", "cost=analytic", *SMALL)
    assert "  matmul_flops_per_s: 362.0e+12   # matrix peak" in err
    assert "  memory_efficiency: 0.85" in err
    assert "above 0, at most 1" in err


def test_a_changed_shape_has_another_name_and_no_corrections(rpbench):
    words = ("cluster=8x_h100", "cost=analytic", "num_devices=2", "num_microbatches=2")
    status, (row,), err = rpbench("model=llama31_8b", "model.vocab=64000", *words)
    assert (status, row["model"]) == (0, "llama31_8b-vocab-64000")
    assert row["config"]["model"]["published_name"] is None
    assert row["notes"][0] in err
    assert "without the corrections" in err
    assert rpbench("model=llama31_8b", "model.vocab=128256", *words)[1][0]["model"] == "llama31_8b"


def test_a_changed_shape_takes_the_time_of_one_that_nobody_measured():
    """The same shape under a name of its own, without published numbers, is the reference."""
    words = ["cluster=8x_h100", "cost=analytic", "model=llama31_8b", "model.inner=8192"]
    changed = load(words).model
    plain = load([*words, "model.name=plain", "model.published_name=null"]).model
    meant = load([*words, "model.name=kept", "model.published_name=llama-3.1-8b"]).model
    assert changed.published_name is plain.published_name is None
    assert (meant.name, meant.published_name) == ("kept", "llama-3.1-8b")
    longer = load(["model=llama31_8b", "model.seq_len=4096"]).model
    assert (longer.name, longer.published_name) == ("llama31_8b-seq_len-4096", "llama-3.1-8b")


def test_sizes_come_from_the_cluster():
    assert load(["cluster=8x_h100", "cluster.num_devices=4"]).num_devices == 4
    assert load(["cluster=8x_h100", "num_devices=2"]).num_devices == 2
    assert load([]).num_devices == 8


@pytest.mark.parametrize(
    "option, rule", [("pipedream schedule.replicas=2", "a list"), ("roundpipe schedule.round_size=x", "a whole number")]
)
def test_an_option_of_another_kind_is_refused(option, rule, rpbench):
    status, _, err = rpbench(*f"schedule={option}".split())
    assert (status, rule in err) == (2, True)


CHARGED = ["model=qwen3_1p7b", "cost=analytic", "cluster=8x_rtx4090"]


@pytest.mark.parametrize(
    "words, expected",
    [
        (CHARGED, ("bytes", "none")),
        ([*CHARGED, "schedule=roundpipe"], ("bytes", "all")),
        ([*CHARGED, "schedule=roundpipe", "offload=none"], ("hops", "none")),
        ([*CHARGED, "charge=hops"], ("hops", "none")),
        ([*CHARGED, "schedule=vocab_parallel"], ("bytes", "none")),
        ([*CHARGED, "mode=predict", "schedule=roundpipe"], ("hops", "none")),
        (["model=qwen3_1p7b", "cost=published"], ("hops", "none")),
        (["cluster=8x_rtx4090"], ("hops", "none")),
    ],
)
def test_everything_is_charged_where_it_is_known(words, expected):
    found = load(words)
    assert (found.charge, found.offload) == expected


def test_the_line_about_a_run_says_what_is_left_out(rpbench):
    words = ("model=tiny_gpt", "cost=constant", *SMALL, "model.num_layers=4")
    assert "left out: the optimizer (charged with cluster=NAME charge=bytes)" in rpbench("schedule=1f1b", *words)[2]
    assert "left out" in rpbench("schedule=1f1b", *words, "cluster=8x_rtx4090", "charge=hops")[2]
    assert "left out" not in rpbench("schedule=1f1b", *words, "cluster=8x_rtx4090", "charge=bytes")[2]
    assert "left out: transfers of weights and gradients" in rpbench("schedule=roundpipe", *words, "partition=even")[2]
    charged = ["schedule=zero_offload", words[0], *words[2:], "cost=analytic", "charge=bytes", "cluster=8x_rtx4090"]
    assert "left out: the host's update after the last backward" in rpbench(*charged)[2]
    assert "left out" not in rpbench(*charged, "num_steps=3")[2]
    assert "left out" not in rpbench("schedule=1f1b", *SMALL)[2]


def test_runs_that_differ_have_labels_that_do(rpbench):
    asked = [(), ("seed=1",), ("cost=constant",), ("cost=constant", "cost.hop_ms=1"), ("num_steps=2",), ("prefetch=2",)]
    rows = [rpbench(*SMALL, *words)[1][0] for words in asked]
    assert len({row["run_id"] for row in rows}) == len(asked)
    assert len({label(row) for row in rows}) == len(asked)
    assert len({label(row).partition(" [")[0] for row in rows}) == len(asked)  # in words, not by the id alone


def test_a_terminal_gets_a_table_and_json_if_asked(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert dispatch(SMALL) == 0
    out, err = capsys.readouterr()
    assert "makespan  9 slots" in out  # (m + p - 1) * 3: a backward takes two
    assert "{" not in out
    assert "\x1b" not in out + err
    assert dispatch(("--json", *SMALL)) == 0
    assert json.loads(capsys.readouterr().out)["status"] == "ok"
    assert "RPBENCH_JSON" not in os.environ


ODD = [
    "+schedule=1f1b",
    "++schedule=1f1b",
    "schedule=null",
    "=1f1b",
    "~schedule",
    "~model.hidden",
    "schedule=1f1b,gpipe",
    "foo/bar=baz",
    "num_devices=",
    "num_devices=8.5",
    "num_microbatches=${nope}",
    "num_microbatches=${nope:3}",
    "seed=abc",
    "verify=maybe",
    "results_dir=",
    "results_dir=null",
    "dtype=float8",
    "checkpoint=3",
    "model=tiny_gpt ~model.hidden",
    "model@foo=tiny_gpt",
    "hydra/launcher=foo",
    "cost=constant cost.forward_ms=abc",
    "mode=predict mode.sequences=x",
    "-m num_devices=range(1",
    "-m schedule=glob(",
    "-m hydra/sweeper=foo",
    "show foo",
    "completion csh",
    "--cfg",
    "--cfg hydra",
    "--cfg job schedule=gpip",
    "--cfg job -m schedule=gpipe",
    "--config-dir",
]
LEAKS = ("Traceback", "omegaconf", "defaults list", "Interpolation", "merging", "Optional", "converted", "viable")


@pytest.mark.parametrize(
    "words", [word if n % 3 == 0 else pytest.param(word, marks=pytest.mark.slow) for n, word in enumerate(ODD)]
)
def test_no_words_of_what_is_underneath_leak(words, rpbench, tmp_path):
    status, rows, err = rpbench(*words.split())
    assert (status, rows) == (2, [])
    assert not [leak for leak in LEAKS if leak in err], err
    assert len(err.splitlines()) <= 8
    assert not list(tmp_path.rglob("record.json"))
