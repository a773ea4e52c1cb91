"""Identity: a record answers the cell that names it, or is refused with record, cell and field."""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from manifests import forge

from analysis.claims import all_claims, evaluate
from analysis.exhibits import catalogue
from analysis.records.experiments import Experiments, MissingRuns, WrongRecord
from rpbench.records import record
from rpbench.records.manifest import FOLDER, Cell, read_manifest
from rpbench.records.record import Record

EXPERIMENT = "figure17"
Change = Callable[[Record], None]


@pytest.fixture
def copied(results: Path, tmp_path: Path) -> Path:
    """A folder of results of one's own."""
    folder = tmp_path / "results"
    shutil.copytree(results, folder, copy_function=os.link, ignore=shutil.ignore_patterns(".*", FOLDER))
    shutil.copytree(results / FOLDER, folder / FOLDER)
    return folder


def _cell(folder: Path, **choices: str) -> Cell:
    manifest = read_manifest(folder, EXPERIMENT)
    assert manifest is not None
    return next(cell for cell in manifest.cells if choices.items() <= cell.overrides.items())


def _falsify(folder: Path, cell: Cell, change: Change) -> str:
    """Change a record and its digest, and nothing that names it."""
    (name,) = cell.run_ids
    row = record.read(folder / name)
    assert row is not None
    change(row)
    (folder / name / "record.json").unlink()  # it is a link
    record.write(folder / name, row)
    return name


def _forge(folder: Path, cell: Cell, change: Change) -> str:
    """Change a record, and everything that follows from it: its digest, its name, its folder and its manifest."""
    (name,) = cell.run_ids
    row = record.read(folder / name)
    assert row is not None
    change(row)
    row["run_id"] = record.run_id(record.identity_of(row)) if "surroundings" in row else name
    (folder / name / "record.json").unlink()
    sealed = record.write(folder / row["run_id"], row)
    known = next(digest for digest in cell.digests if digest)
    forge(folder / FOLDER / EXPERIMENT, {name: row["run_id"], known: sealed["digest"]})
    return str(row["run_id"])


def _refused(folder: Path, name: str, cell: Cell, field: str) -> None:
    with pytest.raises(WrongRecord) as error:
        Experiments(folder).cells(EXPERIMENT)
    words = str(error.value)
    assert f"the record {name} is not that of cell {cell} of experiment={EXPERIMENT}: " in words
    assert f"its {field} is " in words
    assert words.endswith(
        f"remove {folder / name} and run the sweep again: python -m rpbench -m experiment={EXPERIMENT}"
    )


def _exchange(folder: Path, one: Cell, other: Cell, fields: tuple[str, ...]) -> list[str]:
    """Exchange what two records say of themselves."""
    rows = [record.read(folder / cell.run_ids[0]) for cell in (one, other)]
    first, second = ({key: (row or {})[key] for key in fields} for row in rows)
    return [
        _falsify(folder, cell, lambda row, new=new: row.update(new)) for cell, new in ((one, second), (other, first))
    ]


@pytest.mark.parametrize(
    "one, other, field",
    [
        ({"schedule": "gpipe", "model": "qwen3_1p7b"}, {"schedule": "gpipe", "model": "qwen3_32b"}, "model"),
        ({"schedule": "gpipe", "model": "qwen3_1p7b"}, {"schedule": "1f1b", "model": "qwen3_1p7b"}, "schedule"),
    ],
)
def test_exchanged_labels_are_refused_by_exhibits_and_claims_alike(
    copied: Path, one: dict[str, str], other: dict[str, str], field: str
) -> None:
    cells = _cell(copied, **one), _cell(copied, **other)
    names = _exchange(copied, *cells, (field,))
    _refused(copied, names[0], cells[0], field)
    seen = Experiments(copied)
    lacking = dict(catalogue.exhibits(seen)[1])
    assert f"its {field} is '{other[field]}', the cell asks for '{one[field]}'" in lacking["figure17"]
    claims = [claim for claim in all_claims() if any(need.experiment == EXPERIMENT for need in claim.needs)]
    assert claims
    assert all(verdict.red and names[0] in verdict.reason for verdict in evaluate(claims, seen))


# Every name and every leaf of the configuration, as far as a run of its own would have another.
_NAMES = (
    *("schedule", "generator", "model", "cluster", "workload", "cost", "mode", "backend", "experiment", "partition"),
    *("dispatch", "offload", "num_devices", "num_microbatches", "num_steps", "seed", "notes", "code_version", "mesh"),
)


def _leaves(values: dict[str, Any], at: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, (*at, key))
        else:
            yield (*at, key)


def _other(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    if isinstance(value, dict):
        return value | {"other": 1}
    return ["other"] if isinstance(value, list) else "other"


def _change_at(path: tuple[str, ...]) -> Change:
    def change(row: Record) -> None:
        *outer, last = path
        for key in outer:
            row = row[key]
        row[last] = _other(row.get(last))

    return change


def _refusal(folder: Path) -> str | None:
    try:
        Experiments(folder).cells(EXPERIMENT)
    except MissingRuns as error:
        return str(error)
    return None


@pytest.mark.parametrize("attack", [_falsify, _forge])
def test_no_name_and_no_choice_can_be_changed_unseen(copied: Path, attack: Callable[[Path, Cell, Change], str]) -> None:
    """By somebody who changes the record and its digest, and by one who renames folder and manifest as well."""
    cell = _cell(copied, schedule="interleaved_1f1b", model="llama31_8b")
    (name,) = cell.run_ids
    whole, journals = record.read(copied / name), (copied / FOLDER / EXPERIMENT).glob("*.jsonl")
    assert whole is not None
    before = {path: path.read_text() for path in journals}
    paths = [
        *((key,) for key in _NAMES if (key in whole and key != "backend") or key == "mesh"),
        *_leaves({key: whole[key] for key in ("config", "choices")}, ()),
    ]
    assert len(paths) > 80
    for path in paths:
        changed = attack(copied, cell, _change_at(path))
        said = _refusal(copied)
        assert f"the record {changed} is not that of cell {cell} of experiment={EXPERIMENT}: " in str(said), path
        assert f"its {'.'.join(path)}" in str(said), path
        shutil.rmtree(copied / changed)
        record.write(copied / name, whole)
        for path_of, text in before.items():
            path_of.write_text(text)
    Experiments(copied).cells(EXPERIMENT)


@pytest.mark.parametrize(
    "field", ["started_at", "git_commit", "hardware", "versions", "makespan_s", "partition_layers"]
)
def test_what_follows_from_no_choice_is_held_by_the_digest_in_the_manifest(copied: Path, field: str) -> None:
    cell = _cell(copied, schedule="gpipe", model="qwen3_1p7b")
    name = _falsify(copied, cell, lambda row: row.update({field: _other(row[field])}))
    with pytest.raises(
        WrongRecord, match=rf"the record {name} is not that of cell .*: (a value of it is not|its versions)"
    ):
        Experiments(copied).cells(EXPERIMENT)


def test_a_cell_answered_by_another_cells_record_is_refused(copied: Path) -> None:
    one, other = _cell(copied, schedule="gpipe"), _cell(copied, schedule="looped_bfs")
    forge(copied / FOLDER / EXPERIMENT, {one.run_ids[0]: other.run_ids[0]})
    _refused(copied, other.run_ids[0], one, "schedule")
