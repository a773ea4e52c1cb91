"""The command line, called in the process: what it prints, where, and with which exit status."""

import json
import re

import pytest

from rpbench.cli import dispatch


def test_a_run_prints_one_record_and_keeps_it(rpbench, tmp_path):
    status, (row,), err = rpbench(
        "schedule=gpipe", "cost=unit", "num_devices=4", "num_microbatches=8", "results_dir=out"
    )
    assert status == 0
    assert row["bubble_makespan"] == pytest.approx(3 / 11)
    assert row["bubble_over_ideal"] == pytest.approx(3 / 8)
    assert {key: row[key] for key in ("schedule", "model", "cost", "cluster", "mode", "evidence", "status")} == {
        "schedule": "gpipe",
        "model": "abstract",
        "cost": "unit",
        "cluster": "local",
        "mode": "simulate",
        "evidence": "simulated",
        "status": "ok",
    }
    assert json.loads((tmp_path / "out" / row["run_id"] / "record.json").read_text()) == row
    assert "bubble 27.27 %" in err


def test_constant_costs_give_the_zero_bubble_papers_rate_of_1f1b(rpbench):
    """Zero Bubble Pipeline Parallelism, table of settings: 1.5B, p = 8, m = 24: 1F1B 0.2431."""
    status, (row,), _ = rpbench(
        "schedule=1f1b",
        "cost=constant",
        "cost.forward_ms=18.522",
        "cost.input_grad_ms=18.086",
        "cost.weight_grad_ms=9.337",
        "cost.hop_ms=0.601",
        "num_devices=8",
        "num_microbatches=24",
    )
    assert status == 0
    assert round(row["bubble_span"], 4) == 0.2431


def test_a_sweep_prints_one_line_a_run_and_skips_what_is_finished(rpbench, tmp_path):
    sweep = ("-m", "schedule=gpipe,1f1b", "num_devices=2,3", "num_microbatches=4")
    status, rows, _ = rpbench(*sweep)
    assert status == 0
    assert [(row["schedule"], row["num_devices"]) for row in rows] == [
        ("gpipe", 2),
        ("gpipe", 3),
        ("1f1b", 2),
        ("1f1b", 3),
    ]
    written = {path: path.stat().st_mtime_ns for path in tmp_path.glob("results/*/record.json")}
    assert len(written) == 4
    lost = tmp_path / "results" / rows[2]["run_id"] / "record.json"
    lost.unlink()
    status, again, _ = rpbench(*sweep)
    assert {row["run_id"] for row in again} == {row["run_id"] for row in rows}  # what is found comes first
    assert [path for path, stamp in written.items() if path.stat().st_mtime_ns != stamp] == [lost]


def test_a_torn_record_is_said_and_run_again(rpbench, tmp_path):
    _, (row,), _ = rpbench("num_devices=2")
    path = tmp_path / "results" / row["run_id"] / "record.json"
    path.write_text(path.read_text()[:-40])
    status, (again,), err = rpbench("num_devices=2")
    assert status == 0
    assert f"skipping {path.relative_to(tmp_path)}" in err
    assert again["makespan_s"] == row["makespan_s"]


def test_a_sweep_finishes_the_rest_when_one_run_is_wrong(rpbench):
    status, rows, err = rpbench("-m", "num_devices=0,4")
    assert status == 2
    assert [row["num_devices"] for row in rows] == [4]
    assert "num_devices=0" in err


def test_a_plan_that_does_not_fit_is_a_verdict_not_a_failure(rpbench):
    status, (row,), _ = rpbench(
        "schedule=1f1b", "model=qwen3_32b", "cost=published", "partition=published", "cluster=8x_rtx4090"
    )
    assert status == 0
    assert row["status"] == "infeasible"
    assert "GB" in row["reason"]
    assert "makespan_s" not in row


