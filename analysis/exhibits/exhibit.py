"""Exhibit: a figure or a table with its evidence, the records it was made from and the command that makes them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from analysis.records.experiments import Experiments


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
    """What the report shows under one heading.

    Args:
        title, caption: for people; the caption says what is to be seen and how it is known.
        evidence: kinds of evidence in it (published, derived, simulated, predicted, emulated, measured).
        command: the command line that makes its records again.
        draw: makes the figure; None for a table.
        drawings: further figures that are files of their own, by file stem.
        drawn_from: the run of each of them that is the timeline of one.
        table: the numbers, of a figure as well.
        run_ids: records behind it; those of the table if left out.
        id: file stem and anchor, such as `figure17`; with `question`, what it asks, as `exhibited` says.
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


Maker = Callable[[Experiments], Exhibit]


class Listed(NamedTuple):
    """An exhibit of the report: where it stands there, its identity, and what makes it of the records."""

    place: int
    id: str
    make: Maker


LISTED: list[Listed] = []


def exhibited(identity: str, *, place: int, question: str) -> Callable[[Maker], Maker]:
    """Put the exhibit that a function makes into the report, at a place among the others.

    Args:
        identity: file stem and anchor of the exhibit.
        question: what it asks.

    Raises:
        ValueError: if another exhibit has this identity.
    """
    if any(identity == other.id for other in LISTED):
        raise ValueError(f"two exhibits are called {identity}; an identity belongs to one")

    def listing(make: Maker) -> Maker:
        @wraps(make)
        def named(experiments: Experiments) -> Exhibit:
            return replace(make(experiments), id=identity, question=question)

        LISTED.append(Listed(place, identity, named))
        return named

    return listing
