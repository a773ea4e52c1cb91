"""The mutation check: a falsified record must be refused at its lookup, or turn a green claim red.

A mutant changes one thing. Record: it is missing, or a value is scaled, replaced or swapped with the next record's.
Manifest: a cell's choices, its record or its state. Table of accepted values: a value. Names and digests are written
anew as well, so that the falsified files are consistent.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from math import isclose
from random import Random
from statistics import fmean
from typing import Any, NamedTuple

from analysis.claims.claim import Claim, judge
from analysis.claims.expected import STATEMENTS, read_table
from analysis.claims.own.regression import claim_of
from analysis.records import identity
from analysis.records.experiments import Experiments, MissingRuns, Record
from analysis.records.published import Printed
from rpbench.records import record
from rpbench.records.manifest import ENDED, PLANNED, Cell

FACTORS = (0.5, 0.9, 1.1, 2.0)
# What is falsified: a record's configuration, origin or result, its presence, a cell of a manifest, a line of a table.
ASKED, ORIGIN, FOUND = "question", "origin", "result"
GONE, MANIFEST, TABLE = "record gone", "manifest", "accepted table"
KINDS = (ASKED, ORIGIN, FOUND, GONE, MANIFEST, TABLE)

_OF_THE_QUESTION = (
    *(*record.NAMES, *record.COUNTS, "generator", "experiment", "choices", "config", "overrides", "notes"),
    *("partition", "dispatch", "offload", "num_steps", "mesh", "contender", "code_version", "schema"),
)
_NAMES = ("run_id", "digest", "cell")  # written anew with every falsehood

Path = tuple[str, ...]


@dataclass(frozen=True)
class Mutant:
    experiment: str
    kind: str  # one of `KINDS`
    field: str  # its dotted name
    what: str  # what was done to it
    # the falsified records by run id; None for a missing one
    rows: Mapping[str, Record | None] = dataclasses.field(default_factory=dict)
    cell: Cell | None = None  # the falsified cell of the manifest
    line: Mapping[str, str] | None = None  # the falsified row of the table of accepted values

    def __str__(self) -> str:
        of = f" ({', '.join(self.rows)})" if self.rows else ""
        return f"{self.experiment}: {self.field} {self.what}{of}"


Draw = Callable[[], Mutant]


def mutants(experiments: Experiments, experiment: str) -> Iterator[tuple[str, Draw]]:
    """Every mutant of an experiment as its kind and the function that makes it; MissingRuns if it was not run."""
    rows, cells = experiments.checked(experiment), experiments.cells_of(experiment)
    for row in rows:
        yield GONE, partial(Mutant, experiment, GONE, "record", "gone", {row["run_id"]: None})
        for path, own in _leaves(row):
            for what, value in _others(own):
                yield _kind(path), partial(_changed, experiment, row, path, what, value)
    for first, second in pairwise(rows):
        for path, own in _leaves(first):
            if _differ(own, _at(second, path)):
                yield _kind(path), partial(_exchanged, experiment, first, second, path)
    for cell in cells:
        yield from _cells(experiment, cell, cells)
    for line in read_table(experiment):
        yield from _lines(experiment, line)


def of_statements() -> Iterator[tuple[str, Draw]]:
    """Every mutant of the table of our own statements, as of `mutants`."""
    for line in read_table(STATEMENTS):
        yield from _lines(STATEMENTS, line)


def sampled(found: Iterable[tuple[str, Draw]], number: int, seed: int) -> list[Mutant]:
    """At most `number` random mutants of each kind."""
    random, kept, seen = Random(seed), {kind: list[Draw]() for kind in KINDS}, dict.fromkeys(KINDS, 0)
    for kind, draw in found:
        seen[kind] += 1
        if len(kept[kind]) < number:
            kept[kind].append(draw)
        elif (place := random.randrange(seen[kind])) < number:
            kept[kind][place] = draw
    return [draw() for draws in kept.values() for draw in draws]


def _kind(path: Path) -> str:
    if path[0] in record.PASSING:
        return ORIGIN
    return ASKED if path[0] in _OF_THE_QUESTION else FOUND


def _leaves(row: Record) -> Iterator[tuple[Path, Any]]:
    return identity.leaves({key: value for key, value in row.items() if key not in _NAMES})


def _changed(experiment: str, row: Record, path: Path, what: str, value: Any) -> Mutant:
    return Mutant(experiment, _kind(path), ".".join(path), what, {row["run_id"]: _with(row, path, value)})


def _others(value: Any) -> Iterator[tuple[str, Any]]:
    if _is_number(value):
        scaled = ((f"times {factor:g}", _times(value, factor)) for factor in FACTORS)
        others = [(what, other) for what, other in scaled if _differ(other, value)]
        yield from others or [("plus 1", _each(value, lambda number: number + 1))]  # every multiple of 0 is 0
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
    return _each(value, lambda number: round(number * factor) if isinstance(number, int) else number * factor)


def _each(value: Any, change: Callable[[Any], Any]) -> Any:
    return [_each(item, change) for item in value] if isinstance(value, list) else change(value)


def _differ(one: Any, other: Any) -> bool:
    """True if two values differ by more than rounding."""
    if isinstance(one, list) and isinstance(other, list):
        return len(one) != len(other) or any(map(_differ, one, other))
    if _is_number(one) and _is_number(other):
        return not isclose(one, other, rel_tol=1e-3, abs_tol=1e-12)
    return bool(one != other)


def _is_number(value: Any) -> bool:
    if isinstance(value, list):
        return bool(value) and all(map(_is_number, value))
    return isinstance(value, int | float) and not isinstance(value, bool) and value == value


def _cells(experiment: str, cell: Cell, others: Sequence[Cell]) -> Iterator[tuple[str, Draw]]:
    """Mutants of a manifest: a cell is still planned, has another choice, or another cell's record."""
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
    for name, text in line.items():
        if text and name != "claim":
            for what, other in _other_texts(text):
                yield TABLE, partial(Mutant, table, TABLE, name, what, line={**line, name: other})


