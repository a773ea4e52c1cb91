"""Regression: every cell of every experiment against its accepted values, one claim a cell.

`analysis/claims/expected/<experiment>.csv` has a row for each record: the choices of its cell and the accepted
fields. Simulated fields are exact but for rounding, as are fields of a measured run that do not depend on the
machine's speed: parity, counts, bytes.
"""

from collections.abc import Iterator, Mapping
from math import isclose
from pathlib import Path
from typing import Any

from analysis.claims.claim import Claim, Need, Record, claim, section
from analysis.claims.expected import held_experiments, read_table
from analysis.records.published import Printed
from rpbench.untrusted import is_finite
from rpbench.yaml_file import read_keys

AS_ACCEPTED = "as accepted"
# Relative tolerances of a loss. Other versions of torch and other processors add in another order, and updates amplify
# that: after 96 updates instruction sets of one machine differ by up to 6 % (`analysis/claims/own/turning.py` has what
# holds everywhere). Where a late method's loss jumps they differ by a fifth at that point (PipeMare: 3.91, 3.64, 3.19),
# so one point of the second half is not compared.
_TRAINED, _TRAINED_LONG = 1e-3, 0.1
_LONG = 48  # updates
_LOSSES = ("loss", "loss_curve")
REL_TOLERANCE = 1e-6  # of computed numbers; another platform may round the last bits otherwise
_CELL = "cell."  # prefix of the columns that identify a row's cell
CONTENDER = "contender"

_UNHELD: dict[str, list[str]] = read_keys(Path(__file__).with_suffix(".yaml"))  # fields not compared, by reason


@section(180, "Every cell as it was accepted")
def claims() -> Iterator[Claim]:
    for experiment in held_experiments():
        for row in read_table(experiment):
            yield claim_of(experiment, row)


def need_of(experiment: str, row: Mapping[str, str]) -> Need:
    """The run behind a row of an expected table."""
    choices = {key.removeprefix(_CELL): value for key, value in row.items() if key.startswith(_CELL) and value}
    return Need(experiment, choices, row.get(CONTENDER) or None)


def claim_of(experiment: str, row: Mapping[str, str]) -> Claim:
    need = need_of(experiment, row)
    declared = {key: value for key, value in row.items() if not key.startswith(_CELL) and key != CONTENDER and value}
    words = " ".join(filter(None, (*need.choices.values(), need.contender))) or experiment
    return claim(
        "regression/{experiment}/{words}",
        lambda run: compared(run, declared),
        needs=(need,),
        published=Printed(AS_ACCEPTED, f"analysis/claims/expected/{experiment}.csv"),
        evidence=declared.get("evidence") or "simulated",
        experiment=experiment,
        words=words,
    )


def compared(run: Record, declared: Mapping[str, str]) -> str:
    """`as accepted`, or the fields of a record that differ from the accepted ones, with both values."""
    differing = [
        f"{name} {written(run.get(name))} for {text}" for name, text in declared.items() if not _holds(name, run, text)
    ]
    return "; ".join(differing) or AS_ACCEPTED


def _holds(name: str, run: Record, text: str) -> bool:
    value = run.get(name)
    if name not in _LOSSES:
        return _same(value, text, REL_TOLERANCE)
    if (run.get("num_updates") or 0) <= _LONG:
        return _same(value, text, _TRAINED)
    if not isinstance(value, list) or not run.get("staleness_steps"):
        return _same(value, text, _TRAINED_LONG)
    parts = _parts(text)
    pairs = enumerate(zip(value, parts, strict=False))
    others = [place for place, (own, part) in pairs if not _same(own, part, _TRAINED_LONG)]
    jumps = all(place >= len(value) // 2 and is_finite(value[place]) for place in others)
    return len(value) == len(parts) and len(others) <= 1 and jumps


def _parts(text: str) -> list[str]:
    """The values of a list that `written` wrote."""
    count, times, repeated = text.partition("x")
    return [repeated] * int(count) if times and count.isdigit() else text.split(";")


def row_of(choices: Mapping[str, str], run: Record) -> dict[str, str]:
    cell = {f"{_CELL}{key}": value for key, value in choices.items()}
    held = {name: run[name] for name in fields_of(run)}
    kept = {name: written(value) for name, value in held.items() if value not in (None, []) and value == value}
    return {**cell, CONTENDER: run.get(CONTENDER) or "", **kept}


def fields_of(run: Record) -> list[str]:
    """The fields of a record that can be compared with accepted values."""
    left_out = {*_UNHELD["besides"], *_UNHELD["effort"]}
    if run["evidence"] == "measured":
        left_out |= {*_UNHELD["pace"]}
    endings: tuple[str, ...] = ()
    if run["mode"] == "duel" or run["cost"] == "profiled":
        left_out |= {*_UNHELD["of_a_plan"]}
        endings = ("_s", "_share", "_cores")
    return [
        name
        for name, value in run.items()
        if name not in left_out
        and not name.endswith(endings)
        and not any(isinstance(item, dict) for item in (value if isinstance(value, list) else [value]))
    ]


def written(value: Any) -> str:
    """A value as text: numbers with eight digits; lists joined by semicolons, or as `3x1.5` if all values are equal."""
    if isinstance(value, list):
        if len(value) > 1 and len(set(map(str, value))) == 1:
            return f"{len(value)}x{written(value[0])}"
        return ";".join(map(written, value))
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return str(value) if isinstance(value, int) else f"{value:.8g}"


def _same(value: Any, text: str, rel_tolerance: float) -> bool:
    if isinstance(value, list):
        parts = _parts(text)
        same = (_same(item, part, rel_tolerance) for item, part in zip(value, parts, strict=False))
        return len(parts) == len(value) and all(same)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value) == text
    try:
        return isclose(value, float(text), rel_tol=rel_tolerance, abs_tol=1e-12)
    except ValueError:
        return False
