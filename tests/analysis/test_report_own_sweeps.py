"""The report of somebody's own sweeps: their runs compared, and not a word about the paper's claims."""

import json
from pathlib import Path

import pytest

from analysis.exhibits.own_sweep import exhibit
from analysis.records.experiments import Experiments
from analysis.report.page import build, gather
from rpbench.records.manifest import Journal, write_plan

CELLS = (
    ("schedule=1f1b", "num_microbatches=8"),
    ("schedule=roundpipe", "num_microbatches=8"),
    ("schedule=gpipe", "num_microbatches=8"),
    ("schedule=mobius", "num_microbatches=8"),
    ("schedule=dualpipe", "num_microbatches=8"),
    ("schedule=pipemare", "num_microbatches=8"),
)


def _record(run_id: str, **fields: object) -> dict:
    base = {
        "run_id": run_id,
        "status": "ok",
        "mode": "simulate",
        "cost": "unit",
        "schedule": "1f1b",
        "model": "transformer",
        "num_devices": 4,
        "num_microbatches": 8,
        "partition": "even",
        "cluster": "none",
        "workload": "none",
        "backend": "sim",
        "choices": {},
        "seed": 0,
        "evidence": "simulated",
        "config": {},
        "overrides": ["schedule=1f1b"],
        "makespan_s": 100.0,
        "bubble_makespan": 0.1,
        "started_at": "2026-01-01T00:00:00Z",
    }
    return base | fields


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A sweep with runs that ended in every way there is."""
    results = tmp_path / "results"
    plan = write_plan(results, None, ["schedule=1f1b,roundpipe"], CELLS)
    rows: list[dict] = [
        _record("a" * 16),
        _record("b" * 16, schedule="roundpipe", makespan_s=90.0, bubble_makespan=0.05),
        _record("c" * 16, schedule="gpipe", status="failed", reason="RuntimeError: no ink", evidence=None),
        _record("d" * 16, status="oom", reason="needs 40 GB; of 24", makespan_s=None, evidence=None),
    ]
    for key in ("partition", "makespan_s", "bubble_makespan"):  # it failed before it had them
        del rows[2][key]
    for number, row in enumerate(rows):
        (results / row["run_id"]).mkdir()
        (results / row["run_id"] / "record.json").write_text(json.dumps(row))
        Journal(results, plan, number).ended([row])
    Journal(results, plan, 4).refused("dualpipe needs an even number")
    return results


def test_the_report_speaks_of_these_runs_alone(own: Path, tmp_path: Path) -> None:
    path = build(own, tmp_path / "mine.html")
    pages = {page.name: page.read_text(encoding="utf-8") for page in (tmp_path / "mine_pages").glob("*.html")}
    text = "".join(pages.values()) + path.read_text(encoding="utf-8")
    assert "nobody planned for" not in text
    assert "arXiv" not in text
    assert "claim" not in path.read_text(encoding="utf-8").split("<main")[1].split("</main>")[0]
    assert not [name for name in pages if name.startswith("claims")]
    for words in ("RuntimeError: no ink", "needs 40 GB; of 24", "dualpipe needs an even number", "planned"):
        assert words in text


def test_the_best_of_every_column_bears_a_star(own: Path) -> None:
    experiments = Experiments(own)
    found = exhibit(experiments.manifests[0], experiments.rows)
    assert found.table is not None
    rows = {row[0].text: [cell.text for cell in row] for row in found.table.rows}
    assert found.table.columns[:3] == ("schedule", "makespan (slots)", "bubble (%)")
    assert rows["roundpipe"][1:3] == ["90 ★", "5.00 ★"]
    assert rows["1f1b"][1:3] == ["100", "10.00"]
    assert rows["gpipe"][1:] == ["–", "–", "failed: RuntimeError: no ink"]
    assert rows["pipemare"][-1] == "planned"
    assert found.caption.endswith("Best makespan (slots): roundpipe with 90.")
    assert found.title == "1f1b, roundpipe, gpipe, mobius and 2 more"
    assert found.question == "Which schedule is fastest?"
    assert "num_microbatches=8" in found.caption


def test_a_sweep_without_a_single_number_is_still_told(own: Path) -> None:
    for name in ("a" * 16, "b" * 16):
        path = own / name / "record.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"status": "failed", "reason": "gone"}))
    content = gather(Experiments(own))
    assert content.own[0].draw is None
    assert "No run of this sweep ended with numbers." in content.own[0].caption


def swept(results: Path, cells: list[tuple[str, ...]], rows: list[dict]):
    """The exhibit of a sweep with these cells, each with one record."""
    plan = write_plan(results, None, ["sweep"], cells)
    for number, row in enumerate(rows):
        (results / row["run_id"]).mkdir()
        (results / row["run_id"] / "record.json").write_text(json.dumps(row))
        Journal(results, plan, number).ended([row])
    experiments = Experiments(results)
    return exhibit(experiments.manifests[0], experiments.rows)


def test_only_runs_of_equal_work_are_compared_and_ties_are_told(tmp_path: Path) -> None:
    times = {("gpipe", 6): 27.0, ("1f1b", 6): 27.0, ("zb_h1", 6): 30.0, ("gpipe", 12): 45.0, ("zb_h1", 12): 39.0}
    cells = [(f"schedule={name}", f"num_microbatches={number}") for name, number in times]
    rows = [
        _record(f"{place:016x}", schedule=name, num_microbatches=number, makespan_s=time, bubble_makespan=0.1)
        for place, ((name, number), time) in enumerate(times.items())
    ]
    found = swept(tmp_path / "results", cells, rows)
    assert found.question == "Which schedule is fastest at which size?"
    assert found.title == "gpipe, 1f1b, zb_h1; num_microbatches 6, 12"
    assert found.caption.endswith(
        "Best makespan (slots): 6 microbatches: gpipe and 1f1b tie with 27; 12 microbatches: zb_h1 with 39."
    )
    assert found.table is not None
    stars = [[cell.text for cell in row[:2]] for row in found.table.rows if "★" in row[2].text]
    assert stars == [["gpipe", "6"], ["1f1b", "6"], ["zb_h1", "12"]]
    assert not any("★" in row[3].text for row in found.table.rows)  # all have one bubble: none is better


def test_the_same_tokens_are_the_same_work_and_other_costs_are_not(tmp_path: Path) -> None:
    cells = [("num_microbatches=8",), ("num_microbatches=16",), ("num_microbatches=8", "cost.forward_ms=2")]
    whole, halves, slower = (_record(character * 16, tokens_per_step=4096) for character in "abc")
    halves |= {"num_microbatches": 16, "makespan_s": 95.0}
    slower |= {"config": {"cost": {"forward_ms": 2}}, "makespan_s": 50.0}
    found = swept(tmp_path / "results", cells, [whole, halves, slower])
    assert found.caption.endswith(": 16 with 95.")
    assert found.table is not None
    assert [("★" in row[2].text) for row in found.table.rows] == [False, True, False]


def test_a_schedule_with_several_updates_for_a_batch_does_the_same_work(tmp_path: Path) -> None:
    """PipeDream steps after every microbatch: three batches of 2048 tokens are 24 updates of 256."""
    whole, each = (_record(character * 16, num_steps=3, tokens_per_step=2048, num_updates=3) for character in "ab")
    each |= {"schedule": "pipedream", "tokens_per_step": 256, "num_updates": 24, "makespan_s": 95.0}
    found = swept(tmp_path / "results", [("schedule=1f1b",), ("schedule=pipedream",)], [whole, each])
    assert found.question == "Which schedule is fastest?"
    assert found.caption.endswith(": pipedream with 95.")


@pytest.mark.parametrize("key, values", [("cluster.copy_bytes_per_s", (1, 20)), ("charge", ("hops", "bytes"))])
def test_another_machine_of_the_same_name_and_another_charge_are_other_work(key, values, tmp_path: Path) -> None:
    """Its values do not compete, and are told by their name alone."""
    group, _, option = key.partition(".")
    cells = [(f"schedule={name}", f"{key}={value}") for value in values for name in ("gpipe", "1f1b")]
    configs = [{group: {"name": "none", option: value} if option else value} for value in values for _ in range(2)]
    rows = [
        _record(f"{place:016x}", schedule=cell[0][9:], makespan_s=100.0 - place, config=config)
        for place, (cell, config) in enumerate(zip(cells, configs, strict=True))
    ]
    found = swept(tmp_path / "results", cells, rows)
    assert found.question == "Which schedule is fastest at which size?"
    told = [f"{key} {value}: 1f1b with {time}" for value, time in zip(values, (99, 97), strict=True)]
    assert found.caption.endswith(f": {'; '.join(told)}.")


def test_repeats_are_shown_as_a_range_and_ranges_that_meet_are_not_told_apart(tmp_path: Path) -> None:
    measured = {"gpipe": (10.0, 11.0, 14.0), "1f1b": (12.0, 13.0, 13.5), "zb_h1": (15.0, 16.0, 17.0)}
    cells = [(f"schedule={name}", f"seed={seed}") for name in measured for seed in range(3)]
    rows = [
        _record(f"{place:016x}", schedule=name, seed=seed, makespan_s=time, cost="measured", evidence="measured")
        for place, (name, seed, time) in enumerate(
            (name, seed, time) for name, times in measured.items() for seed, time in enumerate(times)
        )
    ]
    found = swept(tmp_path / "results", cells, rows)
    assert found.table is not None
    assert [row[1].text for row in found.table.rows] == ["11 (10–14) ★", "13 (12–13.5) ★", "16 (15–17)"]
    assert found.caption.endswith("Best makespan (s): gpipe and 1f1b tie with 11.")
    assert found.draw is not None
    assert found.draw().axes[0].get_xlabel() == "makespan (s)"
    assert len(found.run_ids) == 9
