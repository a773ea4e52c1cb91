"""Manifests: a plan before the first cell, a line for each that ended, and what several workers wrote as one table."""

import json
from collections import Counter

import pytest

from rpbench.records import manifest as manifests
from rpbench.records.manifest import PLAN, Ends, Journal, ManifestError, manifest_name, read_manifest, write_plan
from rpbench.run.recording import Outcome
from rpbench.sweep import multirun as sweep

SWEEP = ("-m", "schedule=gpipe,1f1b,zb_h1,chimera,zb_v", "num_devices=2", "num_microbatches=4")


def row(name, status="ok", **more):
    return {"run_id": name, "status": status, "reason": None} | more


def planned(results, num_cells, experiment="figure17"):
    """The plan of a sweep over as many seeds."""
    cells = [[f"seed={number}", "tracker=none"] for number in range(num_cells)]
    return write_plan(results, experiment, (), cells)


def states(results, name="figure17"):
    return [cell.state for cell in read_manifest(results, name).cells]


def only_manifest(results):
    (name,) = manifests.manifest_names(results)
    return read_manifest(results, name)


# --- sweeps --------------------------------------------------------------------------------------------------


def test_a_plan_stands_before_the_first_cell_and_every_end_is_told(rpbench, tmp_path, monkeypatch):
    """A sweep whose cells end in every way, the last one by an interruption; then the same sweep again."""
    results, real, seen, asked = tmp_path / "results", sweep.run, [], []
    ends = {"zb_h1": RuntimeError("the disk broke"), "chimera": ValueError("no such shape"), "zb_v": KeyboardInterrupt}

    def run(request):
        asked.append(request.schedule.chosen)
        seen.append(only_manifest(results))
        if request.schedule.chosen in ends:
            raise ends[request.schedule.chosen]
        rows = real(request)
        return [{**each, "status": "infeasible", "reason": "too small"} for each in rows] if "1f1b" in asked else rows

    monkeypatch.setattr(sweep, "run", run)
    status, rows, _ = rpbench(*SWEEP)
    assert (status, len(rows)) == (130, 2)
    assert Counter(cell.state for cell in seen[0].cells) == {"planned": 5}
    assert dict(seen[0].cells[1].overrides) == {"schedule": "1f1b", "num_devices": "2", "num_microbatches": "4"}
    found = only_manifest(results)
    assert [cell.state for cell in found.cells] == ["done", "infeasible", "failed", "not applicable", "planned"]
    assert [cell.run_ids for cell in found.cells] == [(rows[0]["run_id"],), (rows[1]["run_id"],), (), (), ()]
    assert "the disk broke" in found.cells[2].reason
    assert found.cells[3].reason == "no such shape"

    monkeypatch.setattr(sweep, "run", real)
    before = (results / rows[0]["run_id"] / "record.json").stat().st_mtime_ns
    status, again, _ = rpbench(*SWEEP[:1], *SWEEP[1:], f"results_dir={results}")
    assert status == 0
    found = only_manifest(results)
    assert set(found.counts) == {"done"}
    assert [cell.run_ids for cell in found.cells] == [(each["run_id"],) for each in again]
    assert (results / rows[0]["run_id"] / "record.json").stat().st_mtime_ns == before


def test_a_cell_that_cannot_be_asked_for_is_refused_in_the_manifest(rpbench, tmp_path):
    status, rows, err = rpbench("-m", "schedule=zb_v", "num_devices=2", "num_microbatches=4", "chunks_per_device=2,0")
    assert (status, len(rows)) == (2, 1)
    found = only_manifest(tmp_path / "results")
    assert [cell.state for cell in found.cells] == ["done", "not applicable"]
    assert found.cells[1].reason in err


def test_a_run_that_breaks_is_a_failed_cell_with_its_record(rpbench, tmp_path, monkeypatch):
    monkeypatch.setattr("rpbench.run.recording._carried_out", lambda work, events: _broken())
    status, rows, _ = rpbench("-m", "schedule=gpipe", "num_devices=2", "num_microbatches=2")
    assert (status, rows[0]["status"]) == (1, "failed")
    (cell,) = only_manifest(tmp_path / "results").cells
    assert (cell.state, cell.run_ids, cell.reason) == ("failed", (rows[0]["run_id"],), "RuntimeError: no ink")


