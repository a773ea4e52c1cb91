"""`export`, `query` and `compact`: the records of a folder as one table."""

import csv
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

import pyarrow.parquet

from rpbench.commands.record_table import canonical, columns_of, pack, table
from rpbench.harness import record
from rpbench.harness.record import Record, check_target
from rpbench.registry import unknown_name

FORMATS = ("csv", "jsonl", "latex", "parquet")
_LATEX = str.maketrans(
    {mark: f"\\{mark}" for mark in "_%&#${}"}
    | {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
)


def export(arguments: Sequence[str], out: TextIO) -> None:
    """The canonical table on `out`, or in the file that `out=FILE` names.

    Raises:
        ValueError: for an unknown option or format, or Parquet without a file.
    """
    options = options_of(arguments, {"format": "csv", "results_dir": "results", "out": ""})
    form, target = options["format"], options["out"]
    if form not in FORMATS:
        raise ValueError(unknown_name("format", form, list(FORMATS)))
    results = Path(options["results_dir"])
    if form == "parquet":
        if not target:
            raise ValueError("format=parquet is no text: name a file, as in out=records.parquet")
        check_target(Path(target))
        content = io.BytesIO()
        pyarrow.parquet.write_table(table(results), content)
        record.write_atomically(Path(target), content.getvalue())
        return
    text = {"csv": _csv, "jsonl": _jsonl, "latex": _latex}[form](canonical(results))
    if target:
        record.write_atomically(Path(target), text)
    else:
        out.write(text)


def _csv(rows: Sequence[Record]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, columns_of(rows), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _jsonl(rows: Sequence[Record]) -> str:
    return "".join(json.dumps(row, sort_keys=True, allow_nan=False) + "\n" for row in rows)


def _latex(rows: Sequence[Record]) -> str:
    names = columns_of(rows)
    return latex_table([names, *([row.get(name) for name in names] for row in rows)])


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
