"""Imports: small files by hand, and files that are not what they say."""

import gzip
import json

import pytest

from rpbench.cli import dispatch
from rpbench.config.choices import ConfigError
from rpbench.records import imports, record

KINETO = [
    {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 9, "tid": 1, "ts": 100, "dur": 50},
    {"ph": "X", "cat": "kernel", "name": "gemm", "pid": 0, "tid": 7, "ts": 110, "dur": 30},
    {"ph": "X", "cat": "kernel", "name": "inner", "pid": 0, "tid": 7, "ts": 115, "dur": 5},
    {"ph": "X", "cat": "kernel", "name": "add", "pid": 0, "tid": 7, "ts": 150, "dur": 10},
    {"ph": "i", "name": "mark", "ts": 3},
]


def test_a_profile_becomes_lanes_without_overlap(tmp_path, capsys):
    source, out = tmp_path / "profile.json", tmp_path / "out.json"
    source.write_text(json.dumps({"traceEvents": KINETO}))
    assert dispatch(["import", "kineto", str(source), f"out={out}"]) == 0
    slices = [event for event in json.loads(out.read_text())["traceEvents"] if event["ph"] == "X"]
    assert [(event["name"], event["ts"], event["dur"]) for event in slices] == [("gemm", 0, 30), ("add", 40, 10)]
    printed = json.loads(capsys.readouterr().out)
    assert printed["evidence"] == "measured elsewhere"
    assert printed["makespan_s"] == pytest.approx(50e-6)
    assert printed["bubble_makespan"] == pytest.approx(0.2)


def test_a_kernel_that_begins_before_its_stream_is_free_is_kept():
    """Two of 0.1 + 0.2 and 0.3 us follow each other but for rounding; one that overlaps by 1 us follows as well."""
    times = [(0.1, 0.2), (0.3, 0.1), (5.0, 3.0), (7.0, 3.0)]
    events = [{"ph": "X", "cat": "kernel", "name": "k", "pid": 0, "tid": 7, "ts": ts, "dur": dur} for ts, dur in times]
    trace = imports.trace_of_kineto(json.dumps(events))
    slices = [each for each in trace["traceEvents"] if each["ph"] == "X"]
    assert [each["ts"] for each in slices] == pytest.approx([0, 0.2, 4.9, 7.9])
    assert [each["dur"] for each in slices] == pytest.approx([0.2, 0.1, 3, 2])
    assert imports.summary_of_trace(trace)["makespan_s"] == pytest.approx(9.9e-6)


def test_a_trace_is_not_written_over(tmp_path, capsys):
    source = tmp_path / "profile.json"
    source.write_text(json.dumps({"traceEvents": KINETO}))
    assert dispatch(["import", "kineto", str(source), f"out={source}"]) == 2
    assert "is the trace itself" in capsys.readouterr().err
    assert json.loads(source.read_text()) == {"traceEvents": KINETO}


