"""Mutants: well-formed records of an experiment with one value scaled, two values exchanged, or one record gone."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import isclose
from typing import Any

from analysis.claims.regression import fields_of
from analysis.records.experiments import Experiments, Record

FACTORS = (0.5, 0.9, 1.1, 2.0)
DROPPED = "dropped"
EXCHANGED = "exchanged with another"

# Fields of measured runs that tables and figures print.
_PRINTED = (
    "makespan_s",
    "step_time_s",
    "tokens_per_s",
    "bubble_makespan",
    "bubble_span",
    "bubble_over_ideal",
    "replay_makespan_s",
    "idle_s",
    "busy_s",
)


@dataclass(frozen=True)
class Mutant:
    """Records of an experiment as somebody has falsified them.

    Args:
        what: which value, and what was done to it.
        rows: the records by run id that are not what they were; None for one that is gone.
    """

    experiment: str
    field: str
    what: str
    rows: Mapping[str, Record | None]

    def __str__(self) -> str:
        return f"{self.experiment} {self.field} {self.what} ({', '.join(self.rows)})"


def mutants(experiments: Experiments, experiment: str) -> Iterator[Mutant]:
    """Every mutant of an experiment: each record dropped, each number scaled, numbers of neighbours exchanged."""
    rows = experiments.records(experiment)
    for row in rows:
        yield Mutant(experiment, "record", DROPPED, {row["run_id"]: None})
        for field in numbers_of(row):
            yield from _scaled(experiment, row, field)
    for first, second in pairwise(rows):
        for field in numbers_of(first):
            if _differ(first[field], second.get(field)):
                changed = {first["run_id"]: first | {field: second[field]}}
                changed[second["run_id"]] = second | {field: first[field]}
                yield Mutant(experiment, field, EXCHANGED, changed)


def numbers_of(row: Record) -> list[str]:
    """The fields of a record that hold numbers and are load-bearing: held to something, or printed."""
    names = dict.fromkeys((*fields_of(row), *(_PRINTED if row["mode"] == "train" else ())))
    return [name for name in names if _is_number(row.get(name))]


def _scaled(experiment: str, row: Record, field: str) -> Iterator[Mutant]:
    for factor in FACTORS:
        value = _times(row[field], factor)
        if _differ(value, row[field]):
            yield Mutant(experiment, field, f"times {factor:g}", {row["run_id"]: row | {field: value}})


def _times(value: Any, factor: float) -> Any:
    if isinstance(value, list):
        return [_times(item, factor) for item in value]
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    return round(value * factor) if isinstance(value, int) else value * factor


def _differ(one: Any, other: Any) -> bool:
    """Whether two values differ by more than rounding."""
    if isinstance(one, list) and isinstance(other, list):
        return len(one) != len(other) or any(map(_differ, one, other))
    if not (_is_number(one) and _is_number(other)):
        return False
    return not isclose(one, other, rel_tol=1e-3, abs_tol=1e-12)


def _is_number(value: Any) -> bool:
    if isinstance(value, list):
        return bool(value) and all(map(_is_number, value))
    return isinstance(value, int | float) and not isinstance(value, bool) and value == value


def sampled(found: Sequence[Mutant], number: int, seed: int) -> list[Mutant]:
    """So many of the mutants, the same for the same seed."""
    from random import Random

    return list(found) if number >= len(found) else Random(seed).sample(list(found), number)
