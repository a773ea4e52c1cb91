"""Exhibits: figures and tables with their evidence, records and the command that makes the records."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial, wraps
from itertools import groupby
from math import isinf
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
from matplotlib.figure import Figure

from analysis.exhibits.style import BUBBLES, method_name, model_name
from analysis.records.experiments import Experiments, Sweep
from rpbench.yaml_file import read_keys


@dataclass(frozen=True)
class Cell:
    """One value of a table; a number has either `run_ids` or a `source`."""

    value: Any
    text: str
    run_ids: tuple[str, ...] = ()  # the records behind it
    source: str = ""  # its published table and row


@dataclass(frozen=True)
class Table:
    """Column names and rows of cells; the first column labels the row."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]

    @property
    def run_ids(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(run for row in self.rows for cell in row for run in cell.run_ids))


@dataclass(frozen=True)
class Exhibit:
    """A figure or a table of the report, under one heading."""

    title: str
    caption: str  # what the exhibit shows and how it is known
    evidence: tuple[str, ...]  # kinds of evidence in it (published, derived, simulated, predicted, emulated, measured)
    command: str  # the command line that makes its records
    draw: Callable[[], Figure] | None = None  # makes the figure; None for a table
    drawings: Mapping[str, Callable[[], Figure]] = field(default_factory=dict)  # further figures by file stem
    # the run behind each further figure that is its timeline
    drawn_from: Mapping[str, str] = field(default_factory=dict)
    table: Table | None = None  # the numbers, also of a figure
    run_ids: Sequence[str] = field(default=())  # records behind it; by default those of the table
    id: str = ""  # file stem and anchor, such as `figure17`
    question: str = ""

    @property
    def records(self) -> tuple[str, ...]:
        return tuple(self.run_ids) or (self.table.run_ids if self.table else ())


def blank(identity: str) -> dict[str, Cell]:
    """A row of a declared table with a dash in every column."""
    return {words.split()[0]: NOTHING for words in DECLARED[identity]["columns"].values()}


def declared_table(identity: str, rows: pd.DataFrame | Iterable[Mapping[str, Any]]) -> Table:
    """A table with the columns that `exhibits.yaml` declares; each heading there has the field of its cells.

    `field` is a word or a name. `field .2f` is a number of ours with its format, computed from the record `run_id`;
    `field .2f RUN ...` from the records in these fields. `field .2f < SOURCE` is a published number whose source is
    this field of the row or the word itself. A format may also be a field of the row. A field that is a `Cell` stays.
    """
    columns: Mapping[str, str] = DECLARED[identity]["columns"]
    found = rows.to_dict("records") if isinstance(rows, pd.DataFrame) else rows
    return table(list(columns), ([_declared_cell(row, *words.split()) for words in columns.values()] for row in found))


def wide(data: pd.DataFrame, rows: Sequence[str], across: str) -> pd.DataFrame:
    """One row for each key in `rows`, with columns such as `bubble_ideal` for each value of the column `across`."""
    found = data.pivot(index=list(rows), columns=across)
    return found.set_axis([f"{name}_{value}" for name, value in found.columns], axis=1)


def _declared_cell(row: Mapping[str, Any], field: str, form: str = "", *behind: str) -> Cell:
    value, form = row[field], row.get(form, form)
    if isinstance(value, Cell):
        return value
    if not form:
        return label(_NAMED.get(field, str)(value))
    if behind[:1] == ("<",):
        return theirs(value, form, row.get(behind[1], behind[1]))
    return ours(value, form, [row[run] for run in behind] if behind else row["run_id"])


_NAMED = {"model": model_name, "schedule": method_name, "system": method_name}


Maker = Callable[[Experiments], Exhibit]
TEXTS = Path(__file__).with_name("exhibits.yaml")
DECLARED: dict[str, dict[str, Any]] = read_keys(TEXTS)  # by identity, in the order of the report
LISTED: dict[str, Maker] = {}


class Shown(NamedTuple):
    """The part of an `Exhibit` that comes from the records; the rest is in `exhibits.yaml`."""

    table: Table | None = None
    draw: Callable[[], Figure] | None = None
    drawings: Mapping[str, Callable[[], Figure]] = {}
    drawn_from: Mapping[str, str] = {}
    # values for the braces in title and caption, besides `style.BUBBLES`; `missing` is a sentence before the caption
    words: Mapping[str, Any] = {}
    evidence: tuple[str, ...] = ()  # only where it depends on the records