def test_a_table_becomes_records_that_are_sound(tmp_path, capsys):
    source = tmp_path / "table.csv"
    source.write_text("schedule,model,num_devices,tokens_per_s\n1f1b,llama31_8b,8,1234.5\ngpipe,llama31_8b,8,1000\n")
    assert dispatch(["import", "csv", str(source), f"results_dir={tmp_path / 'r'}"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2
    rows = list(record.read_all(tmp_path / "r"))
    assert {row["evidence"] for row in rows} == {"measured elsewhere"}
    assert sorted(row["tokens_per_s"] for row in rows) == [1000, 1234.5]


def test_rows_that_are_the_same_are_one_record_and_named(tmp_path, capsys):
    source = tmp_path / "table.csv"
    source.write_text("schedule,tokens_per_s\n1f1b,5\n1f1b,5\ngpipe,5\n1f1b,5\n")
    assert dispatch(["import", "csv", str(source), f"results_dir={tmp_path / 'r'}"]) == 0
    out, err = capsys.readouterr()
    assert len(out.splitlines()) == len(list(record.read_all(tmp_path / "r"))) == 2
    assert "2 of 4 are the same as an earlier one and left out: line 3 as line 2, line 5 as line 2;" in err
    source.write_text("schedule,tokens_per_s,repeat\n1f1b,5,1\n1f1b,5,2\n")
    assert dispatch(["import", "csv", str(source), f"results_dir={tmp_path / 's'}"]) == 0
    out, err = capsys.readouterr()
    assert (len(out.splitlines()), err) == (2, "")


def test_blanks_beside_a_comma_belong_to_no_name_and_no_value(tmp_path):
    (row,) = imports.records_of_csv("schedule, model, num_devices, tokens_per_s\n1f1b, llama, 8, 12.5\n")
    assert (row["model"], row["num_devices"], row["tokens_per_s"]) == ("llama", 8, 12.5)
    assert row["num_microbatches"] is None  # it was said to be 0


def test_a_row_is_named_by_its_line_in_the_file(capsys):
    assert len(imports.records_of_csv("schedule,tokens_per_s\n\n1f1b,5\n\n1f1b,5\n")) == 1
    assert "line 5 as line 3;" in capsys.readouterr().err


@pytest.mark.parametrize("name, meant", [("tokens_per_sec", "tokens_per_s"), ("step_time_ms", "step_time_s")])
def test_a_name_that_is_nearly_a_metric_is_told(name, meant, capsys):
    imports.records_of_csv(f"schedule,repeat,tokens_per_s_low,{name}\n1f1b,1,3.5,4\n")
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"rpbench: import csv: column {name!r} is kept under that name; did you mean {meant}, in its unit?"


@pytest.mark.parametrize("said, kept", [("simulated", "simulated"), ("measured", "measured elsewhere")])
def test_what_was_simulated_is_not_measured_because_it_was_imported(said, kept):
    (row,) = imports.records_of_csv(f"schedule,evidence\n1f1b,{said}\n")
    assert row["evidence"] == kept


def test_a_word_that_a_form_has_no_use_for_is_refused(tmp_path, capsys):
    (tmp_path / "t.csv").write_text("schedule\n1f1b\n")
    assert dispatch(["import", "csv", str(tmp_path / "t.csv"), f"out={tmp_path / 'x'}"]) == 2
    assert "it makes records, and results_dir= names their folder" in capsys.readouterr().err


def test_a_packed_trace_is_read_and_a_torn_one_refused(tmp_path, capsys, monkeypatch):
    source = tmp_path / "host.pt.trace.json.gz"
    source.write_bytes(gzip.compress(json.dumps({"traceEvents": KINETO}).encode()))
    assert dispatch(["import", "kineto", str(source)]) == 0
    assert json.loads(capsys.readouterr().out)["timeline"] == str(tmp_path / "host.pt.trace.timeline.json")
    monkeypatch.setattr(imports, "MOST_BYTES", 300)  # of packed bytes, and of what they unpack to
    assert dispatch(["import", "kineto", str(source)]) == 2
    assert "unpacked more than 300 bytes" in capsys.readouterr().err
    source.write_bytes(source.read_bytes()[:60])
    assert dispatch(["import", "kineto", str(source)]) == 2
    assert "cannot be unpacked" in capsys.readouterr().err


def test_an_exported_run_becomes_a_record():
    run = {"config": {"schedule": {"name": "zb_h1"}, "num_devices": {"value": 4}}, "summary": {"tokens_per_s": 7.0}}
    (row,) = imports.records_of_wandb(json.dumps(run))
    assert (row["schedule"], row["num_devices"], row["tokens_per_s"]) == ("zb_h1", 4, 7.0)


def test_a_trace_begins_with_its_first_event_wherever_that_stands():
    events = [KINETO[3] | {"tid": 8}, *KINETO[1:3]]
    slices = [each for each in imports.trace_of_kineto(json.dumps(events))["traceEvents"] if each["ph"] == "X"]
    assert sorted((each["name"], each["ts"]) for each in slices) == [("add", 40), ("gemm", 0)]


def test_what_a_tracker_counts_for_itself_is_no_value_of_a_run():
    run = {"config": {"schedule": "1f1b"}, "summary": {"tokens_per_s": 7.0, "_runtime": 12.5, "_step": 9}}
    (row,) = imports.records_of_wandb(json.dumps(run))
    assert row["tokens_per_s"] == 7.0
    assert not any(key.startswith("_") for key in row)


def test_a_number_with_an_exponent_is_a_measure_and_no_count():
    (row,) = imports.records_of_csv("schedule,tokens_per_s\n1f1b,1e3\n")
    assert repr(row["tokens_per_s"]) == "1000.0"
    with pytest.raises(ConfigError, match=r"num_devices=1000\.0: a whole number"):
        imports.records_of_csv("schedule,num_devices\n1f1b,1e3\n")


def test_exported_records_come_back_with_every_value(tmp_path, capsys):
    runs, back = tmp_path / "runs", tmp_path / "back"
    words = ["model=tiny_gpt", "num_microbatches=4", f"results_dir={runs}"]
    dispatch(["schedule=1f1b", "num_devices=2", *words])
    dispatch(["schedule=1f1b", "num_devices=1", "cluster.device_memory_bytes=1000", *words])
    dispatch(["export", f"results_dir={runs}", f"out={tmp_path / 'runs.csv'}"])
    assert dispatch(["import", "csv", str(tmp_path / "runs.csv"), f"results_dir={back}"]) == 0
    capsys.readouterr()
    own = {*record.PASSING, *imports._OURS, "evidence", "files"}  # of the program that writes, not of the run
    found = [
        [{k: v for k, v in row.items() if k not in own and v is not None} for row in record.read_all(folder)]
        for folder in (runs, back)
    ]
    assert len(found[0]) == 2
    assert sorted(row["status"] for row in found[0]) == ["infeasible", "ok"]
    for row in found[0]:
        assert row | {"backend": "elsewhere"} in found[1]


def test_a_cell_that_only_begins_as_json_stays_text():
    (row,) = imports.records_of_csv('schedule,note,wide,big\n1f1b,[draft,"[1, 2]",12345678901234567891\n')
    assert (row["note"], row["wide"], row["big"]) == ("[draft", [1, 2], 12345678901234567891)


@pytest.mark.parametrize(
    "read, text, rule",
    [
        (imports.records_of_csv, "", "the header is ''; name at least `schedule`"),
        (imports.records_of_csv, "Schedule;model\nx;y\n", "the header is 'Schedule;model'; .* commas between"),
        (imports.records_of_csv, "schedule,a\n\n1f1b,5\n1f1b\n", "line 4 has"),
        (imports.records_of_csv, "schedule,bubble_makespan\n1f1b,27.5\n", "27.5 is above 1: it is a fraction"),
        (imports.records_of_csv, "schedule,a\n1f1b\n", "line 2"),
        (imports.records_of_csv, "schedule,tokens_per_s\n", "no row beneath"),
        (imports.records_of_wandb, "", "no run in it"),
        (imports.records_of_wandb, "[]", "no run in it"),
        (imports.records_of_csv, "schedule,tokens_per_s\n1f1b,nan\n", "no number to keep"),
        (imports.records_of_csv, "schedule,num_devices\n1f1b,-2\n", "whole number"),
        (imports.records_of_csv, "schedule,tokens_per_s\n1f1b,-5\n", "below 0"),
        (imports.records_of_csv, "schedule,status\n1f1b,OOM\n", "line 2: status 'OOM' is none of ok, oom"),
        (imports.records_of_wandb, "[" * 100_000, "nested too deeply|not JSON"),
        (imports.records_of_wandb, '{"config": {}}', "an object with"),
        (imports.trace_of_kineto, "{", "not JSON"),
        (imports.trace_of_kineto, "{}", "no traceEvents"),
        (imports.trace_of_kineto, '[{"ph": "X", "ts": 1, "dur": -1}]', "microseconds"),
        (imports.trace_of_kineto, '[{"ph": "X", "ts": 1, "dur": 1}]', "no kernels"),
    ],
)
def test_what_does_not_fit_is_refused_in_words(read, text, rule):
    with pytest.raises(ConfigError, match=rule):
        read(text)