def _other_texts(text: str) -> Iterator[tuple[str, str]]:
    try:
        number = float(text)
    except ValueError:
        yield "another word", f"{text}x"
    else:
        yield from ((what, f"{other:.8g}") for what, other in _others(number))


# Fraction of each kind that has to be noticed. Only the digest in the manifest, written anew here, protects the origin.
LEAST_SEEN = {ASKED: 0.99, FOUND: 0.8, GONE: 1.0, MANIFEST: 1.0, TABLE: 0.95}


class Fate(NamedTuple):
    """Whether a mutant was noticed, and whether by anything else than a value that we accepted ourselves."""

    mutant: Mutant
    seen: bool
    seen_otherwise: bool


@dataclass(frozen=True)
class Outcome:
    """The fates of all mutants; `seen` and `seen_otherwise` are fractions."""

    fates: tuple[Fate, ...]

    def of(self, kind: str) -> "Outcome":
        return Outcome(tuple(fate for fate in self.fates if fate.mutant.kind == kind))

    @property
    def num_mutants(self) -> int:
        return len(self.fates)

    @property
    def seen(self) -> float:
        return fmean(fate.seen for fate in self.fates) if self.fates else 1.0

    @property
    def seen_otherwise(self) -> float:
        return fmean(fate.seen_otherwise for fate in self.fates) if self.fates else 1.0

    @property
    def survivors(self) -> tuple[Mutant, ...]:
        return tuple(fate.mutant for fate in self.fates if not fate.seen)

    @property
    def is_enough(self) -> bool:
        return all(self.of(kind).seen >= least for kind, least in LEAST_SEEN.items())

    def __str__(self) -> str:
        """Such as `result 97 % of 30 (61 % without accepted values)` for every kind."""
        parts = []
        for kind in KINDS:
            if (each := self.of(kind)).fates:
                without = "" if kind == TABLE else f" ({each.seen_otherwise:.1%} without accepted values)"
                parts.append(f"{kind} {each.seen:.1%}{without} of {each.num_mutants}")
        return "; ".join(parts)


