"""Records: identity, atomic writing, what is not a record."""

import errno
import json
import math
import os

import pytest

from rpbench.config.loading import load
from rpbench.records import provenance, record
from rpbench.records.describe import describe, table
from rpbench.run.modes import simulate
from rpbench.run.recording import Outcome, Work, identity, recorded, run


def name_of(*overrides):
    return record.run_id(identity(load(overrides)))


def test_identity_follows_the_subject_not_the_surroundings():
    name = name_of("schedule=gpipe")
    assert name == name_of("schedule=gpipe", "results_dir=x", "force=true", "save_timeline=true")
    assert name != name_of("schedule=gpipe", "seed=1")


def test_identity_follows_the_code_the_packages_and_the_environment(monkeypatch):
    name = name_of("schedule=gpipe")
    others = provenance.versions() | {"torch": "3"}
    for change in (
        lambda patch: patch.setattr(provenance, "code_version", lambda: "other"),
        lambda patch: patch.setattr(provenance, "versions", lambda: others),
        lambda patch: patch.setenv("NUMBA_DISABLE_JIT", "1"),
    ):
        with monkeypatch.context() as patch:
            change(patch)
            assert name_of("schedule=gpipe") != name


def test_what_is_measured_is_of_this_machine_and_a_simulation_of_any(monkeypatch):
    measured, simulated = ("backend=cpu", "model=tiny_gpt"), ("schedule=gpipe",)
    names = [name_of(*measured), name_of(*simulated)]
    monkeypatch.setattr(provenance, "hardware", lambda: {"processor": "another"})
    assert name_of(*measured) != names[0]
    assert name_of(*simulated) == names[1]


def test_identity_follows_the_bytes_of_files_not_their_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = set()
    for text in ("one", "two"):
        (tmp_path / "order.txt").write_text(text)
        names.add(name_of("schedule_file=order.txt"))
        names.add(name_of("cost=profiled", "model=tiny_gpt", "cost.profile=order.txt"))
    assert len(names) == 4
    (tmp_path / "order.txt").unlink()
    with pytest.raises(ValueError, match=r"schedule_file=order\.txt: cannot be read"):
        load(["schedule_file=order.txt"])


def test_a_record_keeps_what_was_chosen(tmp_path):
    (row,) = run(
        load(
            [
                "schedule=roundpipe_call",
                "experiment=hand_cuts",
                "schedule=roundpipe_call",
                "model=abstract",
                "cost=unit",
                "partition=even",
                "num_devices=2",
                f"results_dir={tmp_path}",
            ]
        )
    )
    assert (row["schedule"], row["generator"]) == ("roundpipe_call", "roundpipe")
    assert row["choices"]["schedule"] == "roundpipe_call"
    assert (row["experiment"], row["choices"]["experiment"]) == ("hand_cuts", "hand_cuts")
    assert (row["mode"], row["choices"]["mode"], row["choices"]["backend"]) == ("simulate", "simulate", None)
    assert "num_devices=2" in row["overrides"]


def test_a_write_that_fails_leaves_the_old_record_and_no_rubbish(tmp_path, monkeypatch):
    folder = tmp_path / "run"
    record.write(folder, {"run_id": "run", "value": 1})
    full = OSError(errno.ENOSPC, "disk full")
    monkeypatch.setattr(record, "boundary", lambda: (_ for _ in ()).throw(full))
    for write in (
        lambda: record.write(folder, {"run_id": "run", "value": 2}),
        lambda: record.append_line(folder / "record.json", "line"),
        lambda: record.create(folder / "other", "text"),
    ):
        full.filename = ".record.json.abc-1"  # the temporary file, which nobody knows
        with pytest.raises(OSError, match="disk full") as told:
            write()
        assert str(folder) in str(told.value)
        assert ".abc-1" not in str(told.value)
    assert json.loads((folder / "record.json").read_text())["value"] == 1
    assert [path.name for path in folder.iterdir()] == ["record.json"]


def test_what_a_killed_writer_left_is_removed_by_the_next(tmp_path):
    child = os.fork()
    if not child:
        record.boundary = lambda passed=[]: passed.append(1) or (os._exit(0) if len(passed) == 2 else None)
        record.write(tmp_path, {"value": 1})
    os.waitpid(child, 0)
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".record.json.")
    living = tmp_path / left.name.replace(f"-{child}", f"-{os.getppid()}")
    living.touch()
    record.write(tmp_path, {"value": 2})
    assert {path.name for path in tmp_path.iterdir()} == {"record.json", living.name}


def test_a_record_is_strict_json():
    with pytest.raises(ValueError, match="JSON"):
        record.dump({"value": float("nan")})


