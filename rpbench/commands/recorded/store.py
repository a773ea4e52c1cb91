"""`export`, `query` and `compact`: the records of a folder as one table."""

import csv
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

import pyarrow.parquet

from rpbench.commands.recorded.record_table import canonical, columns_of, pack, table
from rpbench.records import record
from rpbench.records.record import Record, check_target
from rpbench.registry import unknown_name

FORMATS = ("csv", "jsonl", "latex", "parquet")
_LATEX = str.maketrans(
    {mark: f"\\{mark}" for mark in "_%&#${}"}
    | {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
)


# What LaTeX prints where no columns are chosen: as much as a page is wide.
_PRINTED = (
    *("schedule", "model", "num_devices", "num_microbatches"),
    *("step_time_s", "tokens_per_s", "bubble_makespan", "staleness_steps"),
)


def export(arguments: Sequence[str], out: TextIO) -> None:
    """The canonical table on `out`, or in the file that `out=FILE` names; `columns=A,B` chooses and orders its columns.

    Raises:
        ValueError: for an unknown option, format or column, or Parquet without a file.
    """
    options = options_of(arguments, {"format": "csv", "columns": "", "results_dir": "results", "out": ""})
    form, target = options["format"], options["out"]
    chosen = [name.strip() for name in options["columns"].split(",") if name.strip()]
    if form not in FORMATS:
        raise ValueError(unknown_name("format", form, list(FORMATS)))
    results = Path(options["results_dir"])
    if form == "parquet":
        if not target:
            raise ValueError("format=parquet is no text: name a file, as in out=records.parquet")
        check_target(Path(target))
        content = io.BytesIO()
        whole = table(results)
        pyarrow.parquet.write_table(whole.select(_checked(chosen, whole.column_names) or whole.column_names), content)
        record.write_atomically(Path(target), content.getvalue())
        return
    rows = canonical(results)
    names = _checked(chosen, columns_of(rows))
    text = {"csv": _csv, "jsonl": _jsonl, "latex": _latex}[form](rows, names)
    if target:
        record.write_atomically(Path(target), text)
    else:
        out.write(text)


def _checked(chosen: Sequence[str], known: Sequence[str]) -> list[str]:
    for name in chosen:
        if name not in known:
            raise ValueError(unknown_name("column", name, list(known)))
    return list(chosen)


def _csv(rows: Sequence[Record], names: Sequence[str]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, names or columns_of(rows), extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _jsonl(rows: Sequence[Record], names: Sequence[str]) -> str:
    kept = [{name: row.get(name) for name in names} for row in rows] if names else rows
    return "".join(json.dumps(row, sort_keys=not names, allow_nan=False) + "\n" for row in kept)


def _latex(rows: Sequence[Record], names: Sequence[str]) -> str:
    """The columns that were asked for, or as many of the usual ones as hold something."""
    shown = names or [name for name in _PRINTED if any(row.get(name) is not None for row in rows)]
    return latex_table([shown, *([_short(row.get(name)) for name in shown] for row in rows)])


def _short(value: Any) -> Any:
    return f"{value:.5g}" if isinstance(value, float) else value


def latex_table(lines: Sequence[Sequence[Any]]) -> str:
    """Lines of cells, the first their heads, as a `tabular`; None is an empty cell."""
    cells = [["" if cell is None else str(cell).translate(_LATEX) for cell in line] for line in lines]
    body = "".join(" & ".join(line) + " \\\\\n" for line in cells)
    return f"\\begin{{tabular}}{{{'l' * len(cells[0])}}}\n{body}\\end{{tabular}}\n"


def query(arguments: Sequence[str]) -> list[Record]:
    """The rows that an SQL query finds in the table `runs`; files and settings are out of its reach.

    Raises:
        ValueError: for no query, one that DuckDB cannot read, or no DuckDB.
    """
    words = [item for item in arguments if not item.startswith("results_dir=")]
    if len(words) != 1:
        raise ValueError('query takes one statement, as in: rpbench query "select schedule, bubble_span from runs"')
    options = options_of([item for item in arguments if item not in words], {"results_dir": "results"})
    try:
        import duckdb
    except ImportError:
        raise ValueError("query needs DuckDB: pip install duckdb") from None
    runs = table(Path(options["results_dir"]))
    with duckdb.connect() as database:
        database.register("runs", runs)
        database.execute("set enable_external_access = false")
        database.execute("set lock_configuration = true")
        try:
            found = database.execute(words[0])
            if found is None or found.description is None:
                raise ValueError(f"query: {words[0]!r} selects nothing; write one statement, as in select * from runs")
            names = [column[0] for column in found.description]
            return [dict(zip(names, row, strict=True)) for row in found.fetchall()]
        except duckdb.Error as error:
            raise ValueError(f"query: {str(error).partition(chr(10))[0]}") from None


def compact(arguments: Sequence[str]) -> Record:
    """Pack the records of a folder, so that they are read fast; where the pack is, and of how many.

    Raises:
        ValueError: for an unknown option, or a folder without a record.
    """
    results = Path(options_of(arguments, {"results_dir": "results"})["results_dir"])
    path, number = pack(results)
    return {"pack": str(path), "records": number}


def options_of(arguments: Sequence[str], known: dict[str, str]) -> dict[str, str]:
    """Options as `key=value`, `--key=value` or `--key value`.

    Raises:
        ValueError: for one that is not known.
    """
    options, waiting = dict(known), list(arguments)
    while waiting:
        key, equals, value = waiting.pop(0).partition("=")
        name = key.removeprefix("--")
        if name not in known:
            raise ValueError(unknown_name("option", name, list(known)))
        options[name] = value if equals else (waiting.pop(0) if waiting else "")
    return options
