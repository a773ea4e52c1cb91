"""Exhibit: a figure or a table with its evidence, the records it was made from and the command that makes them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial, wraps
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from analysis.exhibits.style import BUBBLES
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


def columns_of(identity: str) -> tuple[str, ...]:
    """The headings of an exhibit's table, as `exhibits.yaml` has them where they are the same whatever was run."""
    return tuple(DECLARED[identity]["columns"])


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

    The maker that comes of it raises MissingRuns if a run behind the exhibit is not there.

    Raises:
        ValueError: if another exhibit has this identity, or none is declared.
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
            title, caption = (declared[each].format(**BUBBLES, **shown.words) for each in ("title", "caption"))
            return Exhibit(
                title=title,
                caption=caption,
                evidence=shown.evidence or tuple(declared["evidence"]),
                command=command,
                draw=shown.draw,
                drawings=shown.drawings,
                drawn_from=shown.drawn_from,
                table=shown.table,
                id=identity,
                question=declared["question"],
            )

        LISTED[identity] = make
        return make

    return listing


def exhibit_of(
    identity: str,
    numbers: Callable[[Experiments], Any],
    tabulate: Callable[[Any], Table],
    draw: Callable[[Any], Figure] | None = None,
    **words: Any,
) -> Maker:
    """The exhibit of one set of numbers: its table and its figure, and the words of its caption or what says them."""

    def find(experiments: Experiments) -> Shown:
        data = numbers(experiments)
        found = {name: word(data) if callable(word) else word for name, word in words.items()}
        return Shown(tabulate(data), partial(draw, data) if draw else None, words=found)

    return exhibited(identity)(find)
