"""Packs of records: whatever was packed when, the table is that of the records' files."""

import io
import json
import random
import shutil

import pyarrow.parquet
import pytest

from rpbench.commands.recorded import store
from rpbench.commands.recorded.store import export, pack, query, table
from rpbench.config.loading import load
from rpbench.records import record
from rpbench.run.recording import run

KINDS = (None, 4, 2.5, "auto", "\ud800", True, 2**70, ["a"], {"b": 1})


@pytest.fixture(scope="module")
def row(tmp_path_factory):
    return run(
        load(["schedule=1f1b", "num_devices=2", "cost=constant", f"results_dir={tmp_path_factory.mktemp('r')}"])
    )[0]


def put(results, row, number, **values):
    """A sound record of another run, with values of its own."""
    made = json.loads(json.dumps(row)) | values
    made["config"]["seed"] = made["seed"] = number
    made["run_id"] = record.run_id(record.identity_of(made))
    record.write(results / made["run_id"], made)
    return results / made["run_id"]


def loose(results):
    return store.table_of(store.canonical(results))


def test_a_table_is_that_of_the_files_whatever_was_packed(row, tmp_path):
    chance = random.Random(0)
    for case in range(8):
        results = tmp_path / str(case)
        kinds = chance.sample(KINDS, chance.randint(1, 3))
        runs = []
        for number in range(12):
            runs.append(put(results, row, number, **{key: chance.choice(kinds) for key in ("warmup", "own")}))
            if number == 4:
                assert pack(results)[1] == 5
        shutil.rmtree(runs.pop(chance.randrange(3)))
        put(results, row, 4, own="written again, and longer")
        assert table(results).to_pylist() == loose(results).to_pylist()
        assert pack(results)[1] == 11
        assert table(results).to_pylist() == loose(results).to_pylist()


def test_a_pack_saves_reading(row, tmp_path, monkeypatch):
    for number in range(3):
        put(tmp_path, row, number)
    pack(tmp_path)
    put(tmp_path, row, 3)
    read, seen = record.read, []
    monkeypatch.setattr(record, "read", lambda folder: seen.append(folder) or read(folder))
    assert table(tmp_path).num_rows == 4
    assert len(seen) == 1


def test_whole_numbers_stay_whole_beside_runs_that_have_none(row, tmp_path):
    put(tmp_path, row, 0, warmup=3)
    put(tmp_path, row, 1, warmup=None)
    assert sorted(map(str, table(tmp_path)["warmup"].to_pylist())) == ["3", "None"]


@pytest.mark.parametrize("harm", ["torn", "changed", "text", "other columns", "folder"])
def test_a_pack_that_cannot_be_read_is_none(harm, row, tmp_path):
    put(tmp_path, row, 0)
    put(tmp_path, row, 1)
    path, _ = pack(tmp_path)
    content = path.read_bytes()
    if harm == "torn":
        path.write_bytes(content[:-100])
    elif harm == "changed":
        path.write_bytes(content[:50] + bytes([content[50] ^ 255]) + content[51:])
    elif harm == "text":
        path.write_text("no table")
    elif harm == "other columns":
        pyarrow.parquet.write_table(pyarrow.table({"run_id": ["a"]}), path)
    else:
        path.unlink()
        path.mkdir()
    assert table(tmp_path).to_pylist() == loose(tmp_path).to_pylist()


def test_compact_is_a_command(rpbench):
    rpbench("-m", "schedule=1f1b,gpipe", "num_devices=2", "cost=constant")
    status, rows, _ = rpbench("compact")
    assert (status, rows[0]["records"]) == (0, 2)
    assert rpbench("query", "select count(*) as n from runs")[1] == [{"n": 2}]
    status, _, err = rpbench("compact", "results_dir=nothing")
    assert status == 2
    assert "no record in it" in err


@pytest.mark.parametrize(
    "words, said",
    [
        (("seconds=0.05",), "query: it took longer than 0.05 s; ask for less, or give seconds="),
        (("seconds=soon",), "seconds=soon: a number above 0"),
    ],
)
def test_a_query_without_an_end_is_stopped(words, said, row, tmp_path):
    put(tmp_path, row, 0)
    endless = "with recursive t(n) as (select 1 union all select n + 1 from t) select max(n) from t"
    with pytest.raises(ValueError, match=said):
        query([endless, *words, f"results_dir={tmp_path}"])


def test_a_query_that_is_refused_is_told_where(row, tmp_path):
    put(tmp_path, row, 0)
    with pytest.raises(ValueError, match="shedule") as said:
        query(["select run_id,\n shedule from runs", f"results_dir={tmp_path}"])
    _, near, line, place = str(said.value).splitlines()
    assert '"schedule"' in near
    assert line.endswith("shedule from runs")
    assert place.strip() == "^" * len("shedule")
    assert place.index("^") == line.index("shedule")


def exported(results, *words):
    out = io.StringIO()
    export([*words, f"results_dir={results}"], out)
    return out.getvalue().splitlines()


def test_export_takes_the_columns_that_are_asked_for_in_their_order(row, tmp_path):
    put(tmp_path, row, 0)
    assert exported(tmp_path, "columns=num_devices,schedule") == ["num_devices,schedule", "2,1f1b"]
    assert exported(tmp_path, "--format", "jsonl", "--columns", "schedule, seed") == ['{"schedule": "1f1b", "seed": 0}']
    exported(tmp_path, "format=parquet", "columns=seed", f"out={tmp_path / 'runs.parquet'}")
    assert pyarrow.parquet.read_table(tmp_path / "runs.parquet").to_pylist() == [{"seed": 0}]
    with pytest.raises(ValueError, match="did you mean schedule"):
        exported(tmp_path, "columns=shedule")


def test_export_takes_options_as_they_are_typed(row, tmp_path):
    """One that some runs have is empty for the others."""
    for number, options in enumerate(({"name": "roundpipe", "round_size": 4}, {"name": "1f1b"})):
        put(tmp_path, row | {"config": {"schedule": options, "cut": [1, number]}}, number)
    chosen = "columns=seed,schedule.round_size,cut"
    heads, *cells = exported(tmp_path, chosen)
    assert (heads, sorted(cells)) == ("seed,schedule.round_size,cut", ['0,4,"[1, 0]"', '1,,"[1, 1]"'])
    exported(tmp_path, "format=parquet", chosen, f"out={tmp_path / 'runs.parquet'}")
    sizes = pyarrow.parquet.read_table(tmp_path / "runs.parquet")["schedule.round_size"]
    assert set(sizes.to_pylist()) == {4, None}
    for name in ("schedule.sideways", "schedule.name.more"):
        with pytest.raises(ValueError, match=f"unknown column '{name}'.*, and options such as recompute"):
            exported(tmp_path, f"columns={name}")


def test_latex_fits_a_page_where_no_columns_are_chosen(row, tmp_path):
    put(tmp_path, row, 0)
    _, heads, cells, _ = exported(tmp_path, "--format", "latex")
    assert heads.count("&") <= 7
    assert heads.startswith(r"schedule & model & num\_devices")
    assert max(map(len, cells.split("&"))) < 20  # no number with seventeen digits
    assert "clock" not in heads


def test_latex_says_that_times_are_slots(row, tmp_path):
    put(tmp_path, row | {"clock": "slots", "step_time_s": 57.0}, 0)
    _, heads, cells, _ = exported(tmp_path, "--format", "latex")
    found = dict(zip(heads.split(" & "), cells.split(" & "), strict=True))
    assert (found[r"step\_time\_s"], found["clock"]) == ("57", "slots")