def test_what_the_last_stage_keeps_is_counted_and_has_to_fit(rpbench):
    """A device with both stages of a V holds the activations of the last one while it recomputes those of the first."""
    words = ("schedule=zb_v", "num_devices=1", "num_microbatches=6", "chunks_per_device=2", 'partition="5-1"')
    words += (
        "model=mid_gpt",
        "model.num_layers=6",
        "cluster.reserved_memory_bytes=1",
        "cluster=3x_l40s",
        "cost=analytic",
        "charge=bytes",
    )

    def ran(recompute, *more):
        return rpbench(*words, f"recompute={recompute}", *more)[1][0]

    (whole,), (kept,) = (ran(recompute)["peak_memory_bytes"] for recompute in ("all", "except_last"))
    assert kept > whole
    tight = f"cluster.device_memory_bytes={(whole + kept) // 2}"
    assert ran("all", tight)["status"] == "ok"
    row = ran("except_last", tight)
    assert row["status"] == "infeasible"
    assert f"needs {kept / 1e9:.1f} GB" in row["reason"]


WRONG = [
    (["schedule=gpip"], "unknown schedule 'gpip'; did you mean gpipe?"),
    (
        ["model=org/config.json"],
        "model=org/config.json: a run takes a model of conf/model. A config.json is for advise",
    ),
    (["model=qwen3_1p8b"], "did you mean qwen3_1p7b?"),
    (["-m", "schedule=gpipe,2f2b"], "unknown schedule '2f2b'"),
    (["num_devices=0"], "num_devices=0: a whole number of at least 1"),
    (["num_microbatches=-3"], "num_microbatches=-3"),
    (["num_devices=three"], "num_devices=three: a whole number"),
    (["cost=constant", "cost.forward_ms=-1"], "cost.forward_ms=-1.0"),
    (["cost=constant", "cost.forward_ms=nan"], "cost.forward_ms=nan"),
    (["cost=constant", "cost.hop_ms=inf"], "cost.hop_ms=inf"),
    (["schedule=1f1b", "model.num_layers=4"], "4 layers"),
    (["schedule=1f1b", "partition=1-1-1-1", "model.num_layers=4"], "one stage on each rank"),
    (
        ["model=llama31_8b", "cost=published", "partition=4-4-4-4-4-4-4-5"],
        "sums to 33 layers, the model has 32",
    ),
    (["schedule=roundpipe", "num_devices=2", "model.num_layers=4", "partition=2-2|2-0-2-0*"], "stage 1 has no layers"),
    (["charge=all"], "charge=all: one of hops, bytes"),
    (["charge=bytes"], "take one with a shape"),
    (["charge=bytes", "model=qwen3_1p7b"], "cluster=local has no memory_bytes_per_s"),
    (["charge=bytes", "model=qwen3_1p7b", "cluster=8x_rtx4090"], "cost=unit has no constants.optimizer_bytes"),
    (["charge=bytes", "model=tiny_gpt", "backend=cpu"], "use mode=simulate"),
    (
        ["charge=bytes", "offload=none", "schedule=roundpipe", "model=qwen3_1p7b"],
        "the weights of roundpipe follow its work",
    ),
    (["offload=some", "schedule=roundpipe"], "offload=some: one of none, weights, all, auto"),
    (["schedule=interleaved_1f1b", "num_devices=4", "num_microbatches=9"], "take num_microbatches=8"),
    (["num_device=3"], "did you mean num_devices?"),
    (["schedule=roundpipe", "schedule.rund_size=3"], "did you mean schedule.round_size?"),
    (["cost=unit", "cost.forward_ms=3"], "cost files that have it: constant"),
    (["partition=serch"], "did you mean search?"),
    (["schedule=roundpipe", "dispatch=dynmic"], "did you mean dynamic?"),
    (["shw"], "did you mean show?"),
    (["schedule_file=nowhere.txt"], "cannot be read"),
    (["compare", "a", "b", "result_dir=x"], "compare takes results_dir=DIR, not 'result_dir'"),
    (["profile", "model=tiny_gpt", "num_runs=9999999"], "num_runs=9999999: a whole number from 1 to 1,000"),
    (["model=qwen3_1p7b", "cost=published", "cluster=8x_rtx4090", "num_devices=16"], "cluster 8x_rtx4090 has 8"),
    (["foo=["], "cannot read 'foo=['"),
    (["partition=2;2"], "quote values with commas or other marks, as in"),
    (["compare", "abc"], "two or more run ids"),
    (["compare", "abc", "def"], "no record of results begins with it"),
    (["report", "oout=x"], "report takes"),
    (["show", "schedule=gpip"], "did you mean gpipe?"),
    (["show", "draw=x.bmp"], "take .svg, .pdf or .png"),
    (["mode=roofline"], "needs a model"),
    (["backend=roofline"], "closed forms are a mode: mode=roofline"),
    (["schedule=harp"], "schedule=harp is called schedule=adaptive_1f1b now: the rule is ours"),
    (["-m", "schedule=1f1b,harp"], "schedule=harp is called schedule=adaptive_1f1b now"),
    (["backend=sim"], "leave it out"),
    (["workload=paper"], "mode=predict"),
    (["backend.learning_rate=1"], "write optimizer.learning_rate=1"),
    (["method=roundpipe_call"], "write schedule=roundpipe_call"),
    (["mode=train"], "choose what executes it"),
    (["mode=simulate", "backend=cpu"], "mode=simulate has no backend"),
    (["verify=true"], "mode=simulate has no tensors to compare"),
    (["verify=true", "backend=emulated"], "backend=emulated has no tensors to compare"),
    (["-m", "schedule=glob(zzz*)"], "nothing to sweep"),
    (["-m", "results_dir=r1,r2"], "results_dir=r1 results_dir=r2: a sweep has one folder"),
    (["--cfg", "hydra"], "write --cfg job"),
    (["results_dir=/dev/null/results"], "no folder that can be written"),
    (["results_dir=/proc/x"], "results_dir=/proc/x: /proc is no folder that can be written"),
    (["dashboard", "results_dir=/dev/zero"], "results_dir=/dev/zero: it is no folder"),
    (["dashboard", "results_dir=/nonexist"], "results_dir=/nonexist: there is no such folder; name one that holds rec"),
    (["num_devices=4", "num_steps=1000000"], "64,000,000 forwards; at most 4,194,304 fit"),
    (["num_devices=1000000", "num_microbatches=1"], "1,000,000 ranks; a table has at most 16,384"),
    (["model.num_layers=1000000000"], "a whole number from 1 to 1,000,000"),
    (["model=tiny_gpt", "model.num_layers=1000000000"], "at most 1,000"),
    (["model=tiny_gpt", "model.name=../../escaped"], "a name is no path"),
    (["profile", "model=tiny_gpt", "model.name=../../escaped", "cost=constant"], "a name is no path"),
    (["backend=cpu", "model=tiny_gpt", "backend.num_warmup_runs=-1"], "backend.num_warmup_runs=-1"),
    (["backend=virtual", "model=tiny_gpt", "optimizer.weight_decay=-1"], "optimizer.weight_decay=-1.0: a number of"),
    (["schedule_file=/dev/zero"], "schedule_file=/dev/zero: it is a device, no regular file"),
    (["checkpoint.resume_from=/dev/zero"], "checkpoint.resume_from=/dev/zero: it is no folder"),
    (["mode.failures=[1]"], "mode.failures=[1]: choose what has such keys first, as in mode=failures"),
    (["import", "csv", "/dev/zero"], "import /dev/zero: it is a device"),
    (
        ["cost=constant", f"cost.forward_ms=1{400 * '0'}"],
        "00000... (401 digits): a finite number",
    ),
    (["cost=constant", "cost.forward_ms=null"], "cost.forward_ms=null: it needs a value"),
    (["num_devices={a: 1}"], "rpbench: num_devices={a: 1}: a whole number"),
    (["num_devices=2", "num_devices.x=3"], "num_devices.x=3: num_devices is a whole number, with no keys beneath it"),
    (["partition=[1,1]"], "rpbench: partition=[1,1]: one word or one text"),
    (["=1"], "=1: a key is missing before ="),
    (["model=qwen3_1p7b", "software.constants=x"], "software.constants=x: choose what has such keys first"),
    (["-m", "seed=range(0,10,0)"], "seed=range(0,10,0): range() arg 3 must not be zero; write range(FIRST,END,STEP)"),
    (["model=tiny_gpt", f"model.seq_len=1{30 * '0'}"], "at most 1,000,000,000"),
    (["show", "draw=/proc/x.svg"], "draw=/proc: /proc is no folder that can be written"),
    (["new", "model", 300 * "x"], "it has 300 letters, a file's name takes 100"),
    (["new", "schedule", "class"], "name 'class': a word of Python"),
]


