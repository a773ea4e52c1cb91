"""`pivot`: one value of runs by two of their keys, for a terminal, or as CSV, LaTeX or HTML."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TextIO

from rpbench.commands.recorded.store import latex_table, option_values, options_of, table
from rpbench.records import record
from rpbench.records.describe import IN_SLOTS, clock
from rpbench.records.differing import NAMED, differing
from rpbench.records.record import Record
from rpbench.registry import check_known

FORMATS = ("terminal", "csv", "latex", "html")
ASKED = {
    "rows": "model",
    "columns": "schedule",
    "value": "tokens_per_s",
    "baseline": "",
    "format": "terminal",
    "out": "",
    "results_dir": "results",
}


@dataclass(frozen=True)
class Pivot:
    """A pandas frame with a row and a column for each value of the two keys, and remarks on its cells."""

    frame: Any
    remarks: tuple[str, ...]

    def rows(self) -> list[Record]:
        """The rows; a cell without a run is None."""
        found = self.frame.reset_index().to_dict("records")
        return [{str(key): None if cell != cell else cell for key, cell in each.items()} for each in found]

    def text(self, form: str) -> str:
        """The text in one of `FORMATS`; numbers have six digits on a terminal, otherwise all."""
        if form == "csv":
            return str(self.frame.to_csv(lineterminator="\n"))
        if form == "html":
            return f"{self.frame.to_html(na_rep='', float_format='{!s}'.format)}\n"
        if form == "latex":
            rows = self.rows()
            return latex_table([list(rows[0]), *(list(row.values()) for row in rows)])
        return f"{self.frame.to_string(float_format='{:.6g}'.format, na_rep='-')}\n"


def pivot(arguments: Sequence[str], out: TextIO, err: TextIO) -> None:
    """Write a pivot: on a terminal to `err`, with lines of JSON to `out`; otherwise in its format to `out` or a file.

    ValueError for an unknown option, format, column or baseline.
    """
    options = options_of(arguments, ASKED)
    form, target = options["format"], options["out"]
    check_known("format", form, FORMATS)
    if target and form == "terminal":
        raise ValueError(f"out={target}: choose what it holds: format=csv, latex or html")
    found = pivoted(options)
    for line in found.remarks:
        print(line, file=err)
    if target:
        record.write_atomically(Path(target), found.text(form))
    elif form == "terminal":
        err.write(found.text(form))
        out.writelines(json.dumps(row) + "\n" for row in found.rows())
    else:
        out.write(found.text(form))


def pivoted(options: dict[str, str]) -> Pivot:
    """The median of a metric by two choices, over a baseline's column if one is named; ValueError as of `pivot`."""
    frame = table(Path(options["results_dir"])).to_pandas(integer_object_nulls=True)
    row, column, value, baseline = (options[key] for key in ("rows", "columns", "value", "baseline"))
    for name in (row, column, value):
        if name not in frame:
            frame[name] = option_values(frame["config"], name, list(frame.columns))
    if row == column or value in (row, column):
        raise ValueError(f"rows={row}, columns={column}, value={value}: three keys that differ")
    keys = frame[[row, column]].astype(object).where(frame[[row, column]].notna(), "none")
    try:
        numbers = keys.assign(**{value: frame[value].astype(float)}).dropna()
    except (TypeError, ValueError):
        raise ValueError(f"value={value}: not a number in every record; choose a metric") from None
    if numbers.empty:
        raise ValueError(f"value={value}: none of the {len(frame)} runs has it; choose a metric that they have")
    runs = frame.loc[numbers.index]
    told = runs[[key for key in ("clock", "cost", "evidence") if key in runs]].to_dict("records")
    clocks = runs.assign(clock=[clock(each) for each in told])["clock"]
    of_a_cell = [keys.loc[runs.index, key] for key in ([row] if baseline else [row, column])]
    if value.endswith("_s") and (clocks.groupby(of_a_cell).nunique() > 1).any():
        raise ValueError(
            f"value={value}: some of the runs count slots (cost=unit) and others seconds; take rows=cost, or a value "
            "without unit such as bubble_makespan"
        )
    cells = numbers.pivot_table(index=row, columns=column, values=value, aggfunc="median")
    if baseline:
        known = {str(name): name for name in cells.columns}
        check_known("baseline", baseline, known)
        cells = cells.div(cells[known[baseline]], axis=0)
    in_slots = _slots(clocks, keys.loc[runs.index]) if value.endswith("_s") and not baseline else ()
    remarks = (*in_slots, *(_updates(runs) if value == "step_time_s" else ()))
    return Pivot(cells, (*_merged(runs, row, column), *(f"rpbench: {remark}" for remark in remarks)))


