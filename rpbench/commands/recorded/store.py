"""`export`, `query` and `compact`: the records of a folder as one Arrow table.

The table comes from the record files or, for unchanged files, from a pack of them, which is faster to read:

    <results>/records-<digest>.parquet      every record, written by `rpbench compact`, named by a digest of its bytes

A row of a pack is used only while its record file has the same size and time of change, so a run that was removed,
added or written again is never read from the pack. A pack that was changed is not used at all.
"""

import hashlib
import io
import json
import os
import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet

from rpbench.records import record
from rpbench.records.record import Record, check_target
from rpbench.registry import check_known, unknown_name
from rpbench.untrusted import is_finite, positive
from rpbench.whole_file import read_bytes

FORMATS = ("csv", "jsonl", "latex", "parquet")
_LATEX = str.maketrans(
    {mark: f"\\{mark}" for mark in "_%&#${}"}
    | {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
)


# What LaTeX prints where no columns are chosen: as much as a page is wide.
_PRINTED = (
    *("schedule", "model", "num_devices", "num_microbatches"),
    *("step_time_s", "clock", "tokens_per_s", "bubble_makespan", "staleness_steps"),
)
PACKS = "records-*.parquet"
MOST_BYTES = 2**31  # of a pack

_STAMP = ("file_ns", "file_bytes")  # columns of a pack that no record has


def canonical(results: Path) -> list[Record]:
    """Every sound record by run_id, without times of day and machine, nested values as JSON; ValueError for none."""
    rows = [_flat(row) for row in record.read_all(results)]
    _check_some(rows, results)
    return rows


def table(results: Path) -> pa.Table:
    """The rows of `canonical` as a table with a column for every key; values of several kinds become texts."""
    return _table(results, _stamps(results))


def pack(results: Path) -> tuple[Path, int]:
    """Pack every sound record of a folder, ValueError if none; the file and their number. Removes earlier packs."""
    stamps = _stamps(results)  # before anything is read: records written meanwhile are read again the next time
    found = _table(results, stamps)
    told = [stamps.get(run, (0, 0)) for run in found["run_id"].to_pylist()]
    for name, column in zip(_STAMP, zip(*told, strict=True), strict=True):
        found = found.append_column(name, pa.array(column, pa.int64()))
    content = io.BytesIO()
    pa.parquet.write_table(found, content, compression="zstd")
    path = results / PACKS.replace("*", _digest(content.getvalue()))
    record.write_atomically(path, content.getvalue())
    for other in set(results.glob(PACKS)) - {path}:
        other.unlink(missing_ok=True)
    return path, int(found.num_rows)


def _table(results: Path, stamps: Mapping[str, tuple[int, int]]) -> pa.Table:
    packed = _packed(results, stamps)
    if packed is None:
        return table_of(canonical(results))
    known = set(packed["run_id"].to_pylist())
    loose = [_flat(row) for run in sorted(set(stamps) - known) if (row := record.read(results / run)) is not None]
    if not loose:
        _check_some(known, results)
        return packed
    try:
        found = pa.concat_tables([packed, table_of(loose)], promote_options="permissive")
        return found.select(_sorted(found.column_names)).sort_by("run_id")
    except (pa.ArrowInvalid, pa.ArrowTypeError):  # a key whose values are of one kind here, and of another there
        return table_of(canonical(results))


def table_of(rows: Sequence[Record]) -> pa.Table:
    return pa.table({name: _column([row.get(name) for row in rows]) for name in columns_of(rows)})


def columns_of(rows: Sequence[Record]) -> list[str]:
    """Every key of flat rows, run_id first."""
    return _sorted({key for row in rows for key in row})


def _sorted(names: Iterable[str]) -> list[str]:
    return sorted(names, key=lambda name: (name != "run_id", name))


def _check_some(rows: Collection[Any], results: Path) -> None:
    if not rows:
        raise ValueError(f"results_dir={results}: no record in it; run something, or name another folder")


def _flat(row: Record) -> Record:
    kept = {key: value for key, value in sorted(row.items()) if key not in record.PASSING}
    nested = {k: json.dumps(v, sort_keys=True) for k, v in kept.items() if isinstance(v, (dict, list))}
    return {"run_id": kept.pop("run_id"), **kept, **nested}


def _column(values: Sequence[Any]) -> pa.Array:
    if len({(float if is_finite(value) else type(value)) for value in values if value is not None}) < 2:
        with suppress(OverflowError, UnicodeEncodeError, pa.ArrowInvalid):  # no 64 bits hold it, or no UTF-8
            return pa.array(values)
    texts = [None if value is None else str(value).encode("utf-8", "backslashreplace").decode() for value in values]
    return pa.array(texts, pa.string())


def _stamps(results: Path) -> dict[str, tuple[int, int]]:
    """run_id -> (time of change in nanoseconds, size) of its record file."""
    found = {}
    for folder in os.scandir(results) if results.is_dir() else ():
        try:
            stat = os.stat(f"{folder.path}/record.json")
        except OSError:
            continue
        found[folder.name] = stat.st_mtime_ns, stat.st_size
    return found


def _packed(results: Path, stamps: Mapping[str, tuple[int, int]]) -> pa.Table | None:
    """The rows of a pack whose record files are unchanged; None without a readable pack."""
    for path in sorted(results.glob(PACKS)):
        try:
            content = read_bytes(path, MOST_BYTES)
            if path.match(PACKS.replace("*", _digest(content))):
                return _standing(pa.parquet.read_table(pa.BufferReader(content)), stamps)
        except (OSError, ValueError, KeyError, pa.ArrowException):  # another program's
            continue
    return None


def _standing(found: pa.Table, stamps: Mapping[str, tuple[int, int]]) -> pa.Table:
    told = zip(*(found[name].to_pylist() for name in ("run_id", *_STAMP)), strict=True)
    stands = [stamps.get(run) == tuple(stamp) for run, *stamp in told]
    rows = found.drop_columns(_STAMP)
    return rows if all(stands) else rows.filter(pa.array(stands))


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


# --- commands ---


def export(arguments: Sequence[str], out: TextIO) -> None:
    """Write the canonical table to `out`, or to the file of `out=FILE`; `columns=A,B` are columns or options of runs.

    ValueError for an unknown option, format or column, or Parquet without a file.
    """
    options = options_of(arguments, {"format": "csv", "columns": "", "results_dir": "results", "out": ""})
    form, target = options["format"], options["out"]
    chosen = [name.strip() for name in options["columns"].split(",") if name.strip()]
    check_known("format", form, FORMATS)
    results = Path(options["results_dir"])
    if form == "parquet":
        if not target:
            raise ValueError("format=parquet is no text: name a file, as in out=records.parquet")
        check_target(Path(target))
        content = io.BytesIO()
        whole = table(results)
        for name in chosen:
            if name not in (known := whole.column_names):
                whole = whole.append_column(name, _column(option_values(whole["config"].to_pylist(), name, known)))
        pyarrow.parquet.write_table(whole.select(chosen or whole.column_names), content)
        record.write_atomically(Path(target), content.getvalue())
        return
    rows = canonical(results)
    known = columns_of(rows)
    options_of_runs = {n: option_values([row["config"] for row in rows], n, known) for n in chosen if n not in known}
    for name, values in options_of_runs.items():
        rows = [row | {name: value} for row, value in zip(rows, values, strict=True)]
    if form == "latex":
        text = _latex(rows, chosen)
    else:
        kept = [{name: row.get(name) for name in chosen} for row in rows] if chosen else rows
        lines = (json.dumps(row, sort_keys=not chosen, allow_nan=False) + "\n" for row in kept)
        text = "".join(lines) if form == "jsonl" else record.as_csv(kept, chosen or known)
    if target:
        record.write_atomically(Path(target), text)
    else:
        out.write(text)


def option_values(configs: Iterable[Any], name: str, known: list[str]) -> list[Any]:
    """An option of each run, named as on the command line (`schedule.round_size`), from texts of configurations.

    What is nested is JSON; ValueError, with the `known` columns, for a name that none has, or that of a group.
    """
    found = []
    for text in configs:
        value = json.loads(text) if isinstance(text, str) else None
        for key in name.split("."):
            value = value.get(key) if isinstance(value, dict) else None
        found.append(value)
    if all(value is None or isinstance(value, dict) for value in found):
        raise ValueError(unknown_name("column", name, known) + ", and options such as recompute")
    return [json.dumps(value) if isinstance(value, (list, dict)) else value for value in found]


def _latex(rows: Sequence[Record], names: Sequence[str]) -> str:
    """The requested columns, or those of the usual ones that hold something."""
    if not (shown := names):
        shown = [name for name in _PRINTED if any(row.get(name) is not None for row in rows)]
        if all(row.get("clock") != "slots" for row in rows):  # then times are seconds, as their names say
            shown = [name for name in shown if name != "clock"]
    found = [[row.get(name) for name in shown] for row in rows]
    return latex_table(
        [shown, *([f"{each:.5g}" if isinstance(each, float) else each for each in row] for row in found)]
    )


def latex_table(lines: Sequence[Sequence[Any]]) -> str:
    """A `tabular` of lines of cells, the header first; None is an empty cell."""
    cells = [["" if cell is None else str(cell).translate(_LATEX) for cell in line] for line in lines]
    body = "".join(" & ".join(line) + " \\\\\n" for line in cells)
    return f"\\begin{{tabular}}{{{'l' * len(cells[0])}}}\n{body}\\end{{tabular}}\n"


def query(arguments: Sequence[str]) -> list[Record]:
    """The rows that an SQL query finds in the table `runs`; it can read no files and change no settings.

    ValueError without a query, for one that DuckDB refuses, or that takes longer than a minute or `seconds=`.
    """
    words = [item for item in arguments if not item.startswith(("results_dir=", "seconds="))]
    if len(words) != 1:
        raise ValueError('query takes one statement, as in: rpbench query "select schedule, bubble_span from runs"')
    known = {"results_dir": "results", "seconds": "60"}
    options = options_of([item for item in arguments if item not in words], known)
    seconds = min(positive("seconds", options["seconds"]), threading.TIMEOUT_MAX)
    import duckdb  # which other verbs do without

    runs = table(Path(options["results_dir"]))
    with duckdb.connect() as database:
        database.register("runs", runs)
        database.execute("set enable_external_access = false")
        database.execute("set lock_configuration = true")
        ended = threading.Event()
        threading.Thread(target=_interrupt, args=(database, seconds, ended), daemon=True).start()
        try:
            if (number := len(database.extract_statements(words[0]))) > 1:
                raise ValueError(f"query: {number} statements, of which the last alone would be answered; write one")
            found = database.execute(words[0])
            if found is None or found.description is None:
                raise ValueError(f"query: {words[0]!r} selects nothing; write one statement, as in select * from runs")
            names = [column[0] for column in found.description]
            return [dict(zip(names, row, strict=True)) for row in found.fetchall()]
        except duckdb.InterruptException:
            raise ValueError(f"query: it took longer than {seconds:g} s; ask for less, or give seconds=") from None
        except duckdb.Error as error:
            said = "\n".join(line for line in str(error).splitlines() if line.strip())  # names, and the place
            raise ValueError(f"query: {said}") from None
        finally:
            ended.set()


def _interrupt(database: Any, seconds: float, ended: threading.Event) -> None:
    """Interrupt a query that has not ended by then; repeatedly, since a query that is being parsed ignores it."""
    while not ended.wait(seconds):
        database.interrupt()
        seconds = 0.1


def compact(arguments: Sequence[str]) -> Record:
    """Pack the records of a folder; the pack's path, and their number. ValueError as of `pack` and `options_of`."""
    results = Path(options_of(arguments, {"results_dir": "results"})["results_dir"])
    path, number = pack(results)
    return {"pack": str(path), "records": number}


def options_of(arguments: Sequence[str], known: dict[str, str]) -> dict[str, str]:
    """Options as `key=value`, `--key=value` or `--key value`, over the values of `known`; ValueError for others."""
    options, waiting = dict(known), list(arguments)
    while waiting:
        key, equals, value = waiting.pop(0).partition("=")
        name = key.removeprefix("--")
        check_known("option", name, known)
        options[name] = value if equals else (waiting.pop(0) if waiting else "")
    return options