def _broken():
    return Outcome({"status": "failed", "reason": "RuntimeError: no ink", "evidence": None})


# --- what workers write --------------------------------------------------------------------------------------


def test_every_state_is_told_by_a_line(tmp_path):
    plan = planned(tmp_path, 6)
    Journal(tmp_path, plan, 0).ended([row("a")])
    Journal(tmp_path, plan, 1).ended([row("b", "infeasible", reason="41 GB")])
    Journal(tmp_path, plan, 2).ended([row("c", "oom")])
    Journal(tmp_path, plan, 3).refused("no such shape")
    Journal(tmp_path, plan, 4).failed("broke")
    found = read_manifest(tmp_path, "figure17")
    assert [cell.state for cell in found.cells] == ["done", "infeasible", "oom", "not applicable", "failed", "planned"]
    assert (found.cells[1].run_ids, found.cells[1].reason) == (("b",), "41 GB")
    assert found.counts == dict.fromkeys(("done", "infeasible", "oom", "not applicable", "failed", "planned"), 1)
    assert found.command == "python -m rpbench -m experiment=figure17"
    assert str(found.cells[5]) == "seed=5"  # what does not belong to the subject is left out


def test_workers_of_several_hosts_are_one_manifest(tmp_path, monkeypatch):
    plan = planned(tmp_path, 4)
    folder = plan.folder(tmp_path)
    for host, cells in (("aa", (0, 2)), ("bb", (1, 3))):
        monkeypatch.setattr(manifests.provenance, "host_word", lambda host=host: host)
        for number in cells:
            Journal(tmp_path, plan, number).ended([row(f"run{number}")])
    assert len(list(folder.glob("*.jsonl"))) == 2
    assert [cell.run_ids for cell in read_manifest(tmp_path, "figure17").cells] == [(f"run{n}",) for n in range(4)]


@pytest.mark.parametrize("order", [("first", "then"), ("then", "first")])
@pytest.mark.parametrize("status, state", [("ok", "done"), ("infeasible", "infeasible"), ("oom", "oom")])
def test_a_verdict_outlasts_a_failure_whoever_wrote_last(order, status, state, tmp_path, monkeypatch):
    plan = planned(tmp_path, 2)
    for host in order:
        monkeypatch.setattr(manifests.provenance, "host_word", lambda host=host: host)
        if host == "first":
            Journal(tmp_path, plan, 0).failed("killed")
            Journal(tmp_path, plan, 1).refused("no such shape")
        else:
            Journal(tmp_path, plan, 0).ended([row("a", status)])
            Journal(tmp_path, plan, 1).ended([row("b", status)])
    assert states(tmp_path) == [state, state]


def test_of_two_ends_with_numbers_the_later_one_counts(tmp_path, monkeypatch):
    """As where a sweep is run again by force with other code."""
    plan = planned(tmp_path, 1)
    journal = Journal(tmp_path, plan, 0)
    journal.ended([row("a")])
    journal.ended([row("b")])
    assert [cell.run_ids for cell in read_manifest(tmp_path, "figure17").cells] == [("b",)]


def test_a_duels_cell_names_the_record_of_each_contender(tmp_path):
    plan = planned(tmp_path, 3, "cpu_duel")
    Journal(tmp_path, plan, 0).ended([row("a"), row("b"), row("c")])
    Journal(tmp_path, plan, 1).ended([row("d", "infeasible", reason="41 GB"), row("e")])
    Journal(tmp_path, plan, 2).ended([row("f"), row("g", "failed", reason="broke")])
    cells = read_manifest(tmp_path, "cpu_duel").cells
    assert [(cell.state, cell.run_ids) for cell in cells] == [
        ("done", ("a", "b", "c")),
        ("done", ("d", "e")),
        ("failed", ("f", "g")),
    ]
    assert cells[2].reason == "broke"


def test_what_a_cell_has_told_by_its_end_is_not_told_again(tmp_path):
    plan = planned(tmp_path, 1)
    journal = Journal(tmp_path, plan, 0)
    journal.ended([row("a", "failed", reason="broke")])
    journal.failed("run failed: a: broke")
    assert read_manifest(tmp_path, "figure17").cells[0].run_ids == ("a",)