@pytest.mark.parametrize(
    "arguments, expected", WRONG, ids=lambda value: " ".join(value) if isinstance(value, list) else ""
)
def test_a_wrong_request_is_answered_in_a_few_lines(arguments, expected, rpbench, tmp_path):
    status, rows, err = rpbench(*arguments)
    assert status == 2
    assert rows == []
    assert expected in err
    assert len(err.splitlines()) <= 8
    assert "Traceback" not in err
    assert not list(tmp_path.rglob("record.json"))
    assert not list(tmp_path.rglob("events.jsonl"))


def test_a_table_that_the_free_memory_does_not_hold_is_refused(rpbench, monkeypatch):
    monkeypatch.setattr("rpbench.config.sizes.os.sysconf", {"SC_PAGE_SIZE": 4096, "SC_AVPHYS_PAGES": 50_000}.get)
    status, _, err = rpbench("num_devices=8", "num_microbatches=16", "num_steps=1000")
    assert status == 2
    assert "128,000 forwards, a table of some 0.3 GB; 0.2 GB are free here" in err


SCHEDULE = """\
# rpbench-schedule 1
# {header}
0/compute: {first}
1/compute: {second}
"""
HEADER = (
    "name=mine ranks=2 stages=2 backward_stages=2 microbatches=1 steps=1 parts=1 fused=0 policy=flush "
    "weights=bound placement=- partition=-"
)