def _slots(clocks: Any, keys: Any) -> tuple[str, ...]:
    """A remark on cells that count slots: all of them, or those of some rows or columns."""
    slots = clocks == "slots"
    if slots.all() or not slots.any():
        return (IN_SLOTS,) if slots.any() else ()
    for name in keys:
        own = keys.loc[slots, name].unique()
        if not keys.loc[~slots, name].isin(own).any():
            return (f"times of {name}={','.join(sorted(map(str, own)))} are slots, the others seconds",)
    return ("some of these times are slots (cost=unit), the others seconds",)


def _updates(runs: Any) -> tuple[str, ...]:
    """A remark where the steps of some schedules are updates within a batch, and those of others whole batches."""
    if not {"num_updates", "num_steps"} <= {*runs}:
        return ()
    several = runs["num_updates"] > runs["num_steps"]
    names = ", ".join(sorted(set(runs.loc[several, "schedule"])))
    said = f"{names}: updates within a batch, and a step is one update; makespan_s is the time of the same batches"
    return (said,) if several.any() and not several.all() else ()


def _merged(frame: Any, row: str, column: str) -> tuple[str, ...]:
    """A note on cells that hold several runs: how many, and in what they differ."""
    cells = frame.groupby([row, column], dropna=False).ngroup()
    named = [name for name in NAMED if name in frame and name not in (row, column)]
    shared = cells.duplicated(keep=False)
    frame, cells = frame.loc[shared, [*named, "config", "choices"]], cells[shared]
    if frame.empty:
        return ()
    several = frame[named].groupby(cells).nunique(dropna=False).gt(1).any()
    varying = dict.fromkeys(several.index[several])
    for _, found in _unlike_runs(frame, cells).groupby(cells):
        varying |= dict.fromkeys(differing(_records(found.astype(object).where(found.notna(), None))))
    names = ", ".join(name for name in varying if name not in (row, column))
    what = f"that differ in {names}" if names else "of one request; compare says in what surroundings"
    return (f"rpbench: a cell is the median of up to {cells.value_counts().max()} runs {what}",)


def _unlike_runs(frame: Any, cells: Any) -> Any:
    """The few runs between which every option differs that differs in a cell, so that no other text need be parsed.

    The texts are compared in pieces, `"key": value`. Of the runs of a cell with the same keys and names they are the
    first, and for every piece the first that has another.
    """
    key = cache(lambda piece: piece if '"name": ' in piece else piece.rpartition(": ")[0] or piece)
    texts = frame["config"].fillna("{}") + ", " + frame["choices"].fillna("{}")
    found, alike = list[int](), dict[tuple[Any, ...], tuple[list[str], set[int]]]()
    for place, (cell, text) in enumerate(zip(cells, texts, strict=True)):
        pieces = text.split(", ")
        first, known = alike.setdefault((cell, *map(key, pieces)), (pieces, set()))
        unlike = {at for at, (one, other) in enumerate(zip(first, pieces, strict=True)) if one != other}
        if first is pieces or unlike - known:
            found.append(place)
            known |= unlike
    return frame.iloc[found]


def _records(frame: Any) -> list[Record]:
    """Rows as records, with the objects that a table holds as texts."""
    nested = ("config", "choices")
    return [row | {key: json.loads(row.get(key) or "{}") for key in nested} for row in frame.to_dict("records")]