@pytest.mark.parametrize(
    "change, said",
    [
        (lambda row: row.pop("evidence"), "no evidence"),
        (lambda row: row.update(run_id="other"), "does not match its folder"),
        (lambda row: row.update(status="fine"), "none of ok"),
        (lambda row: row.update(makespan_s=row["makespan_s"] * (1 + 1e-15)), "those that its digest was made of"),
        (lambda row: row.update(peak_in_flight=[3, 3]), "those that its digest was made of"),
        (lambda row: row.pop("digest"), "those that its digest was made of"),
        (lambda row: row.update(schema=2), "those that its digest was made of"),
        (lambda row: row.update(schema=0), "schema 0"),
        (lambda row: row.update(tokens_per_s="fast"), "no number"),
        (lambda row: row.update(choices=None, config=None), "not the one that its run_id"),
    ],
)
def test_what_is_no_record_is_said_and_not_counted(change, said, tmp_path, capsys):
    (row,) = run(load(["num_devices=2", f"results_dir={tmp_path}"]))
    assert [found["run_id"] for found in record.read_all(tmp_path)] == [row["run_id"]]
    change(row)
    (path,) = tmp_path.glob("*/record.json")
    path.write_text(json.dumps(row))
    assert list(record.read_all(tmp_path)) == []
    assert said in capsys.readouterr().err
    with pytest.raises(ValueError, match="is damaged; make it again"):  # it was called no record, nearest to itself
        record.find(tmp_path, path.parent.name[:8])


def test_a_record_without_a_digest_is_not_believed_silently(tmp_path, capsys):
    (row,) = run(load(["num_devices=2", f"results_dir={tmp_path}"]))
    (path,) = tmp_path.glob("*/record.json")
    path.write_text(json.dumps({k: v for k, v in row.items() if k != "digest"} | {"schema": 2, "makespan_s": 1.0}))
    capsys.readouterr()
    assert [found["makespan_s"] for found in record.read_all(tmp_path)] == [1.0]
    said = f"records of {tmp_path}: 1 without a digest, such as {path.parent.name}: nothing says whether"
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("cores", [0.1, 1.68])
def test_a_run_beside_other_programs_says_so(cores):
    asked = {
        "schedule": "1f1b",
        "model": "m",
        "num_devices": 2,
        "num_microbatches": 8,
        "partition": "even",
        "mode": "train",
    }
    asked |= {"run_id": "0" * 16, "status": "ok", "cost": "unit", "evidence": "measured"}
    took = {"makespan_s": 9.754, "bubble_makespan": 0.18, "replay_makespan_s": 1.7935, "foreign_cpu_share": cores}
    words = "while other programs kept 1.68 cores busy (1.7935 s by each action's own processor time)"
    assert (words in describe(asked | took)) == (cores > 1)


def test_a_run_that_breaks_leaves_a_failed_record_that_is_tried_again(tmp_path, monkeypatch):
    request = load(["num_devices=2", f"results_dir={tmp_path}"])
    with monkeypatch.context() as patch:
        patch.setattr(simulate, "simulate_graph", lambda *_: (_ for _ in ()).throw(RuntimeError("broken")))
        (failed,) = run(request)
    (row,) = record.read_all(tmp_path)
    assert row == failed
    assert (row["status"], row["reason"]) == ("failed", "RuntimeError: broken")
    assert "broken" in next(tmp_path.glob("*/events.jsonl")).read_text()
    (again,) = run(request)
    assert again["status"] == "ok"


def test_a_run_whose_numbers_are_none_leaves_a_failed_record_without_them(tmp_path):
    request = load(["num_devices=2", f"results_dir={tmp_path}"])
    found = Outcome({"loss": math.nan, "losses": [1.0, math.inf], "makespan_s": 2.0}, words="the last words")
    row = recorded(request, lambda _: Work({}, lambda: found))
    assert (row["status"], row["makespan_s"], row.get("loss"), row.get("losses")) == ("failed", 2.0, None, None)
    assert row["reason"].startswith("loss=nan: no number; lower optimizer.learning_rate")
    assert list(record.read_all(tmp_path)) == [row]
    assert "losses=inf" in next(tmp_path.glob("*/events.jsonl")).read_text()


def test_events_tell_how_a_run_went(tmp_path):
    (row,) = run(load(["num_devices=2", f"results_dir={tmp_path}"]))
    lines = (tmp_path / row["run_id"] / "events.jsonl").read_text().splitlines()
    assert [json.loads(line)["event"] for line in lines] == ["started", "finished"]


@pytest.mark.parametrize(
    "backend, dtype, told",
    [("cpu", "float64", ", counted in 16 bits, not in float64"), ("cpu", "bfloat16", ""), (None, "float32", "")],
)
def test_memory_of_a_run_with_wider_tensors_says_how_it_is_counted(backend, dtype, told):
    row = {"run_id": "a", "status": "ok", "backend": backend, "peak_memory_bytes": [2 * 10**9]}
    assert table({**row, "config": {"dtype": dtype}})[-1] == f"memory    2.0 GB on the fullest device{told}"
