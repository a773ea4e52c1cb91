"""`export`, `query` and `pivot`: the records of a folder as one table."""

import csv
import io
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from rpbench.finite import is_finite
from rpbench.harness import record
from rpbench.harness.record import Record, check_target
from rpbench.registry import unknown_name

FORMATS = ("csv", "jsonl", "latex", "parquet")
# Times of day, and the machine: what differs between two undisturbed runs of one sweep.
_PASSING = ("started_at", "git_commit", "hardware", "versions", "surroundings", "digest")
_LATEX = str.maketrans({mark: f"\\{mark}" for mark in "_%&#$"} | {"\\": r"\textbackslash{}"})


def canonical(results: Path) -> list[Record]:
    """Every sound record of a folder by run_id, without times of day and machine; what is nested as JSON text.

    Raises:
        ValueError: if there is none.
    """
    rows = [_flat(row) for row in record.read_all(results)]
    if not rows:
        raise ValueError(f"results_dir={results}: no record in it; run something, or name another folder")
    return rows


def _flat(row: Record) -> Record:
    kept = {key: value for key, value in sorted(row.items()) if key not in _PASSING}
    nested = {k: json.dumps(v, sort_keys=True) for k, v in kept.items() if isinstance(v, (dict, list))}
    return {"run_id": kept.pop("run_id"), **kept, **nested}


def _columns(rows: Sequence[Record]) -> list[str]:
    return ["run_id", *sorted({key for row in rows for key in row} - {"run_id"})]


def export(arguments: Sequence[str], out: TextIO) -> None:
    """The canonical table on `out`, or in the file that `out=FILE` names.

    Raises:
        ValueError: for an unknown option or format, or Parquet without a file.
    """
    options = options_of(arguments, {"format": "csv", "results_dir": "results", "out": ""})
    form, target = options["format"], options["out"]
    if form not in FORMATS:
        raise ValueError(unknown_name("format", form, list(FORMATS)))
    rows = canonical(Path(options["results_dir"]))
    if form == "parquet":
        if not target:
            raise ValueError("format=parquet is no text: name a file, as in out=records.parquet")
        check_target(Path(target))
        _frame(rows).to_parquet(target, index=False)
        return
    text = {"csv": _csv, "jsonl": _jsonl, "latex": _latex}[form](rows)
    if target:
        record.write_atomically(Path(target), text)
    else:
        out.write(text)


def _csv(rows: Sequence[Record]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, _columns(rows), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _jsonl(rows: Sequence[Record]) -> str:
    return "".join(json.dumps(row, sort_keys=True, allow_nan=False) + "\n" for row in rows)


def _latex(rows: Sequence[Record]) -> str:
    names = _columns(rows)
    table = [names, *([_cell(row.get(name)) for name in names] for row in rows)]
    body = "".join(" & ".join(cell.translate(_LATEX) for cell in line) + " \\\\\n" for line in table)
    return f"\\begin{{tabular}}{{{'l' * len(names)}}}\n{body}\\end{{tabular}}\n"


def _cell(value: Any) -> str:
    return "" if value is None else str(value)


def _frame(rows: Sequence[Record]) -> Any:
    import pandas as pd

    frame = pd.DataFrame(rows, columns=_columns(rows))
    for name in frame:
        if pd.api.types.is_object_dtype(frame[name]) and len({_kind(value) for value in frame[name].dropna()}) > 1:
            frame[name] = frame[name].map(str, na_action="ignore")
    return frame


def _kind(value: Any) -> type:
    """What a column holds; one of several kinds, such as auto and 0.5, is a column of texts."""
    return float if is_finite(value) else type(value)


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
    runs = _frame(canonical(Path(options["results_dir"])))
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


def pivot(arguments: Sequence[str], out: TextIO = sys.stderr) -> list[Record]:
    """A metric by two choices, its median over what else varies; with a baseline, over that column's.

    Raises:
        ValueError: for a column that no record has, or a baseline that is no column of the table.
    """
    asked = {"rows": "model", "columns": "schedule", "value": "tokens_per_s", "baseline": "", "results_dir": "results"}
    options = options_of(arguments, asked)
    frame = _frame(canonical(Path(options["results_dir"])))
    row, column, value, baseline = (options[key] for key in ("rows", "columns", "value", "baseline"))
    for name in (row, column, value):
        if name not in frame:
            raise ValueError(unknown_name("column", name, list(frame.columns)))
    if row == column or value in (row, column):
        raise ValueError(f"rows={row}, columns={column}, value={value}: three keys that differ")
    keys = frame[[row, column]].astype(object).where(frame[[row, column]].notna(), "none")
    try:
        numbers = keys.assign(**{value: frame[value].astype(float)}).dropna()
    except (TypeError, ValueError):
        raise ValueError(f"value={value}: not a number in every record; choose a metric") from None
    if numbers.empty:
        raise ValueError(f"value={value}: none of the {len(frame)} runs has it; choose a metric that they have")
    table = numbers.pivot_table(index=row, columns=column, values=value, aggfunc="median")
    if baseline:
        known = {str(name): name for name in table.columns}
        if baseline not in known:
            raise ValueError(unknown_name("baseline", baseline, list(known)))
        table = table.div(table[known[baseline]], axis=0)
    print(table.to_string(float_format="{:.6g}".format, na_rep="-"), file=out)
    for line in _merged(frame.loc[numbers.index], row, column):
        print(line, file=out)
    found = table.reset_index().to_dict("records")
    return [{str(key): None if cell != cell else cell for key, cell in each.items()} for each in found]


# Choices that a table should say if runs of one cell differ in them.
_CHOICES = (
    *("schedule", "model", "cluster", "workload", "cost", "mode", "backend", "experiment", "partition", "dispatch"),
    *("offload", "num_devices", "num_microbatches", "num_steps", "seed", "overrides"),
)


def _merged(frame: Any, row: str, column: str) -> list[str]:
    """What a person must know of cells that hold several runs: how many, and what these differ in."""
    cells = frame.groupby([row, column], dropna=False)
    most = int(cells.size().max())
    if most < 2:
        return []
    names = [name for name in _CHOICES if name in frame and name not in (row, column)]
    varying = [name for name in names if int(cells[name].nunique(dropna=False).max()) > 1]
    plain = [name for name in varying if name != "overrides"] or ["other options" for _ in varying]
    what = f"that differ in {', '.join(plain)}" if plain else "of one request"
    return [f"rpbench: a cell is the median of up to {most} runs {what}"]


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
