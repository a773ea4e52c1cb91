"""Verbs: help and version of each, what can be listed, the forms of a schedule, torch's table read again."""

import json
import re
import subprocess
import sys
from dataclasses import asdict

import pytest
from omegaconf import MISSING, OmegaConf

from rpbench import __main__ as entry_point
from rpbench import cli
from rpbench.advice.machine_figures import FIGURES
from rpbench.advice.model_source import TRAINING, USUAL_RANK
from rpbench.cli import all_verbs, dispatch
from rpbench.commands.advising.advise import SECONDS, SEQUENCES_PER_DEVICE
from rpbench.commands.advising.advise_words import OWN, SEQ_LEN
from rpbench.commands.calibrate import DEFAULT_NAME
from rpbench.commands.plan import PartitionRequest
from rpbench.commands.profile import ProfileRequest
from rpbench.commands.recorded.pivot import ASKED
from rpbench.commands.usages import LISTS, usage, usages
from rpbench.config.loading import load

ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="/dev/full is of Linux")
SIZES = ("schedule=zb_v", "num_devices=2", "num_microbatches=4")


@pytest.mark.parametrize("verb", sorted(all_verbs()))
@pytest.mark.parametrize("flag", ["--help", "-h", "--version"])
def test_every_verb_answers_for_itself(verb, flag, capsys):
    assert dispatch((verb, flag)) == 0
    out, err = capsys.readouterr()
    assert out.startswith("rpbench " if flag == "--version" else f"usage: rpbench {verb} ")
    assert "ydra" not in out + err


def test_a_system_without_locks_is_told_where_it_runs(monkeypatch, capsys):
    monkeypatch.setattr(entry_point, "find_spec", lambda name: None)
    with pytest.raises(SystemExit) as ended:
        entry_point.main()
    assert ended.value.code == 2
    assert re.search(r"Linux and macOS.*WSL", capsys.readouterr().err)


