"""Experiments: records reach tables through whole and current manifests of their sweeps, and in no other way."""

import os
import shutil
from pathlib import Path

import pytest
from manifests import forge, put
from spared import slow

from analysis.claims import all_claims, evaluate
from analysis.exhibits import catalogue
from analysis.records.experiments import Experiments, MissingRuns, Sweep, WrongRecord, index, is_complete, succeeded
from analysis.records.published import published
from rpbench.config.configuration import swept
from rpbench.records import provenance, record
from rpbench.records.manifest import FOLDER, PLAN, Journal, read_manifest, write_plan
from rpbench.records.record import Record

COMMAND = "python -m rpbench -m experiment=figure17"


@pytest.fixture
def copied(results: Path, tmp_path: Path) -> Path:
    """A folder of results of one's own; records are links, manifests copies."""
    return _copy(results, tmp_path / "results")


def _copy(results: Path, folder: Path) -> Path:
    shutil.copytree(results, folder, copy_function=os.link, ignore=shutil.ignore_patterns(".*", FOLDER))
    shutil.copytree(results / FOLDER, folder / FOLDER)
    return folder


def journal_of(folder: Path, experiment: str) -> Path:
    """The one journal of a sweep; of several processes that made the same records, each whole, one is left."""
    path, *others = sorted((folder / FOLDER / experiment).glob("*.jsonl"))
    for other in others:
        other.unlink()
    return path


# --- only what a manifest names ------------------------------------------------------------------------------


def test_every_cell_is_a_row(experiments: Experiments) -> None:
    sizes = {name: len(experiments.cells(name)) for name in ("figure17", "roofline", "atlas")}
    assert sizes == {"figure17": 25, "roofline": 40, "atlas": len(swept("atlas", "schedule"))}
    assert len(experiments.rows) == sum(sizes.values())
    assert experiments.cells("figure17")["cell"].to_list() == list(range(25))


@pytest.mark.slow
def test_a_record_that_no_manifest_names_reaches_no_table_and_no_claim(full_results: Path, tmp_path: Path) -> None:
    """Newer records with the configuration and the choices of every cell, and other numbers in them."""
    before = _told(Experiments(full_results))
    folder = _copy(full_results, tmp_path / "results")
    rows = Experiments(folder).rows
    impostors = {row["run_id"]: _impostor(folder, row) for row in rows}
    assert len(impostors) > 500
    assert len(list(folder.glob("*/record.json"))) == 2 * len(impostors)

    seen = Experiments(folder)
    assert _told(seen) == before
    assert not {row["run_id"] for row in seen.rows} & set(impostors.values())

    # A manifest that names them is refused: they do not follow from what its cells ask for.
    forge(folder / FOLDER / "figure17", impostors)
    with pytest.raises(WrongRecord, match="it has no surroundings, which its run_id follows from"):
        Experiments(folder).cells("figure17")


def _impostor(folder: Path, row: Record) -> str:
    """Leave a record that looks like another, was made later and has other numbers; return its name."""
    name = record.run_id({"looks like": row["run_id"]})
    others = {key: 3 * row[key] for key in ("makespan_s", "tokens_per_s", "ratio") if isinstance(row.get(key), float)}
    (folder / name).mkdir()
    for file in (folder / row["run_id"]).iterdir():
        os.link(file, folder / name / file.name)
    (folder / name / "record.json").unlink()
    row = {key: value for key, value in row.items() if key != "surroundings"}  # a run_id of those is verified
    record.write(folder / name, row | others | {"run_id": name, "started_at": "2999-01-01T00:00:00+00:00"})
    return name


def _told(experiments: Experiments) -> bytes:
    """Every table, caption and verdict, as text."""
    made, missing = catalogue.exhibits(experiments)
    assert missing == []
    verdicts = evaluate(all_claims(), experiments)
    tables = "\n".join(f"{each.id}: {each.table} {each.caption}" for each in made)
    return "\n".join([tables, *(f"{item.claim.id} {item.kind} {item.value}" for item in verdicts)]).encode()


def test_a_folder_without_manifests_has_no_experiment_whatever_records_it_holds(copied: Path) -> None:
    shutil.rmtree(copied / FOLDER)
    assert Experiments(copied).rows == []
    with pytest.raises(MissingRuns, match=f"experiment=figure17 has not been run here: {COMMAND}$"):
        Experiments(copied).cells("figure17")


def test_a_cell_is_found_by_what_it_sets(experiments: Experiments) -> None:
    found = experiments.find("figure17", {"model": "qwen3_32b", "schedule": "gpipe"})
    assert found is not None
    assert (found["schedule"], found["model"]) == ("gpipe", "qwen3_32b")
    assert experiments.find("figure17", {"schedule": "zb_v"}) is None
    assert experiments.plans("figure17", {"schedule": "gpipe"})
    assert not experiments.plans("figure17", {"schedule": "zb_v"})


