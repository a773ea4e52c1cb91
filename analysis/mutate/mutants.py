"""Mutants: one falsehood each, drawn from everything that a record, a manifest and a table of accepted values hold.

Of a record: that it is gone, a value scaled or replaced, two values exchanged with its neighbour. Of a manifest: what a
cell asks for, which record answers it, what became of it. Of a table: a value. Whoever falsifies a record or a manifest
is taken to write names and digests anew, so that files are whole and agree with each other.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from math import isclose
from random import Random
from typing import Any

from analysis.claims.expected import STATEMENTS, read_table
from analysis.records.experiments import Experiments, Record
from rpbench.records.manifest import PLANNED, Cell

FACTORS = (0.5, 0.9, 1.1, 2.0)
# What is falsified: what a record says of its question, of its making, of what came out; that it is there; a cell of
# a manifest; a line of a table.
ASKED, ORIGIN, FOUND = "question", "origin", "result"
GONE, MANIFEST, TABLE = "record gone", "manifest", "accepted table"
KINDS = (ASKED, ORIGIN, FOUND, GONE, MANIFEST, TABLE)

_OF_THE_QUESTION = (
    *("schedule", "generator", "model", "cluster", "workload", "cost", "mode", "backend", "experiment", "choices"),
    *("config", "overrides", "notes", "partition", "dispatch", "offload", "num_devices", "num_microbatches"),
    *("num_steps", "seed", "mesh", "contender", "code_version", "schema"),
)
_OF_THE_ORIGIN = ("versions", "surroundings", "hardware", "git_commit", "started_at")
_NAMES = ("run_id", "digest", "cell")  # written anew by whoever falsifies the rest

Path = tuple[str, ...]


@dataclass(frozen=True)
class Mutant:
    """One falsehood.

    Args:
        experiment: whose.
        kind: one of `KINDS`.
        field: of what, by its dotted name.
        what: what was done to it.
        rows: the records by run id that are not what they were; None for one that is gone.
        cell: the cell as the manifest has it now.
        line: the row of the experiment's table of accepted values as it is now.
    """

    experiment: str
    kind: str
    field: str
    what: str
    rows: Mapping[str, Record | None] = dataclasses.field(default_factory=dict)
    cell: Cell | None = None
    line: Mapping[str, str] | None = None

    def __str__(self) -> str:
        of = f" ({', '.join(self.rows)})" if self.rows else ""
        return f"{self.experiment}: {self.field} {self.what}{of}"


Draw = Callable[[], Mutant]


def mutants(experiments: Experiments, experiment: str) -> Iterator[tuple[str, Draw]]:
    """Every mutant of an experiment: its kind, and what makes it.

    Raises:
        MissingRuns: if the experiment has not been run.
    """
    rows, cells = experiments.checked(experiment), experiments.cells_of(experiment)
    for row in rows:
        yield GONE, partial(Mutant, experiment, GONE, "record", "gone", {row["run_id"]: None})
        for path in _paths(row):
            for what, value in _others(_at(row, path)):
                yield _kind(path), partial(_changed, experiment, row, path, what, value)
    for first, second in pairwise(rows):
        for path in _paths(first):
            if _differ(_at(first, path), _at(second, path)):
                yield _kind(path), partial(_exchanged, experiment, first, second, path)
    for cell in cells:
        yield from _cells(experiment, cell, cells)
    for line in read_table(experiment):
        yield from _lines(experiment, line)


def of_statements() -> Iterator[tuple[str, Draw]]:
    """Every mutant of the table of our own statements."""
    for line in read_table(STATEMENTS):
        yield from _lines(STATEMENTS, line)


def sampled(found: Iterable[tuple[str, Draw]], number: int, seed: int) -> list[Mutant]:
    """So many mutants of each kind, the same for the same seed; all of a kind that has no more."""
    random, kept, seen = Random(seed), {kind: list[Draw]() for kind in KINDS}, dict.fromkeys(KINDS, 0)
    for kind, draw in found:
        seen[kind] += 1
        if len(kept[kind]) < number:
            kept[kind].append(draw)
        elif (place := random.randrange(seen[kind])) < number:
            kept[kind][place] = draw
    return [draw() for draws in kept.values() for draw in draws]


# --- records ---------------------------------------------------------------------------------------------------


def _kind(path: Path) -> str:
    if path[0] in _OF_THE_ORIGIN or path == ("choices", "tracker"):  # who listened
        return ORIGIN
    return ASKED if path[0] in _OF_THE_QUESTION else FOUND


def _paths(row: Record) -> Iterator[Path]:
    """The way to every value of a record that is no object."""
    for key, value in row.items():
        if key not in _NAMES:
            yield from _below(value, (key,))


def _below(value: Any, path: Path) -> Iterator[Path]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _below(inner, (*path, key))
    else:
        yield path


def _changed(experiment: str, row: Record, path: Path, what: str, value: Any) -> Mutant:
    return Mutant(experiment, _kind(path), ".".join(path), what, {row["run_id"]: _with(row, path, value)})


def _others(value: Any) -> Iterator[tuple[str, Any]]:
    if _is_number(value):
        scaled = ((f"times {factor:g}", _times(value, factor)) for factor in FACTORS)
        others = [(what, other) for what, other in scaled if _differ(other, value)]
        yield from others or [("plus 1", _plus_one(value))]  # of nothing every multiple is nothing
    elif isinstance(value, bool):
        yield "the other way round", not value
    elif isinstance(value, str):
        yield "another word", f"{value}x"
    else:
        yield "something else", ["something else"]


def _exchanged(experiment: str, first: Record, second: Record, path: Path) -> Mutant:
    rows: dict[str, Record | None] = {
        first["run_id"]: _with(first, path, _at(second, path)),
        second["run_id"]: _with(second, path, _at(first, path)),
    }
    return Mutant(experiment, _kind(path), ".".join(path), "exchanged with another", rows)


def _at(row: Record, path: Path) -> Any:
    value: Any = row
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _with(row: Record, path: Path, value: Any) -> Record:
    first, *rest = path
    inner = row.get(first)
    changed = _with(inner if isinstance(inner, dict) else {}, tuple(rest), value) if rest else value
    return {**row, first: changed}


def _times(value: Any, factor: float) -> Any:
    if isinstance(value, list):
        return [_times(item, factor) for item in value]
    return round(value * factor) if isinstance(value, int) else value * factor


def _plus_one(value: Any) -> Any:
    return [_plus_one(item) for item in value] if isinstance(value, list) else value + 1


def _differ(one: Any, other: Any) -> bool:
    """Whether two values differ by more than rounding."""
    if isinstance(one, list) and isinstance(other, list):
        return len(one) != len(other) or any(map(_differ, one, other))
    if _is_number(one) and _is_number(other):
        return not isclose(one, other, rel_tol=1e-3, abs_tol=1e-12)
    return bool(one != other)


def _is_number(value: Any) -> bool:
    if isinstance(value, list):
        return bool(value) and all(map(_is_number, value))
    return isinstance(value, int | float) and not isinstance(value, bool) and value == value


# --- manifests and tables --------------------------------------------------------------------------------------


def _cells(experiment: str, cell: Cell, others: Sequence[Cell]) -> Iterator[tuple[str, Draw]]:
    """A manifest with one cell that asks for something else, is answered by another's record, or is still planned."""
    mutant = partial(Mutant, experiment, MANIFEST)
    yield MANIFEST, partial(mutant, "state", PLANNED, cell=replace(cell, state=PLANNED))
    for key, value in cell.overrides.items():
        for other in dict.fromkeys(each.overrides[key] for each in others):
            if other != value:
                asking = replace(cell, overrides={**cell.overrides, key: other})
                yield MANIFEST, partial(mutant, key, f"asks for {other}", cell=asking)
    for each in others:
        if each.number != cell.number:
            answered = replace(cell, run_ids=each.run_ids, digests=each.digests)
            yield MANIFEST, partial(mutant, "run_ids", f"of cell {each.number}", cell=answered)


def _lines(table: str, line: Mapping[str, str]) -> Iterator[tuple[str, Draw]]:
    """A table with one value scaled, or another word."""
    for name, text in line.items():
        if text and name != "claim":
            for what, other in _other_texts(text):
                yield TABLE, partial(Mutant, table, TABLE, name, what, line={**line, name: other})


def _other_texts(text: str) -> Iterator[tuple[str, str]]:
    try:
        number = float(text)
    except ValueError:
        yield "another word", f"{text}x"
        return
    for factor in FACTORS:
        if _differ(number * factor, number):
            yield f"times {factor:g}", f"{number * factor:.8g}"
    if not number:
        yield "plus 1", "1"