@pytest.mark.parametrize(
    "first, second, expected",
    [
        ("0F0 0F0 0B0", "1F0 1B0", "0F0 stands twice"),
        ("0B0 0F0", "1F0 1B0", "0B0"),
        ("0F0 0Q0", "1F0 1B0", "bad token '0Q0'"),
        ("0F0", "1F0 1B0", "0B0"),
        ("0F0 0B7", "1F0 1B0", "microbatch 7"),
        ("0F0 0B0junk", "1F0 1B0", "0B0junk"),
        ("0F0 " * 10**6, "1F0 1B0", "line 3: 4,000,011 letters are more than 1 microbatches take"),
    ],
    ids=["duplicate", "cycle", "token", "missing", "index", "trailing", "endless"],
)
def test_a_broken_schedule_file_is_refused_and_a_sound_one_runs(first, second, expected, rpbench, tmp_path):
    path = tmp_path / "order.txt"
    path.write_text(SCHEDULE.format(header=HEADER, first=first, second=second))
    status, rows, err = rpbench("schedule_file=order.txt")
    assert (status, rows) == (2, [])
    assert expected in err
    assert len(err.splitlines()) <= 10
    path.write_text(SCHEDULE.format(header=HEADER, first="0F0 0B0", second="1F0 1B0"))
    status, (row,), _ = rpbench("schedule_file=order.txt")
    assert (status, row["schedule"], row["makespan_s"]) == (0, "mine", 6.0)


@pytest.mark.parametrize(
    "change, words, said",
    [
        (("0F0 0B0", "0F0 0F0 0B0"), (), "0F0 stands twice"),
        (("0F0 0B0", "0B0 0F0"), (), "no rank can move"),
        (("placement=-", "placement=0"), (), "placement lists 1 stages"),
        (("microbatches=1", "microbatches=9"), (), "too few to run 9 microbatches"),
        (("partition=-", "partition=1-1"), ("model=tiny_gpt",), "hold 2 layers, and there are times of 16"),
        (("partition=-", "partition=1-1"), ("model.num_layers=5",), "hold 2 layers, and there are times of 5"),
        (("partition=-", "partition=1-1-1"), (), "line 2"),
    ],
)
def test_whatever_is_wrong_with_a_schedule_file_names_it(change, words, said, rpbench, tmp_path):
    text = SCHEDULE.format(header=HEADER, first="0F0 0B0", second="1F0 1B0")
    (tmp_path / "order.txt").write_text(text.replace(*change))
    status, rows, err = rpbench("schedule_file=order.txt", *words)
    assert (status, rows) == (2, [])
    assert re.search(rf"schedule_file=order\.txt: .*{said}", err), err