def test_a_line_after_a_torn_one_is_read(tmp_path):
    plan = planned(tmp_path, 3)
    folder = plan.folder(tmp_path)
    for number in range(2):
        Journal(tmp_path, plan, number).ended([row(f"run{number}")])
    (path,) = folder.glob("*.jsonl")
    path.write_text(path.read_text()[:-9])
    Journal(tmp_path, plan, 2).ended([row("run2")])
    assert states(tmp_path) == ["done", "planned", "done"]


def test_a_worker_hears_what_others_of_its_command_have_ended(tmp_path, monkeypatch):
    plan = planned(tmp_path, 4)
    folder = plan.folder(tmp_path)
    ends, other = Ends(tmp_path, plan), planned(tmp_path, 4)
    Journal(tmp_path, other, 0).ended([row("a")])  # of another start of the same sweep
    assert 0 not in ends
    for number, host in ((1, "aa"), (2, "bb")):
        monkeypatch.setattr(manifests.provenance, "host_word", lambda host=host: host)
        Journal(tmp_path, plan, number).refused("no such shape")
        assert [each in ends for each in range(4)] == [False, *(each <= number for each in (1, 2)), False]
    with next(folder.glob("aa-*.jsonl")).open("a") as torn:
        torn.write('{"cell": 3, ')
    assert 3 not in ends


@pytest.mark.parametrize(
    "change", [{"cell": 2}, {"cell": -1}, {"cell": "0"}, {"state": "fine"}, {"plan": "another"}, {"cell": None}]
)
def test_a_line_that_fits_no_cell_counts_for_nothing(change, tmp_path):
    plan = planned(tmp_path, 2)
    folder = plan.folder(tmp_path)
    line = {"plan": plan.plan_id, "cell": 0, "state": "done", "run_ids": ["a"], "reason": ""} | change
    (folder / "worker.jsonl").write_text(json.dumps(line) + "\n[1]\n")
    assert states(tmp_path) == ["planned", "planned"]


# --- plans ---------------------------------------------------------------------------------------------------


def test_what_is_beside_the_subject_does_not_name_a_sweep():
    besides = ("results_dir=elsewhere", "tracker=wandb", "tracker.project=a", "force=true", "save_timeline=true")
    assert manifest_name("figure17", (*besides, "hydra/launcher=joblib", "experiment=figure17")) == "figure17"
    assert manifest_name("figure17", ("seed=1", *besides)) == manifest_name("figure17", ("seed=1",)) != "figure17"
    assert manifest_name("figure17", ("a=1", "b=2")) == manifest_name("figure17", ("b=2", "a=1"))
    assert manifest_name(None, ("seed=1",)).startswith("sweep-")


def test_lines_of_an_older_plan_count_for_nothing(tmp_path):
    plan = planned(tmp_path, 2)
    Journal(tmp_path, plan, 0).ended([row("a")])
    assert planned(tmp_path, 2).plan_id == plan.plan_id, "the same sweep goes on"
    assert states(tmp_path) == ["done", "planned"]
    assert planned(tmp_path, 3).plan_id != plan.plan_id
    assert states(tmp_path) == ["planned"] * 3


def test_a_plan_knows_the_code_and_the_configuration(tmp_path, monkeypatch):
    plan = planned(tmp_path, 2)
    for what in ("code_version", "conf_version"):
        with monkeypatch.context() as changed:
            changed.setattr(manifests.provenance, what, lambda: "later")
            assert planned(tmp_path, 2).plan_id != plan.plan_id
            assert getattr(read_manifest(tmp_path, "figure17"), what) == "later"


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"cells": [1]}', '{"cells": []}'])
def test_a_plan_that_is_none_is_named(text, tmp_path):
    plan = planned(tmp_path, 1)
    folder = plan.folder(tmp_path)
    (folder / PLAN).write_text(text)
    with pytest.raises(ManifestError, match=r"plan\.json: not a readable plan .*; remove it and run the sweep again"):
        read_manifest(tmp_path, "figure17")


def test_no_plan_is_no_manifest(tmp_path):
    assert read_manifest(tmp_path, "figure17") is None
    assert manifests.manifest_names(tmp_path) == []