def is_acceptance(claim: Claim) -> bool:
    """True if `analysis.driver.accept` wrote the expected value from our own records."""
    return claim.whose == "ours"


@dataclass(frozen=True, kw_only=True)
class _Falsified(Experiments):
    true: Experiments
    changed: Mapping[str, Record | None]

    def find(self, experiment: str, choices: Mapping[str, str], contender: str | None = None) -> Record | None:
        row = self.true.find(experiment, choices, contender)
        return row and row | (self.changed.get(row["run_id"]) or {})


class _Judged:
    def __init__(self, experiments: Experiments, claims: Sequence[Claim]) -> None:
        self._experiments = experiments
        self._green = {claim.id: claim for claim in claims if not judge(claim, experiments).red}
        # The claims that use each record, those with the fewest records first because they are judged fastest.
        self._resting: dict[str, list[Claim]] = {}
        for claim in sorted(self._green.values(), key=lambda claim: len(claim.needs)):
            for need in claim.needs:
                with suppress(MissingRuns):
                    if row := experiments.find(need.experiment, need.choices, need.contender):
                        self._resting.setdefault(row["run_id"], []).append(claim)

    def fate(self, mutant: Mutant) -> Fate:
        if mutant.line is not None:
            claim = self._accepted(mutant)
            return Fate(mutant, claim is None or judge(claim, self._experiments).red, seen_otherwise=False)
        if mutant.cell is not None and not self._answers(mutant.cell, mutant.experiment):
            return Fate(mutant, seen=True, seen_otherwise=True)
        if any(self._is_refused(mutant, run_id, row) for run_id, row in mutant.rows.items()):
            return Fate(mutant, seen=True, seen_otherwise=True)
        falsified = _Falsified(self._experiments.results, true=self._experiments, changed=mutant.rows)
        touched = {each.id: each for run_id in mutant.rows for each in self._resting.get(run_id, ())}
        accepted = [claim for claim in touched.values() if is_acceptance(claim)]
        otherwise = any(judge(claim, falsified).red for claim in touched.values() if not is_acceptance(claim))
        seen = otherwise or any(judge(claim, falsified).red for claim in accepted)
        return Fate(mutant, seen, otherwise)

    def _accepted(self, mutant: Mutant) -> Claim | None:
        """The claim of a falsified row of a table; None if it belongs to no claim any more."""
        line = mutant.line
        assert line is not None
        if mutant.experiment != STATEMENTS:
            return claim_of(mutant.experiment, line)
        claim = self._green.get(line["claim"])
        if claim is None or claim.published is None:
            return None
        return replace(
            claim, published=Printed(line["value"], claim.published.source), tolerance=float(line["tolerance"] or 0)
        )

    def _answers(self, cell: Cell, experiment: str) -> bool:
        """True if the records of a falsified cell pass as its own."""
        rows = {row["run_id"]: row for row in self._experiments.checked(experiment)}
        return cell.state in ENDED and not any(
            identity.problem(rows[run_id], experiment, cell, cell.digests) for run_id in cell.run_ids if run_id in rows
        )

    def _is_refused(self, mutant: Mutant, run_id: str, row: Record | None) -> bool:
        """True if the lookup refuses a falsified record with a new digest."""
        if row is None:
            return True
        forged = row | {"run_id": record.run_id(record.identity_of(row))} if "surroundings" in row else dict(row)
        forged["digest"] = record.digest(forged)
        if record.defect(forged, forged["run_id"]):
            return True
        cells = self._experiments.cells_of(mutant.experiment)
        cell = next(cell for cell in cells if run_id in cell.run_ids)
        return identity.problem(forged, mutant.experiment, cell, (forged["digest"],)) is not None


def check(experiments: Experiments, claims: Sequence[Claim], mutants: Iterable[Mutant]) -> Outcome:
    """Look up each mutant's records and judge their claims again."""
    return Outcome(tuple(map(_Judged(experiments, claims).fate, mutants)))