@pytest.mark.parametrize(
    "words, said",
    [
        ((f"partition=1-{10**400}",), "partition 1-10{57}: layers: at most 1,000,000"),
        ((f"num_steps={10**400}",), "num_steps=10{39}: at most 1,000,000"),
        (("schedule=vocab_parallel", f"schedule.slack={10**400}"), "schedule.slack=10{39}: .* 1,000,000 at most"),
        (("schedule=seq1f1b", f"schedule.num_segments={10**400}"), "num_segments=10{39}: .* 1,000,000 at most"),
        (("schedule=pipedream", f"schedule.replicas=[1,{10**400}]"), r"replicas=\[1, 10{35}: .* 1,000,000 at most"),
    ],
)
def test_a_number_of_hundreds_of_digits_is_refused(words, said, rpbench):
    status, rows, err = rpbench("num_devices=2", *words)
    assert (status, rows) == (2, [])
    assert re.search(said, err), err


@pytest.mark.parametrize("mode", ["predict", "roofline", "duel", "torch_duel"])
def test_a_mode_that_knows_schedules_by_name_takes_no_file(mode, rpbench, tmp_path):
    (tmp_path / "order.csv").write_text("0F0,0B0\n1F0,1B0\n")
    words = ("schedule_file=order.csv", "model=qwen3_1p7b", "cluster=8x_rtx4090", "cost=analytic")
    status, rows, err = rpbench(f"mode={mode}", *words)
    assert (status, rows) == (2, [])
    assert f"schedule_file=order.csv with mode={mode}: it times what it knows by name" in err


@pytest.mark.parametrize("name", ["order.txt", "order.csv"])
def test_a_schedule_file_may_begin_with_the_mark_of_other_editors(name, rpbench, tmp_path):
    text = (
        "0F0,0B0\n1F0,1B0\n"
        if name.endswith("csv")
        else SCHEDULE.format(header=HEADER, first="0F0 0B0", second="1F0 1B0")
    )
    (tmp_path / name).write_text(text, encoding="utf-8-sig")
    status, (row,), _ = rpbench(f"schedule_file={name}")
    assert (status, row["makespan_s"]) == (0, 6.0)
    (tmp_path / name).write_text(text, encoding="utf-16")
    status, rows, err = rpbench(f"schedule_file={name}")
    assert (status, rows) == (2, [])
    assert f"schedule_file={name}: it is no UTF-8 text (line 1, byte 0); save it as UTF-8" in err