@pytest.mark.parametrize(
    "words, kept",
    [
        (("schedule=1f1b",), "finished runs are kept"),
        (("run", "schedule=1f1b"), "finished runs are kept"),
        (("advise", "model=tiny_gpt"), "nothing was written"),
        (("--config-dir", ".", "show", "schedule=1f1b"), "nothing was written"),
        (("import", "csv", "x"), "records that were written before are kept"),
    ],
)
def test_an_interruption_says_what_is_left(words, kept, capsys, monkeypatch):
    def interrupted(arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_dispatch", interrupted)
    assert dispatch(words) == cli.INTERRUPTED
    assert capsys.readouterr().err == f"rpbench: interrupted; {kept}\n"


@pytest.mark.parametrize(
    "words, streams, status",
    [
        ("list workloads", ">&-", 0),
        ("list workloads", "<&- >&- 2>&-", 0),
        ("list workload", "2>&-", 2),
        pytest.param("list workload", "2>/dev/full", 2, marks=ON_LINUX),
        pytest.param("list workloads", ">/dev/full", 2, marks=ON_LINUX),
    ],
)
def test_a_command_that_nobody_hears_ends_with_its_status(words, streams, status, tmp_path):
    line = f"{sys.executable} -m rpbench {words} {streams}"
    ended = subprocess.run(["sh", "-c", line], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (ended.returncode, "Traceback" in ended.stderr, ": ;" in ended.stderr) == (status, False, False)


def test_the_version_is_ours(capsys):
    assert dispatch(("--version",)) == 0
    assert capsys.readouterr().out.split()[0] == "rpbench"


def test_help_has_every_verb(capsys):
    assert dispatch(("--help",)) == 0
    out = capsys.readouterr().out
    assert all(f"\n    {verb}" in out for verb in all_verbs())


def test_without_a_word_there_is_help(capsys):
    assert dispatch(()) == 0
    assert capsys.readouterr().out.startswith("usage: rpbench [-h] [--version] VERB")


@pytest.mark.parametrize("verb", sorted(all_verbs()))
def test_the_help_of_a_verb_has_its_keys(verb, capsys):
    assert dispatch((verb, "--help")) == 0
    told = capsys.readouterr().out.partition("\noptions:")[2]
    for key in re.findall(r"--?[a-z]\w*|\w+=", usage(verb).partition(" ")[2]):
        assert re.search(rf"^  .*{key.strip('-=')}", told, re.MULTILINE) or key == "key=", key


def test_help_tells_the_words_that_are_taken():
    assert usage("list") == f"list {'|'.join(LISTS)} [--json]"


def test_help_tells_the_defaults_that_are_taken():
    keys = {verb: about.get("keys", {}) for verb, about in usages().items()}
    told = {
        verb: dict(word.split("=", 1) for key in own for word in key.split() if "=" in word)
        for verb, own in keys.items()
    }
    assert (told["advise"]["seq_len"], told["advise"]["seconds"]) == (f"{SEQ_LEN}", f"{SECONDS:g}")
    assert f"batch={SEQUENCES_PER_DEVICE} x devices" in keys["advise"]
    assert told["advise"]["lora_rank"] == f"{USUAL_RANK}"
    named = {*told["advise"], "sequences_per_step", "training_mode"}  # of which batch= and finetune= are the words
    assert {*OWN, *FIGURES, *TRAINING} <= named
    model = load(["model=llama31_8b"]).model
    assert (told["advise"]["frozen_layers"], told["advise"]["optimizer_bits"]) == (
        f"{model.frozen_layers}",
        f"{model.optimizer_bits}",
    )
    assert told["calibrate"]["name"] == DEFAULT_NAME
    assert told["profile"]["num_runs"] == f"{ProfileRequest().num_runs}"
    assert {key: value for key, value in ASKED.items() if value}.items() <= told["pivot"].items()
    for key, value in asdict(PartitionRequest()).items():
        assert told["plan"][key] == "false" if value is False else key in told["plan"], key


def test_cfg_job_prints_what_runs(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["schedule=zb_h1", "num_devices=3", "model=llama31_8b", "cost=analytic", "cluster=8x_h100"]
    assert dispatch(("--cfg", "job", *words)) == 0
    composed = OmegaConf.create(capsys.readouterr().out)
    subject = load(words).subject
    assert composed.schedule.name == "zb_h1"
    assert (composed.num_devices, composed.model.num_layers) == (3, subject["model"]["num_layers"])
    assert {key for key, value in composed.items() if value == MISSING} == set()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "words, is_told",
    [
        (("schedule=1f1b", "model=llama31_8b"), True),
        (("schedule=1f1b", "model=llama31_8b", "cost=unit"), False),
        (("schedule=1f1b", "model=llama31_8b", "cost=analytic", "cluster=8x_h100"), False),
        (("schedule=1f1b",), False),
    ],
)
def test_slots_that_nobody_chose_are_said_to_be_such(words, is_told):
    notes = load([*words, "num_devices=4"]).notes
    assert any("cost=unit" in note and "cost=analytic" in note for note in notes) == is_told


@pytest.mark.parametrize(
    "what, name",
    [
        ("schedules", "1f1b"),
        ("schedules", "roundpipe_async"),  # options of a schedule under a name
        ("models", "llama31_8b"),
        ("clusters", "8x_a800"),
        ("experiments", "figure10"),
        ("gpus", "l40s"),
        ("clusters", "dgx_h100"),
        ("models", "deepseek_v3"),
        ("modes", "duel"),
        ("software", "megatron_core"),
        ("ssds", "samsung_990_pro_4tb"),
    ],
)
def test_a_list_has_a_line_each(what, name, capsys):
    assert dispatch(("list", what)) == 0
    rows = {row["name"]: row["says"] for row in map(json.loads, capsys.readouterr().out.splitlines())}
    assert rows[name]
    assert all(len(says) < 400 for says in rows.values())


def test_a_list_says_what_an_experiment_asks_in_whole_sentences(capsys):
    assert dispatch(("list", "experiments")) == 0
    rows = {row["name"]: row["says"] for row in map(json.loads, capsys.readouterr().out.splitlines())}
    assert rows["causal"].startswith("RoundPipe as in figure 17")  # not the command, which its name says
    assert all(says.endswith(".") for says in rows.values())


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
    outs = []
    for word in ("format", "export"):  # one and the same
        assert dispatch(("show", *SIZES[1:], schedule, "model=tiny_gpt", f"{word}={form}")) == 0
        out, err = capsys.readouterr()
        outs.append(out)
    assert outs[0] == outs[1]
    assert expected in outs[0]
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


@pytest.mark.parametrize("schedule", ["zero_3", "bpipe", "roundpipe"])
def test_what_show_prints_runs_like_the_schedule_it_is_of(schedule, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = (f"schedule={schedule}", "num_devices=4", "num_microbatches=8")
    assert dispatch(("show", *words)) == 0
    printed = capsys.readouterr().out
    (tmp_path / "order.txt").write_text(printed)
    assert dispatch(("show", "schedule_file=order.txt")) == 0
    assert capsys.readouterr().out == printed
    spans = []
    for asked in (words, ("schedule_file=order.txt",)):
        assert dispatch(asked) == 0
        spans.append(json.loads(capsys.readouterr().out)["makespan_s"])
    assert spans[0] == spans[1]


ROUNDS = ("schedule=roundpipe", "schedule.round_size=1", "num_microbatches=9", "cost=constant", "num_devices=4")
LAYERS = ("schedule=1f1b", "model=qwen3_1p7b", "cost=analytic", "cluster=8x_rtx4090", "num_microbatches=8")


@pytest.mark.parametrize("words", [(*ROUNDS, "dispatch=dynamic"), (*LAYERS, "recompute=fitting")], ids=("turn", "fit"))
def test_a_plan_takes_as_long_as_its_run(words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert dispatch(("plan", *words)) == 0
    plans = json.loads(capsys.readouterr().out)["plans"]
    assert dispatch((*words, "partition=even")) == 0
    ran = json.loads(capsys.readouterr().out)["makespan_s"]
    assert next(plan["makespan_s"] for plan in plans if plan["method"] == "even") == pytest.approx(ran)


def test_a_plan_is_of_no_file(capsys, tmp_path, monkeypatch):
    """It planned the default schedule instead."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "order.csv").write_text("0F0,0B0\n1F0,1B0\n")
    for word in ("schedule=order.csv", "schedule_file=order.csv"):
        assert dispatch(("plan", word)) == 2
        assert "schedule_file=order.csv: nothing searches a cut for an order of a file" in capsys.readouterr().err


@pytest.mark.parametrize(
    "word",
    [
        *("backend=virtual", "mode=roofline", "tuning_budget=400", "tracker=wandb"),
        *("results_dir=elsewhere", "force=true", "save_timeline=true"),
    ],
)
def test_a_plan_refuses_what_would_change_nothing(word, rpbench):
    status, rows, err = rpbench("plan", "schedule=1f1b", "model=tiny_gpt", "num_devices=2", "cost=constant", word)
    assert (status, rows) == (2, [])
    assert err.splitlines()[-1].startswith(f"rpbench: {word} with plan: ")


def test_a_timeline_that_is_shown_is_that_of_the_run(rpbench, capsys):
    """It left out transfers and the optimizer: 3.4 s, and the run takes 3.9."""
    words = ("schedule=1f1b", *LAYERS[1:], "num_devices=4")
    assert dispatch(("show", *words, "format=chrome_trace")) == 0
    events = json.loads(capsys.readouterr().out)["traceEvents"]
    _, (row,), _ = rpbench(*words)
    assert max(each["ts"] + each["dur"] for each in events if each["ph"] == "X") / 1e6 == pytest.approx(
        row["makespan_s"]
    )


@pytest.mark.parametrize("word", ["backend=virtual", "save_timeline=true", "cost=unit"])
def test_a_profile_refuses_what_would_change_nothing_and_slots(word, rpbench):
    """Slots were written as milliseconds, a thousand each."""
    status, rows, err = rpbench("profile", "model=tiny_gpt", "cost=constant", word, "out=own")
    assert (status, rows) == (2, [])
    assert err.splitlines()[-1].startswith(f"rpbench: {word}")


@pytest.mark.parametrize("word", ["results_dir=elsewhere", "force=true", "save_timeline=true", "tracker=wandb"])
def test_show_refuses_what_would_change_nothing(word, rpbench):
    status, rows, err = rpbench("show", "schedule=1f1b", "num_devices=2", word)
    assert (status, rows, f"rpbench: {word} with show: " in err) == (2, [], True)


def test_an_optimizer_has_an_effect_on_a_script_that_makes_it(capsys):
    """The note said that it had none."""
    words = ("show", "schedule=roundpipe", "model=llama32_1b", "num_devices=2", "num_microbatches=4")
    for form, is_idle in (("roundpipe", False), ("text", True)):
        assert dispatch((*words, f"format={form}", "optimizer=sgd")) == 0
        assert ("optimizer=sgd without effect" in capsys.readouterr().err) == is_idle


@pytest.mark.parametrize("words", [("schedule=zb_h1",), ("cluster=8x_rtx4090",), ("cost=constant", "num_runs=3")])
def test_a_profile_refuses_choices_that_it_does_not_take(words, rpbench):
    status, rows, err = rpbench("profile", "model=tiny_gpt", *words, "out=own")
    assert (status, rows, f"rpbench: {words[-1]} with profile: " in err) == (2, [], True)


def test_a_profile_of_costs_says_of_which_schedule_and_devices(rpbench):
    """What a microbatch waits for is divided over the layers of a device."""
    found = [rpbench("profile", *LAYERS[1:], f"num_devices={number}")[1][0] for number in (4, 8)]
    assert [(each["schedule"], each["num_devices"]) for each in found] == [("1f1b", 4), ("1f1b", 8)]
    assert found[0]["forward_ms"] != found[1]["forward_ms"]


def test_duels_and_closed_forms_say_that_they_take_no_schedule():
    words = ("model=tiny_gpt", "num_devices=2", "schedule=zb_v")
    for mode, key in (("duel", "contenders"), ("torch_duel", "schedules")):
        assert f"schedule=zb_v without effect: mode.{key}= says who takes part" in load((f"mode={mode}", *words)).notes
        assert not load((f"mode={mode}", *words[:2])).notes
    (note,) = load(("mode=roofline", "cluster=8x_rtx4090", "num_microbatches=4", *words)).notes
    assert note.startswith("schedule=zb_v without effect: mode=roofline has closed forms")


@pytest.mark.parametrize("word", ["tuning_budget=400", "mode=roofline", "mode=predict"])
def test_show_refuses_what_it_does_not_show(word, rpbench):
    """The order of the options as given was shown in place of the one that is found."""
    status, rows, err = rpbench("show", "schedule=1f1b", "model=tiny_gpt", "num_devices=2", word)
    assert (status, rows) == (2, [])
    assert f"{word} with show: " in err


@pytest.mark.parametrize("words", [("compare", "/etc/passwd", "b"), ("explain", "**", "b"), ("report",)])
def test_a_folder_without_records_is_refused_before_what_draws_is_imported(words, tmp_path):
    code = "import sys; from analysis.verbs import VERBS; from rpbench.cli import dispatch, register; register(VERBS); "
    code += "print(dispatch(sys.argv[1:]), 'matplotlib' in sys.modules or 'pandas' in sys.modules)"
    command = [sys.executable, "-c", code, *words, f"results_dir={tmp_path / 'absent'}"]
    asked = subprocess.run(command, capture_output=True, text=True, check=True)
    assert asked.stdout.split() == ["2", "False"]
    assert str(tmp_path / "absent") in asked.stderr


def test_plan_sets_a_partition_that_is_written_out_beside_the_methods(rpbench):
    """Two stages of 1 and 3 layers, F + B = 3 slots a layer: the second is busy for 2 x 9, the first adds 1 and 2."""
    words = ("schedule=1f1b", "model.num_layers=4", "num_devices=2", "num_microbatches=2")
    status, (answer,), _ = rpbench("plan", *words, "partition=1-3")
    assert (status, answer["plans"][-1]["partition"], answer["plans"][-1]["makespan_s"]) == (0, "1-3", 21.0)
    assert "given" not in {plan["method"] for plan in rpbench("plan", *words)[1][0]["plans"]}
    status, rows, err = rpbench("plan", *words, "partition=1-2")
    assert (status, rows) == (2, [])
    assert "partition 1-2 sums to 3 layers" in err


@pytest.mark.parametrize("words", [("schedule=roundpipe",), ("mesh.tensor=2", "mesh.pipeline=2")])
def test_a_trace_has_the_times_of_the_run(words, rpbench, capsys):
    """Where transfers share links, and under a mesh."""
    words = (*words, "model=qwen3_1p7b", "cluster=8x_rtx4090", "cost=analytic", "num_devices=4", "num_microbatches=4")
    _, (row,), _ = rpbench(*words)
    assert dispatch(("show", *words, "format=chrome_trace")) == 0
    events = json.loads(capsys.readouterr().out)["traceEvents"]
    lanes = {(each["pid"], each["tid"]) for each in events if each["args"].get("name") == "compute"}
    ends = [each["ts"] + each["dur"] for each in events if "dur" in each and (each["pid"], each["tid"]) in lanes]
    assert max(ends) / 1e6 == pytest.approx(row["makespan_s"])


def test_a_record_is_shown_by_the_beginning_of_its_id_as_its_run_printed_it(capsys, tmp_path):
    folder = f"results_dir={tmp_path}"
    assert dispatch(["schedule=1f1b", "num_devices=2", folder]) == 0
    printed = capsys.readouterr()
    name = json.loads(printed.out)["run_id"]
    assert dispatch(["show", name[:6], folder]) == 0
    assert capsys.readouterr() == printed
    for words, said in (
        (["show", "gpipe", folder], "a schedule is written schedule=gpipe"),
        (["show", name, name, folder], "write show RUN"),
        (["show", name, folder, "draw=x.svg"], "write show RUN"),
    ):
        assert dispatch(words) == 2
        assert said in capsys.readouterr().err


def test_a_list_keeps_to_a_narrow_terminal(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "40")
    assert dispatch(("list", "models")) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 40


@pytest.mark.parametrize("cluster", ["8x_a800", "8x_h100", "8x_h200"])
def test_published_timings_off_their_machine_are_refused(cluster, rpbench):
    status, _, err = rpbench("cost=published", "model=qwen3_1p7b", f"cluster={cluster}")
    assert status == 2
    assert "RTX 4090" in err
    assert "use cost=analytic" in err
