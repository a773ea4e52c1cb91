"""Equal work: the runs of a sweep as contenders, each with its repeats, and which of them did the same work.

The same work is the same tokens a step (microbatches, where nobody knows the tokens), steps, model, devices, machine
and costs, known in the same way. Only such runs are compared. Runs that differ in nothing but their seed are repeats.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from rpbench.records.clock import Clock, clock
from rpbench.records.manifest import Cell, Manifest

Row = Mapping[str, Any]
Work = tuple[tuple[str, str], ...]  # name and value of each thing that makes work equal

REPEATED = "seed"
_SAME = 1e-9  # of a number: closer ones are the same
# What a sweep chooses to change the work, in the words of the command line.
SIZES = ("model", "cluster", "workload", "num_devices", "num_microbatches", "num_steps", "cost")


@dataclass(frozen=True)
class Measure:
    """A number of a run: what it is called, how it is read off a record, and which end of it is better."""

    name: str
    read: Callable[[Row], float | None]
    form: str
    best: Callable[..., float] = min


@dataclass(frozen=True)
class Contender:
    """Contender: one choice of a sweep at one size.

    Args:
        names: what it chose, of what differs.
        work: what it had to do; empty for a cell that left no record.
        rows: its records that ended well, one for each repeat; those that did not stand alone.
        state: how it ended, in a word, and why.
    """

    names: tuple[str, ...]
    work: Work
    rows: tuple[Row, ...]
    state: str

    @property
    def is_ok(self) -> bool:
        """Whether it has numbers to compare; dry runs, on made-up accelerators, have none."""
        return bool(self.rows) and _is_ok(self.rows[0])

    def values(self, measure: Measure) -> list[float]:
        """A number of each repeat; none of a run that did not end well."""
        found = (measure.read(row) for row in self.rows if _is_ok(row))
        return [value for value in found if value is not None]


# --- who contends ----------------------------------------------------------------------------------------------


def what_differs(cells: Sequence[Cell]) -> tuple[list[str], dict[str, str]]:
    """Choices that are not the same in all cells, repeats left out, and those that are with their values."""
    keys = list(dict.fromkeys(key for cell in cells for key in cell.overrides))
    values = {key: {cell.overrides.get(key, "") for cell in cells} for key in keys}
    differ = [key for key in keys if len(values[key]) > 1 and key != REPEATED]
    same = {key: next(iter(values[key])) for key in keys if len(values[key]) == 1}
    return differ or list(same)[:1], same


def contenders_of(manifest: Manifest, by_id: Mapping[str, Row], keys: Sequence[str]) -> list[Contender]:
    """Every contender of a sweep in its order, repeats together; cells that failed stand for themselves."""
    contended = any(len(cell.run_ids) > 1 for cell in manifest.cells)
    repeats: dict[tuple[tuple[str, ...], Work], list[Row]] = {}
    found: list[Contender | tuple[tuple[str, ...], Work]] = []
    for cell in manifest.cells:
        chosen = tuple(cell.overrides.get(key, "–") for key in keys)
        rows = [by_id[run] for run in cell.run_ids if run in by_id]
        if not rows:
            names = (*chosen, "–") if contended else chosen
            found.append(Contender(names, (), (), _ended(cell.state, cell.reason)))
        for row in rows:
            names = (*chosen, str(row.get("contender") or "–")) if contended else chosen
            state = _ended(str(row["status"]), str(row.get("reason") or ""))
            if row["status"] != "ok":
                found.append(Contender(names, (), (row,), state))
                continue
            known = (names, work_of(row))
            if known not in repeats:
                found.append(known)
            repeats.setdefault(known, []).append(row)
    return [
        each
        if isinstance(each, Contender)
        else Contender(each[0], each[1], tuple(repeats[each]), _repeated(repeats[each]))
        for each in found
    ]


def _ended(state: str, reason: str) -> str:
    return f"{state}: {reason}" if reason else state


def _repeated(rows: Sequence[Row]) -> str:
    return "ok" if len(rows) == 1 else f"ok, {len(rows)} repeats"


def work_of(row: Row) -> Work:
    """The work of a run."""
    cost = (row.get("config") or {}).get("cost") or row.get("cost")
    tokens = row.get("tokens_per_step")
    amount = ("tokens a step", tokens) if tokens else ("microbatches", row.get("num_microbatches"))
    named = {
        "model": row.get("model"),
        "devices": row.get("num_devices"),
        amount[0]: amount[1],
        "steps": row.get("num_steps"),
        "cluster": row.get("cluster"),
        "workload": row.get("workload"),
        "cost": json.dumps(cost, sort_keys=True) if isinstance(cost, dict) else cost,
        "evidence": row.get("evidence"),
        "times in": clock(row),
    }
    return tuple((name, str(value)) for name, value in named.items())


def _is_ok(row: Row) -> bool:
    return row["status"] == "ok" and row["evidence"] != "dry"


def works_told(contenders: Iterable[Contender]) -> dict[Work, str]:
    """Every work among some contenders in its order, in words that tell it from the others."""
    works = list(dict.fromkeys(each.work for each in contenders if each.is_ok))
    differ = {name for work in works for name, value in work if any(dict(other).get(name) != value for other in works)}
    return {work: ", ".join(_said(name, value) for name, value in work if name in differ) for work in works}


def _said(name: str, value: str) -> str:
    if name not in ("devices", "microbatches", "steps", "tokens a step"):
        return f"{name} {value}"
    amount = f"{int(value):,}" if value.isdigit() else value
    return f"{amount} {name.removesuffix('s') if value == '1' else name}"


# --- who is best -----------------------------------------------------------------------------------------------


def best_of(measure: Measure, contenders: Sequence[Contender]) -> list[Contender]:
    """The contenders of one work that nobody beats: the best by the median, and all that cannot be told from it.

    Those have the same number, or repeats whose range meets that of the best. Empty where fewer than two have one.
    """
    held = [(each, values) for each in contenders if (values := each.values(measure))]
    if len(held) < 2:
        return []
    top = measure.best(median(values) for _, values in held)
    first = next(values for _, values in held if median(values) == top)
    return [each for each, values in held if _meet(values, first)]


def _meet(some: Sequence[float], others: Sequence[float]) -> bool:
    slack = _SAME * max(map(abs, (*some, *others)))
    return min(some) <= max(others) + slack and min(others) <= max(some) + slack


def number_of(key: str, factor: float = 1.0) -> Callable[[Row], float | None]:
    """A field of a record in another unit; the largest of a list, None where it is no number."""

    def read(row: Row) -> float | None:
        value = row.get(key)
        if isinstance(value, list) and value and all(isinstance(item, int | float) for item in value):
            value = max(value)
        if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
            return None
        return factor * value

    return read


def makespan_in(unit: Clock) -> Callable[[Row], float | None]:
    """The makespan of runs whose times are slots, or of those whose times are seconds."""

    def read(row: Row) -> float | None:
        return number_of("makespan_s")(row) if clock(row) == unit else None

    return read