def test_a_table_without_a_cut_takes_the_typed_one(rpbench, tmp_path):
    (tmp_path / "own.csv").write_text("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
    words = ("schedule_file=own.csv", "model=tiny_gpt", "cost=constant")
    status, (row,), _ = rpbench(*words, "partition=9-7")
    assert (status, row["partition_layers"], row["num_devices"]) == (0, "9-7", 2)
    for typed, said in [
        ((), "times of 16: type a partition of as many, as partition=8-8"),
        (("partition=8-9",), "its stages hold 17 layers, and there are times of 16"),
        (("partition=8-4-4",), "schedule_file=own.csv: partition 8-4-4 has 3 forward"),
        (("partition=search",), "partition=search: schedule_file=own.csv has no cut"),
    ]:
        status, rows, err = rpbench(*words, *typed)
        assert (status, rows) == (2, [])
        assert said in err


@pytest.mark.parametrize(
    "size, there",
    [
        ("num_devices=64", "has 2 ranks"),
        ("num_microbatches=5", "has 3 microbatches a step"),
        ("schedule=zb_v", "is gpipe"),
        ("num_steps=2", "has 1 steps"),
        ("chunks_per_device=2", "has 2 stages on 2 ranks"),
        ("mesh.pipeline=4", "has 2 ranks"),
        ("partition=search", "is cut 1-1"),
        ("offload=all", "moves nothing"),
        ("offload=nowhere", "moves nothing"),
        ("prefetch=2", "says when what it moves comes"),
        ("dispatch=dynamic", "says which device runs what"),
    ],
)
def test_sizes_beside_a_schedule_file_are_those_of_the_file(size, there, rpbench, tmp_path, capsys):
    assert dispatch(("show", "schedule=gpipe", "num_devices=2", "num_microbatches=3")) == 0
    (tmp_path / "order.txt").write_text(capsys.readouterr().out)
    assert rpbench("schedule_file=order.txt", "num_devices=2", "num_microbatches=3")[0] == 0
    status, rows, err = rpbench("schedule_file=order.txt", size)
    assert (status, rows) == (2, [])
    assert f"{size}: schedule_file=order.txt {there}" in err


CHARGED = ("model=qwen3_1p7b", "cluster=8x_rtx4090", "cost=analytic", "num_devices=4", "num_microbatches=8",
           "num_steps=2", "cluster.device_memory_bytes=40000000000")  # fmt: skip


@pytest.mark.parametrize("name", ["1f1b", "chimera", "roundpipe", "zero_3"])
def test_a_schedule_of_a_file_is_charged_as_one_that_is_named(name, rpbench, tmp_path, capsys):
    """What `show` writes holds steps and transfers; an order without them gets the same ones."""
    _, (named,), _ = rpbench(f"schedule={name}", *CHARGED)
    assert dispatch(("show", f"schedule={name}", *CHARGED)) == 0
    (tmp_path / "whole.txt").write_text(whole := capsys.readouterr().out)
    computations = [line for line in whole.splitlines() if line.startswith("#") or "/compute:" in line]
    (tmp_path / "order.txt").write_text(re.sub(r" \d+(STEP|SEND_|RECV_)\S+", "", "\n".join(computations)))
    status, (found,), _ = rpbench("schedule_file=whole.txt", *CHARGED)
    assert (status, found["makespan_s"], found["busy_s"]) == (0, named["makespan_s"], named["busy_s"])
    status, rows, err = rpbench("schedule_file=order.txt", *CHARGED)
    if name == "zero_3":
        assert (status, rows) == (2, [])
        assert "an order of zero_3 without its steps and transfers" in err
    else:
        assert (status, rows[0]["makespan_s"]) == (0, named["makespan_s"])


def test_the_last_stage_of_a_schedule_file_keeps_what_it_is_to_keep(rpbench, tmp_path, capsys):
    """Times and memory of an order are the same whether its schedule or its file is named."""
    sizes = ("num_devices=2", "num_microbatches=3")
    words = ("recompute=except_last", "model=tiny_gpt", "cost=constant", "cost.recompute_ms=1.0")
    assert dispatch(("show", "schedule=1f1b", *sizes, *words)) == 0
    (tmp_path / "order.txt").write_text(capsys.readouterr().out)
    (_, (named,), _), (_, (read,), _) = (
        rpbench("schedule=1f1b", *sizes, *words),
        rpbench("schedule_file=order.txt", *words),
    )
    assert [read[key] for key in ("makespan_s", "peak_memory_bytes")] == [
        named[key] for key in ("makespan_s", "peak_memory_bytes")
    ]
    (_, (whole,), _) = rpbench("schedule_file=order.txt", *words[1:])
    assert whole["makespan_s"] > read["makespan_s"]


def test_show_prints_a_schedule_that_can_be_run_again(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sizes = ("schedule=interleaved_1f1b", "num_devices=4", "num_microbatches=8", "chunks_per_device=2")
    assert dispatch(("show", *sizes)) == 0
    shown = capsys.readouterr().out
    (tmp_path / "order.txt").write_text(shown)
    assert dispatch(("schedule_file=order.txt",)) == 0
    from_file = json.loads(capsys.readouterr().out)
    assert dispatch(sizes) == 0
    generated = json.loads(capsys.readouterr().out)
    for key in ("makespan_s", "bubble_makespan", "peak_in_flight", "num_actions", "schedule"):
        assert from_file[key] == generated[key]


def test_show_draws_to_a_file(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert dispatch(("show", "schedule=1f1b", "num_devices=3", "num_microbatches=4", "draw=order.svg")) == 0
    capsys.readouterr()
    assert "<svg" in (tmp_path / "order.svg").read_text()


def test_plan_compares_the_methods(rpbench):
    status, (answer,), _ = rpbench("plan", "schedule=1f1b", "model=qwen3_1p7b", "cost=published")
    assert status == 0
    assert answer["clock"] == "seconds"
    makespans = {plan["method"]: plan["makespan_s"] for plan in answer["plans"]}
    assert set(makespans) == {"published", "even", "greedy", "pipedream", "search"}
    assert min(makespans.values()) == makespans["search"] < makespans["published"]


@pytest.mark.parametrize("gigabytes, best", [(18, "search"), (14, None)])
def test_the_best_plan_is_one_that_fits(gigabytes, best, rpbench):
    words = ("schedule=1f1b", *CHARGED[:5], f"cluster.device_memory_bytes={gigabytes}000000000")
    _, (answer,), _ = rpbench("plan", *words)
    assert (answer["best"], answer["plans"][0]["reason"] is None) == (best, best is not None)
    for plan in answer["plans"]:
        _, (row,), _ = rpbench(*words, f"partition={plan['partition']}")
        assert row["reason"] == plan["reason"], plan["method"]


@pytest.mark.parametrize("key, values", [("optimizer.learning_rate", (0.001, 0.5)), ("charge", ("hops", "bytes"))])
def test_compare_shows_what_differs_wherever_it_stands(key, values, rpbench):
    words = ("schedule=1f1b", "num_devices=2", "num_microbatches=2")
    if key == "charge":
        words += ("model=qwen3_1p7b", "cost=analytic", "cluster=8x_rtx4090", "partition=greedy", "recompute=all")
    else:
        words += ("backend=virtual", "model=tiny_gpt")
    rows = [rpbench(*words, f"{key}={value}")[1][0] for value in values]
    _, (answer,), err = rpbench("compare", *(row["run_id"] for row in rows))
    assert answer["differing"][key] == list(values)
    assert key in err


def test_a_simulation_says_what_has_no_effect_on_it(rpbench):
    _, (row,), err = rpbench("schedule=1f1b", "num_devices=2", "num_microbatches=2", "optimizer=sgd", "dtype=float64")
    assert "optimizer=sgd dtype=float64 without effect: mode=simulate has no tensors" in err
    assert len(row["notes"]) == 1
    assert "without effect" not in rpbench("schedule=1f1b", "num_devices=2", "num_microbatches=2")[2]


def test_a_prediction_says_which_choices_are_those_of_the_published_run(rpbench):
    asked = ("mode=predict", "schedule=roundpipe", "model=qwen3_1p7b", "cluster=8x_rtx4090", "cost=analytic")
    plain, other = rpbench(*asked), rpbench(*asked, "num_microbatches=7", "schedule.round_size=2")
    assert plain[1][0]["tokens_per_s"] == other[1][0]["tokens_per_s"]
    assert "num_microbatches=7 schedule.round_size=2 without effect: mode=predict takes a system's" in other[2]
    assert "without effect" not in plain[2]


@pytest.mark.parametrize("words", [(), ("backend=virtual",), ("-m",), ("-m", "--dry-run")])
def test_costs_that_do_not_split_a_backward_are_refused_before_the_run(words, rpbench, tmp_path):
    """It was a failed run with a traceback, which a sweep tried again each time."""
    status, rows, err = rpbench(*words, "schedule=zb_h1", "model=qwen3_1p7b", "cost=published", "num_devices=4")
    said = [err, *(str(row.get("reason")) for row in rows)]
    assert any("these costs do not split backward; use cost=constant" in each for each in said)
    if "--dry-run" in words:
        assert [row["state"] for row in rows] == ["not applicable"]
    else:
        assert (status, rows, [*tmp_path.glob("results/*/record.json")]) == (2, [], [])


@pytest.mark.parametrize("sweep", [(), ("-m",)])
def test_letters_beyond_ascii_need_no_quotes(sweep, rpbench, tmp_path):
    status, (row,), _ = rpbench(*sweep, "schedule=gpipe", "num_devices=2", "results_dir=größe")
    assert (status, (tmp_path / "größe" / row["run_id"]).is_dir()) == (0, True)