def test_a_duel_is_found_by_cell_and_contender(full_experiments: Experiments) -> None:
    rows = {name: full_experiments.find("cpu_duel", {"model": "half_mid_gpt"}, name) for name in ("1f1b", "roundpipe")}
    assert {name: row and row["contender"] for name, row in rows.items()} == {"1f1b": "1f1b", "roundpipe": "roundpipe"}


# --- what is lost, old or torn -------------------------------------------------------------------------------


def test_a_record_that_is_gone_is_reported_by_cell_and_command(copied: Path) -> None:
    (lost,) = read_manifest(copied, "figure17").cells[7].run_ids
    shutil.rmtree(copied / lost)
    words = f"the record {lost} of cell schedule=1f1b model=gpt_oss_20b is gone: {COMMAND}$"
    with pytest.raises(MissingRuns, match=words):
        Experiments(copied).cells("figure17")


def test_exhibits_of_figure_17_show_the_other_cells_and_name_the_one_that_is_gone(
    full_results: Path, tmp_path: Path
) -> None:
    """One missing record took the other 24 out of the paper's exhibits."""
    folder = _copy(full_results, tmp_path / "results")
    cell = read_manifest(folder, "figure17").cells[7]
    shutil.rmtree(folder / cell.run_ids[0])
    made, missing = catalogue.exhibits(Experiments(folder))
    shown = {each.id: each for each in made if each.id in ("figure17", "published_cells", "timelines")}
    assert len(shown) == 3
    for each in shown.values():
        assert each.caption.startswith("24 of 25 cells; missing: 1F1B on GPT-OSS-20B. ")
        assert cell.run_ids[0] not in each.records
        assert each.draw is None or each.draw()
    assert shown["published_cells"].caption.endswith("24 of 24 cells agree in every number.")
    assert "On the 4 of 5 models with all bars, one RoundPipe call" in shown["figure17"].caption
    assert shown["figure17"].caption.endswith("29 of 29 published bars are met to their last digit.")
    assert {"figure3", "prediction"} <= {each.id for each in made}  # they are about other schedules
    assert dict(missing)["tuning"].startswith("1 of 25 runs of experiment=figure17: 1f1b gpt_oss_20b")


def test_a_torn_record_is_as_good_as_gone(copied: Path) -> None:
    (torn,) = read_manifest(copied, "figure17").cells[7].run_ids
    text = (copied / torn / "record.json").read_text()
    (copied / torn / "record.json").unlink()  # it is a link
    (copied / torn / "record.json").write_text(text[:100])
    with pytest.raises(MissingRuns, match=f"the record {torn} of cell .* is gone"):
        Experiments(copied).cells("figure17")


@pytest.mark.parametrize(
    "what, words",
    [("code_version", "by another version of the code"), ("conf_version", "with another configuration")],
)
def test_a_manifest_of_another_time_is_refused_with_its_command(
    results: Path, monkeypatch: pytest.MonkeyPatch, what: str, words: str
) -> None:
    monkeypatch.setattr(provenance, what, lambda: "later")
    with pytest.raises(MissingRuns, match=f"experiment=figure17 was run {words}: {COMMAND}$"):
        Experiments(results).cells("figure17")
    assert not is_complete(results, Sweep("figure17"), lambda _: True)


@pytest.mark.parametrize("length", [0, slow(1), 500])
def test_a_torn_plan_is_named_and_makes_nothing(copied: Path, length: int) -> None:
    plan = copied / FOLDER / "figure17" / PLAN
    plan.write_text(plan.read_text()[:length])
    seen = Experiments(copied)
    with pytest.raises(MissingRuns, match=rf"{plan}: not a readable plan .*; remove it and run the sweep again"):
        seen.cells("figure17")
    made, missing = catalogue.exhibits(seen)
    assert "figure2" in {exhibit.id for exhibit in made}  # the closed forms are whole
    assert {"figure17", "published_cells", "timelines"} <= set(dict(missing))
    assert {manifest.name for manifest in seen.manifests} == {"roofline", "atlas"}
    assert not is_complete(copied, Sweep("figure17"), lambda _: True)


def test_a_torn_line_leaves_its_cell_planned(copied: Path) -> None:
    assert is_complete(copied, Sweep("figure17"), lambda _: True)
    journal = journal_of(copied, "figure17")
    lines = journal.read_text().splitlines(keepends=True)
    last = max(number for number, line in enumerate(lines) if '"cell": 24,' in line)
    journal.write_text("".join(line for line in lines[:last] if '"cell": 24,' not in line) + lines[last][:-20])
    assert read_manifest(copied, "figure17").counts == {"done": 24, "planned": 1}
    assert len(Experiments(copied).cells("figure17")) == 24
    assert not is_complete(copied, Sweep("figure17"), lambda _: True)
    made, missing = catalogue.exhibits(Experiments(copied))
    (cells,) = (each for each in made if each.id == "published_cells")
    assert cells.caption.startswith("24 of 25 cells; missing: RoundPipe on Qwen3-235B LoRA.")
    assert dict(missing)["prediction"] == "1 of 5 runs of experiment=figure17: roundpipe qwen3_235b_lora"


