"""Cells of tables: a label, a number from records, a number from a paper."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from math import isinf
from typing import Any

import pandas as pd

from analysis.exhibits.exhibit import Cell, Table
from analysis.exhibits.style import method_name

NOTHING = Cell(None, "–")


def label(text: str) -> Cell:
    """A name at the head of a row, or a word that is no number."""
    return Cell(text, text)


def ours(value: Any, form: str, runs: str | Iterable[str]) -> Cell:
    """A number that follows from records, written in a format such as `.2f`; a dash where there is none."""
    if _absent(value):
        return NOTHING
    return Cell(value, format(value, form), (runs,) if isinstance(runs, str) else tuple(runs))


def ranged(spread: tuple[float, float, float], form: str, runs: Iterable[str]) -> Cell:
    """Median, least and most of several runs, as `1.02 (1.00–1.05)`; words where some or all never came to it."""
    median, least, most = spread
    if isinf(least):
        return Cell(None, "not reached", tuple(runs))
    if isinf(most):
        return Cell(None, f"{least:{form}} or more, not reached by all", tuple(runs))
    return Cell(median, f"{median:{form}} ({least:{form}}–{most:{form}})", tuple(runs))


def theirs(value: Any, form: str, source: str) -> Cell:
    """A number that was transcribed, or follows from such numbers alone; a dash where none was published."""
    return NOTHING if _absent(value) else Cell(value, format(value, form), source=source)


def table(columns: Sequence[str], rows: Iterable[Sequence[Cell]]) -> Table:
    """A table whose rows all have as many cells as there are columns.

    Raises:
        ValueError: naming the first row that does not.
    """
    kept = tuple(tuple(row) for row in rows)
    for row in kept:
        if len(row) != len(columns):
            raise ValueError(f"row {row[0].text!r} has {len(row)} cells, the table {len(columns)} columns")
    return Table(tuple(columns), kept)


def by_schedule(
    data: pd.DataFrame, over: str, numbers: Mapping[str, tuple[str, str]], schedules: Iterable[str] = ()
) -> Table:
    """One row a schedule, and for every value of what was swept over a column of each number; a dash where none is.

    Args:
        data: one row a schedule and value, with its `run_id`.
        numbers: column -> its heading, in which the value is filled in, and the format of its cells.
        schedules: in the order of the rows; that of the data if left out.
    """
    values = sorted(data[over].unique())
    headings = [heading.format(value) for value in values for heading, _ in numbers.values()]
    found = data.set_index(["schedule", over]).to_dict("index")
    rows = []
    for schedule in schedules or data["schedule"].unique():
        row = [label(method_name(schedule))]
        for run in (found.get((schedule, value), {}) for value in values):
            row += [ours(run.get(name), form, run.get("run_id", ())) for name, (_, form) in numbers.items()]
        rows.append(row)
    return table(["schedule", *headings], rows)


def short_cut(partition: str) -> str:
    """A partition by its run lengths: `1-1-1-2|1-4*` is written `1×3-2|1-4*`."""
    return "|".join(map(_run_lengths, partition.split("|")))


def _run_lengths(counts: str) -> str:
    groups = ((count, len(list(same))) for count, same in groupby(counts.split("-")))
    return "-".join(count if times == 1 else f"{count}×{times}" for count, times in groups)


def _absent(value: Any) -> bool:
    return value is None or value != value  # NaN is not itself