def exhibited(identity: str) -> Callable[[Callable[[Experiments], Shown]], Maker]:
    """Register an exhibit; the decorated function makes its `Shown` from records, or raises MissingRuns.

    ValueError if another exhibit has this identity, or `exhibits.yaml` does not declare it.
    """
    if identity in LISTED:
        raise ValueError(f"two exhibits are called {identity}; an identity belongs to one")
    if identity not in DECLARED:
        raise ValueError(f"exhibit {identity}: {TEXTS.name} says nothing of it; add its question, title and caption")
    declared = DECLARED[identity]
    command = declared.get("command") or "; ".join(Sweep(name).command for name in declared.get("experiments", ()))

    def listing(find: Callable[[Experiments], Shown]) -> Maker:
        @wraps(find)
        def make(experiments: Experiments) -> Exhibit:
            found = find(experiments)._asdict()
            words = BUBBLES | found.pop("words")
            texts = {each: declared[each].format(**words) for each in ("title", "caption")}
            texts["caption"] = " ".join(filter(None, (words.get("missing"), texts["caption"])))
            known = found | {"evidence": found["evidence"] or tuple(declared["evidence"])} | texts
            return Exhibit(**known, id=identity, question=declared["question"], command=command)

        LISTED[identity] = make
        return make

    return listing


def exhibit_of(
    identity: str,
    numbers: Callable[[Experiments], Any],
    tabulate: Callable[[Any], Table] | None = None,
    draw: Callable[[Any], Figure] | None = None,
    **words: Any,
) -> Maker:
    """An exhibit with a table (by default the `declared_table`) and a figure of one frame or list of rows, `numbers`.

    `words` of the caption may be functions that make them from the numbers; `answer` answers the exhibit's question.
    """

    def find(experiments: Experiments) -> Shown:
        data = numbers(experiments)
        found = {name: word(data) if callable(word) else word for name, word in words.items()}
        made = tabulate(data) if tabulate else declared_table(identity, data)
        return Shown(made, partial(draw, data) if draw else None, words=found)

    return exhibited(identity)(find)


NOTHING = Cell(None, "–")


def label(text: str) -> Cell:
    """A name or a word."""
    return Cell(text, text)


def ours(value: Any, form: str, runs: str | Iterable[str]) -> Cell:
    """A number from records in a format such as `.2f`, or a dash."""
    if pd.isna(value):
        return NOTHING
    return Cell(value, format(value, form), (runs,) if isinstance(runs, str) else tuple(runs))


def ranged(spread: tuple[float, float, float], form: str, runs: Iterable[str]) -> Cell:
    """Median, least and most of several runs as `1.02 (1.00–1.05)`; infinite values were not reached."""
    median, least, most = spread
    if isinf(least):
        return Cell(None, "not reached", tuple(runs))
    if isinf(most):
        return Cell(None, f"{least:{form}} or more, not reached by all", tuple(runs))
    return Cell(median, f"{median:{form}} ({least:{form}}–{most:{form}})", tuple(runs))


def theirs(value: Any, form: str, source: str) -> Cell:
    """A published number, or one computed from published numbers alone; a dash without one."""
    return NOTHING if pd.isna(value) else Cell(value, format(value, form), source=source)


def table(columns: Sequence[str], rows: Iterable[Sequence[Cell]]) -> Table:
    """A table; ValueError if a row does not have a cell for each column."""
    kept = tuple(tuple(row) for row in rows)
    for row in kept:
        if len(row) != len(columns):
            raise ValueError(f"row {row[0].text!r} has {len(row)} cells, the table {len(columns)} columns")
    return Table(tuple(columns), kept)


def by_schedule(
    over: str, numbers: Mapping[str, tuple[str, str]], schedules: Iterable[str] = ()
) -> Callable[[pd.DataFrame], Table]:
    """A function that makes a table with one row for each schedule, and columns for each value of the column `over`.

    `numbers` are columns with their headings, which take the value, and formats. The rows are in the order of
    `schedules`, by default that of the data.
    """

    def tabulate(data: pd.DataFrame) -> Table:
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

    return tabulate


def short_cut(partition: str) -> str:
    """A partition by its run lengths: `1-1-1-2|1-4*` becomes `1×3-2|1-4*`."""
    runs = [[(count, len(list(same))) for count, same in groupby(cut.split("-"))] for cut in partition.split("|")]
    return "|".join("-".join(count if times == 1 else f"{count}×{times}" for count, times in cut) for cut in runs)


def cut_of(row: Mapping[str, Any]) -> Cell:
    return Cell(row["partition_layers"], short_cut(row["partition_layers"]), (row["run_id"],))
