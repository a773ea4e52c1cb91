"""Exhibit: a figure or a table of cells with its evidence, the records behind it and the command that makes them."""

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
from analysis.records.experiments import Experiments
from rpbench.yaml_file import read_keys


@dataclass(frozen=True)
class Cell:
    """One value of a table. Exactly one of `run_ids` and `source` says where it comes from, unless it is a label."""

    value: Any
    text: str
    run_ids: tuple[str, ...] = ()  # the records it was computed from
    source: str = ""  # the published table and row it was transcribed from


@dataclass(frozen=True)
class Table:
    """Column names and rows of cells; the first column is the label of the row."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]

    @property
    def run_ids(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(run for row in self.rows for cell in row for run in cell.run_ids))


@dataclass(frozen=True)
class Exhibit:
    """A figure or a table of the report, under one heading.

    Args:
        title, caption: for people; the caption says what is to be seen and how it is known.
        evidence: kinds of evidence in it (published, derived, simulated, predicted, emulated, measured).
        command: the command line that makes its records again.
        draw: makes the figure; None for a table.
        drawings: further figures that are files of their own, by file stem.
        drawn_from: the run of each of them that is the timeline of one.
        table: the numbers, of a figure as well.
        run_ids: records behind it; those of the table if left out.
        id: file stem and anchor, such as `figure17`; with `question`, what it asks.
    """

    title: str
    caption: str
    evidence: tuple[str, ...]
    command: str
    draw: Callable[[], Figure] | None = None
    drawings: Mapping[str, Callable[[], Figure]] = field(default_factory=dict)
    drawn_from: Mapping[str, str] = field(default_factory=dict)
    table: Table | None = None
    run_ids: Sequence[str] = field(default=())
    id: str = ""
    question: str = ""

    @property
    def records(self) -> tuple[str, ...]:
        return tuple(self.run_ids) or (self.table.run_ids if self.table else ())


def blank(identity: str) -> dict[str, Cell]:
    """A row of a declared table with a dash in every column, for what has no numbers."""
    return {words.split()[0]: NOTHING for words in DECLARED[identity]["columns"].values()}


def declared_table(identity: str, rows: pd.DataFrame | Iterable[Mapping[str, Any]]) -> Table:
    """A table whose headings in `exhibits.yaml` say which fields of the rows stand below them.

    Behind a heading, `field` is a word or a name; `field .2f` a number of ours with its format, from the record
    `run_id`, and `field .2f RUN ...` from the records that these fields name; `field .2f < SOURCE` a published number,
    whose source is that field of the row, or else the place itself. A format may be a field of the row as well, and a
    field that is a cell already stands as it is.
    """
    declared: Mapping[str, str] = DECLARED[identity]["columns"]
    found = rows.to_dict("records") if isinstance(rows, pd.DataFrame) else rows
    return table(
        list(declared), ([_declared_cell(row, *words.split()) for words in declared.values()] for row in found)
    )


def wide(data: pd.DataFrame, rows: Sequence[str], across: str) -> pd.DataFrame:
    """What stands in a column for each value of another beside one another, as `bubble_ideal`, a row for each key."""
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
    """The part of an exhibit that comes from the records, as in `Exhibit`; the rest stands in `exhibits.yaml`.

    Args:
        words: what stands between braces in its title and its caption, besides the names of `style.BUBBLES`.
        evidence: where it depends on the records.
    """

    table: Table | None = None
    draw: Callable[[], Figure] | None = None
    drawings: Mapping[str, Callable[[], Figure]] = {}
    drawn_from: Mapping[str, str] = {}
    words: Mapping[str, Any] = {}
    evidence: tuple[str, ...] = ()


def exhibited(identity: str) -> Callable[[Callable[[Experiments], Shown]], Maker]:
    """Put into the report what a function finds in the records, with the texts that `exhibits.yaml` has for it.

    Raises ValueError if another exhibit has this identity, or none is declared; the maker that comes of it, MissingRuns
    if a run behind the exhibit is not there.
    """
    if identity in LISTED:
        raise ValueError(f"two exhibits are called {identity}; an identity belongs to one")
    if identity not in DECLARED:
        raise ValueError(f"exhibit {identity}: {TEXTS.name} says nothing of it; add its question, title and caption")
    declared = DECLARED[identity]
    command = declared.get("command") or "; ".join(
        f"python -m rpbench -m experiment={name}" for name in declared.get("experiments", ())
    )

    def listing(find: Callable[[Experiments], Shown]) -> Maker:
        @wraps(find)
        def make(experiments: Experiments) -> Exhibit:
            shown = find(experiments)
            texts = {each: declared[each].format(**BUBBLES, **shown.words) for each in ("title", "caption")}
            evidence = shown.evidence or tuple(declared["evidence"])
            return Exhibit(
                **texts,
                id=identity,
                question=declared["question"],
                evidence=evidence,
                command=command,
                table=shown.table,
                draw=shown.draw,
                drawings=shown.drawings,
                drawn_from=shown.drawn_from,
            )

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
    """The exhibit of one set of numbers: its table and its figure, and the words of its caption or what says them.

    Args:
        numbers: what the records say, as a frame or rows; its own docstring names the columns.
        tabulate: `declared_table` if left out.
        words: `answer`, by custom, is the sentence that answers the exhibit's question.
    """

    def find(experiments: Experiments) -> Shown:
        data = numbers(experiments)
        found = {name: word(data) if callable(word) else word for name, word in words.items()}
        made = tabulate(data) if tabulate else declared_table(identity, data)
        return Shown(made, partial(draw, data) if draw else None, words=found)

    return exhibited(identity)(find)


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
    """A table whose rows all have as many cells as there are columns; ValueError naming the first row that does not."""
    kept = tuple(tuple(row) for row in rows)
    for row in kept:
        if len(row) != len(columns):
            raise ValueError(f"row {row[0].text!r} has {len(row)} cells, the table {len(columns)} columns")
    return Table(tuple(columns), kept)


def by_schedule(
    over: str, numbers: Mapping[str, tuple[str, str]], schedules: Iterable[str] = ()
) -> Callable[[pd.DataFrame], Table]:
    """Tables with one row a schedule, and for every value of what was swept over a column of each number.

    A dash stands where there is none. Their data have one row a schedule and value, with its `run_id`.

    Args:
        numbers: column -> its heading, in which the value is filled in, and the format of its cells.
        schedules: in the order of the rows; that of the data if left out.
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
    """A partition by its run lengths: `1-1-1-2|1-4*` is written `1×3-2|1-4*`."""
    return "|".join(map(_run_lengths, partition.split("|")))


def cut_of(row: Mapping[str, Any]) -> Cell:
    """The partition of a record by its run lengths."""
    return Cell(row["partition_layers"], short_cut(row["partition_layers"]), (row["run_id"],))


def _run_lengths(counts: str) -> str:
    groups = ((count, len(list(same))) for count, same in groupby(counts.split("-")))
    return "-".join(count if times == 1 else f"{count}×{times}" for count, times in groups)


def _absent(value: Any) -> bool:
    return value is None or value != value  # NaN is not itself