def test_a_sweep_without_a_verdict_is_no_empty_table(copied: Path) -> None:
    journal_of(copied, "figure17").write_text('{"plan": "')
    with pytest.raises(MissingRuns, match=f"no cell of experiment=figure17 came to a verdict .25 planned.: {COMMAND}$"):
        Experiments(copied).cells("figure17")


# --- states --------------------------------------------------------------------------------------------------


def _row(name: str, **fields: object) -> Record:
    plain = dict.fromkeys(record.REQUIRED) | {"run_id": name, "status": "ok", "made_up": True}
    return plain | fields


def _left(folder: Path, *rows: Record) -> None:
    for row in rows:
        record.write(folder / row["run_id"], row)


def test_failed_and_refused_cells_are_no_rows_and_verdicts_are(tmp_path: Path) -> None:
    ok, tight, broken = _row("a"), _row("b", status="infeasible"), _row("c", status="failed")
    _left(tmp_path, ok, tight, broken)
    cells = [({"seed": number}, [row] if row else []) for number, row in enumerate((ok, tight, broken, None, None))]
    put(tmp_path, "figure17", cells)
    plan = write_plan(tmp_path, "figure17", (), [[f"seed={number}"] for number in range(5)])
    Journal(tmp_path, plan, 3).refused("no such shape")
    assert list(read_manifest(tmp_path, "figure17").counts) == [
        "done",
        "infeasible",
        "failed",
        "not applicable",
        "planned",
    ]
    seen = Experiments(tmp_path)
    assert seen.cells("figure17")["run_id"].to_list() == ["a", "b"]
    assert succeeded(seen.cells("figure17"))["run_id"].to_list() == ["a"]
    assert [seen.find("figure17", {"seed": str(number)}) is not None for number in range(5)] == [
        True,
        True,
        *[False] * 3,
    ]
    assert {row["run_id"] for row in seen.rows} == {"a", "b", "c"}  # the report lists what failed


def test_a_record_that_failed_later_is_no_row(tmp_path: Path) -> None:
    _left(tmp_path, _row("a"), _row("b"))
    put(tmp_path, "figure17", [({"seed": 0}, [_row("a")]), ({"seed": 1}, [_row("b")])])
    _left(tmp_path, _row("b", status="failed"))
    assert Experiments(tmp_path).cells("figure17")["run_id"].to_list() == ["a"]


def test_a_narrowed_sweep_stands_in_only_where_the_whole_was_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    narrowed = Sweep("roofline", ("cluster=8x_rtx4090",))
    _left(tmp_path, _row("part"), _row("whole"))
    put(tmp_path, "roofline", [({"model": "a"}, [_row("part")])], narrowed.overrides)
    with pytest.raises(MissingRuns, match="has not been run here"):
        Experiments(tmp_path).cells("roofline")
    scoped = Experiments(tmp_path, (Sweep("roofline", ("seed=1",)), narrowed))
    assert scoped.cells("roofline")["run_id"].to_list() == ["part"]

    put(tmp_path, "roofline", [({"model": "a"}, [_row("whole")])])
    assert Experiments(tmp_path, (narrowed,)).cells("roofline")["run_id"].to_list() == ["whole"]

    # A whole sweep of older code does not stand before a narrowed one of this code.
    monkeypatch.setattr(provenance, "code_version", lambda: "later")
    put(tmp_path, "roofline", [({"model": "a"}, [_row("part")])], narrowed.overrides)
    assert Experiments(tmp_path, (narrowed,)).cells("roofline")["run_id"].to_list() == ["part"]
    with pytest.raises(MissingRuns, match=r"another version of the code: python -m rpbench -m experiment=roofline$"):
        Experiments(tmp_path).cells("roofline")


# --- tables --------------------------------------------------------------------------------------------------


def test_rows_come_in_the_order_asked_for_and_missing_ones_are_named(experiments: Experiments) -> None:
    rows, keys = experiments.cells("figure17"), ("schedule", "model")
    wanted = [("roundpipe", "qwen3_32b"), ("gpipe", "llama31_8b")]
    assert index(rows, keys, wanted, "figure17")[list(keys)].to_records(index=False).tolist() == wanted
    lost = [(name, "qwen3_32b") for name in ("a", "b", "gpipe", "c", "d")]
    with pytest.raises(
        MissingRuns, match=r"4 of 5 runs of experiment=figure17: a qwen3_32b, b qwen3_32b, c .* \.\.\.$"
    ):
        index(rows, keys, lost, "figure17")


def test_not_available_is_a_word_and_an_empty_cell_is_not() -> None:
    status = published("throughput").set_index(["system", "model"])["status"]
    assert status["megatron-tp", "qwen3-235b-lora"] == "N/A"
    assert published("figure2")["ratio_corrected"].isna().any()
