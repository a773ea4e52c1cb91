"""The exhibit of a user's own sweep: the best choice at each size, among runs that do the same work.

Work is the same if tokens of a step (or microbatches, if tokens are unknown), steps, model, devices, machine, costs and
evidence are equal. Runs that differ only in their seed are repeats.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path
from statistics import median
from typing import Any

from matplotlib.figure import Figure

from analysis.exhibits import style
from analysis.exhibits.exhibit import NOTHING, Cell, Exhibit, Table, label, ours, ranged, table
from analysis.records.runs import grouped
from rpbench.records import manifest as manifests
from rpbench.records.describe import Clock, clock
from rpbench.records.differing import unlike
from rpbench.records.manifest import Manifest
from rpbench.yaml_file import read_keys

Row = Mapping[str, Any]
Work = tuple[tuple[str, str], ...]  # (name, value) of everything that makes work equal

REPEATED = "seed"
_SAME = 1e-9  # relative difference of equal numbers
# These change the work.
SIZES = ("model", "cluster", "workload", "num_devices", "num_microbatches", "num_steps", "cost", "charge")


@dataclass(frozen=True)
class Measure:
    """A number of a run, by the field of its record."""

    name: str
    field: str
    form: str
    factor: float = 1.0  # from the unit of the record
    highest: bool = False  # whether the highest is best
    times_in: Clock | None = None  # the number of records with times in this unit alone

    def read(self, row: Row) -> float | None:
        """The number, or the largest of a list; None for no number."""
        value = row.get(self.field)
        if isinstance(value, list) and value and all(isinstance(item, int | float) for item in value):
            value = max(value)
        if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
            return None
        return self.factor * value if self.times_in in (None, clock(row)) else None


@dataclass(frozen=True)
class Contender:
    """One choice of a sweep at one size."""

    names: tuple[str, ...]  # its values of the choices that differ
    work: Work  # empty for a cell without a record
    rows: tuple[Row, ...]  # its repeats, or one failed record
    state: str  # how it ended, and why

    @property
    def is_ok(self) -> bool:
        """True if it has numbers to compare; dry runs have none."""
        return bool(self.rows) and _is_ok(self.rows[0])

    def values(self, measure: Measure) -> list[float]:
        """The numbers of the repeats that have one."""
        found = (measure.read(row) for row in self.rows if _is_ok(row))
        return [value for value in found if value is not None]


def what_differs(cells: Sequence[manifests.Cell]) -> tuple[list[str], dict[str, str]]:
    """Choices that differ between cells, without repeats, and the common ones with their values."""
    keys = dict.fromkeys(key for cell in cells for key in cell.overrides)
    values = {key: {cell.overrides.get(key, "") for cell in cells} for key in keys}
    differ = [key for key in keys if len(values[key]) > 1 and key != REPEATED]
    same = {key: next(iter(values[key])) for key in keys if len(values[key]) == 1}
    return differ or list(same)[:1], same


def contenders_of(manifest: Manifest, by_id: Mapping[str, Row], keys: Sequence[str]) -> list[Contender]:
    """The contenders of a sweep in its order; each failed cell is one."""
    contended = any(len(cell.run_ids) > 1 for cell in manifest.cells)
    found: dict[object, Contender] = {}
    for cell in manifest.cells:
        chosen = tuple(cell.overrides.get(key, "–") for key in keys)
        rows = [by_id[run] for run in cell.run_ids if run in by_id]
        if not rows:
            names = (*chosen, "–") if contended else chosen
            found[cell.number] = Contender(names, (), (), _ended(cell.state, cell.reason))
        for row in rows:
            names = (*chosen, str(row.get("contender") or "–")) if contended else chosen
            if row["status"] != "ok":
                state = _ended(str(row["status"]), str(row.get("reason") or ""))
                found[cell.number, row["run_id"]] = Contender(names, (), (row,), state)
            else:
                known = names, work_of(row)
                repeats = (*(found[known].rows if known in found else ()), row)
                found[known] = Contender(*known, repeats, _repeated(repeats))
    return list(found.values())


def _ended(state: str, reason: str) -> str:
    return f"{state}: {reason}" if reason else state


def _repeated(rows: Sequence[Row]) -> str:
    if len(rows) > 1:
        return f"ok, {len(rows)} repeats"
    verdict, why = (str(rows[0].get(key) or "") for key in ("verdict", "verdict_reason"))  # of a duel
    return f"ok, {_ended(verdict, why)}" if verdict else "ok"


def work_of(row: Row) -> Work:
    asked = row.get("config") or {}
    amount = ("microbatches", row.get("num_microbatches"))
    if tokens := row.get("tokens_per_step"):  # of an optimizer step, and a schedule may take several for a batch
        steps = row.get("num_steps") or 1
        amount = ("tokens a step", tokens * (row.get("num_updates") or steps) // steps)
    named = {
        "model": row.get("model"),
        "devices": row.get("num_devices"),
        amount[0]: amount[1],
        "steps": asked.get("num_steps", row.get("num_steps")),  # a search may run more steps of overlapping ones
        "cluster": asked.get("cluster") or row.get("cluster"),
        "workload": row.get("workload"),
        "cost": asked.get("cost") or row.get("cost"),
        "charge": asked.get("charge"),
        "evidence": row.get("evidence"),
        "times in": clock(row),
    }
    return tuple((name, json.dumps(value, sort_keys=True)) for name, value in named.items())


def _is_ok(row: Row) -> bool:
    return row["status"] == "ok" and row["evidence"] != "dry"


def works_told(contenders: Iterable[Contender]) -> dict[Work, str]:
    """The distinct works of some contenders, in words for what differs between them."""
    works = list(dict.fromkeys(each.work for each in contenders if each.is_ok))
    differ = unlike([{name: json.loads(value) for name, value in work} for work in works]) if works else {}
    each = zip(*differ.values(), strict=True) if differ else [()] * len(works)
    told = (zip(differ, values, strict=True) for values in each)
    return {
        work: ", ".join(_said(name, str(value)) for name, value in values if value is not None)
        for work, values in zip(works, told, strict=True)
    }


def _said(name: str, value: str) -> str:
    if name not in ("devices", "microbatches", "steps", "tokens a step"):
        return f"{name} {value}"
    amount = f"{int(value):,}" if value.isdigit() else value
    return f"{amount} {name.removesuffix('s') if value == '1' else name}"


def best_of(measure: Measure, contenders: Sequence[Contender]) -> list[Contender]:
    """The contender with the best median, and all whose ranges overlap with its range; empty for fewer than two."""
    held = [(each, values) for each in contenders if (values := each.values(measure))]
    if len(held) < 2:
        return []
    top = (max if measure.highest else min)(median(values) for _, values in held)
    first = next(values for _, values in held if median(values) == top)
    return [each for each, values in held if _meet(values, first)]


def _meet(some: Sequence[float], others: Sequence[float]) -> bool:
    slack = _SAME * max(map(abs, (*some, *others)))
    return min(some) <= max(others) + slack and min(others) <= max(some) + slack


_MOST_BARS = 60
_MOST_TOLD = 6  # works whose winners are named one by one
_MOST_VALUES = 4  # of a choice in a title
_BEST = " ★"  # marks the best number of equal work

_MEASURES = [Measure(**row) for row in read_keys(Path(__file__).with_suffix(".yaml"))["measures"]]


def exhibit(manifest: Manifest, rows: Sequence[Row]) -> Exhibit:
    """The compared runs of one sweep, with failed cells and their reasons."""
    by_id = {row["run_id"]: row for row in rows}
    keys, same = what_differs(manifest.cells)
    lines = contenders_of(manifest, by_id, keys)
    contended = any(len(line.names) > len(keys) for line in lines)
    heads = (*keys, *(("contender",) if contended else ()))
    running = [line for line in lines if line.is_ok]
    measures = [each for each in _MEASURES if any(line.values(each) for line in running)]
    works = works_told(running)
    chosen = [head for head in heads if head.partition(".")[0] not in SIZES] or heads[:1]
    what = " and ".join(chosen).replace("schedule_file", "schedule")
    return Exhibit(
        id=f"sweep_{manifest.name}",
        title=_title(manifest, keys),
        caption=_caption(manifest, same, running, measures, heads, works),
        evidence=tuple(sorted({str(row["evidence"]) for line in running for row in line.rows if row["evidence"]})),
        command=manifest.command,
        draw=partial(_draw, running, measures[0], heads) if measures and 0 < len(running) <= _MOST_BARS else None,
        table=_tabulate(heads, measures, lines),
        run_ids=tuple(run for cell in manifest.cells for run in cell.run_ids if run in by_id),
        question=f"Which {what} is fastest{' at which size' if len(works) > 1 else ''}?",
    )


def _title(manifest: Manifest, keys: Sequence[str]) -> str:
    """Such as `gpipe, 1f1b and 2 more; num_microbatches 6, 12`."""
    told = []
    for key in keys:
        values = list(dict.fromkeys(cell.overrides[key] for cell in manifest.cells if key in cell.overrides))
        rest = len(values) - _MOST_VALUES
        shown = ", ".join(values[:_MOST_VALUES]) + (f" and {rest} more" if rest > 0 else "")
        told.append(shown if key in ("schedule", "schedule_file") else f"{key} {shown}")
    swept = "; ".join(told) or "one run"
    return f"{manifest.experiment}: {swept}" if manifest.experiment else swept


def _caption(
    manifest: Manifest,
    same: Mapping[str, str],
    running: Sequence[Contender],
    measures: Sequence[Measure],
    heads: Sequence[str],
    works: Mapping[Work, str],
) -> str:
    counts = ", ".join(f"{number} {state}" for state, number in manifest.counts.items() if number)
    held = ", ".join(f"{key}={value}" for key, value in same.items())
    text = (
        f"What differs: {', '.join(heads)}.{f' The same in all: {held}.' if held else ''} Cells: {counts}. Runs of "
        "equal work (tokens, model, devices, costs) are compared, and no others; the best of them bears a star."
    )
    if not measures:
        return f"{text} No run of this sweep ended with numbers."
    if any(len(line.rows) > 1 for line in running):
        text += " Repeats are shown as median (least–most); those whose ranges meet are not told apart."
    return f"{text} {_winners(measures[0], running, works)}"


def _winners(measure: Measure, running: Sequence[Contender], works: Mapping[Work, str]) -> str:
    """The best choice for each work, or counts of wins if there are many works."""
    told, wins = [], Counter[str]()
    for work, words in works.items():
        peers = [line for line in running if line.work == work]
        best = best_of(measure, peers)
        if not best:
            continue
        names = [" ".join(_of_choice(line, peers)) for line in best]
        wins[" and ".join(names)] += 1
        value = f"{median(best[0].values(measure)):{measure.form}}"
        who = f"{' and '.join(names)} tie with {value}" if len(names) > 1 else f"{names[0]} with {value}"
        told.append(f"{words}: {who}" if words else who)
    if not told:
        return f"No two runs did the same work, so that none is best by {measure.name}."
    if len(told) > _MOST_TOLD:
        each = ", ".join(f"{names} at {number}" for names, number in wins.most_common(_MOST_TOLD))
        return f"Best {measure.name} of {len(told)} sizes: {each}."
    return f"Best {measure.name}: {'; '.join(told)}."


def _of_choice(line: Contender, peers: Sequence[Contender]) -> tuple[str, ...]:
    """The names of a contender that differ among those with its work."""
    differ = [name for place, name in enumerate(line.names) if len({other.names[place] for other in peers}) > 1]
    return tuple(differ) or line.names


def _tabulate(heads: Sequence[str], measures: Sequence[Measure], lines: Sequence[Contender]) -> Table:
    starred = {(each.name, id(line)) for each in measures for line in _starred(each, lines)}
    rows = []
    for line in lines:
        cells = (_cell(each, line, (each.name, id(line)) in starred) for each in measures)
        rows.append((*map(label, line.names), *cells, label(line.state)))
    return table((*heads, *(each.name for each in measures), "how it ended"), rows)


def _starred(measure: Measure, lines: Sequence[Contender]) -> Iterator[Contender]:
    """The best contenders of each work, unless all are equally good."""
    for group in grouped((line for line in lines if line.values(measure)), attrgetter("work")).values():
        best = best_of(measure, group)
        yield from best if len(best) < len(group) else ()


def _cell(measure: Measure, line: Contender, starred: bool) -> Cell:
    values = line.values(measure)
    if not values:
        return NOTHING
    runs = [row["run_id"] for row in line.rows]
    if len(values) > 1:
        cell = ranged((median(values), min(values), max(values)), measure.form, runs)
    else:
        cell = ours(values[0], measure.form, runs)
    return Cell(cell.value, cell.text + _BEST, cell.run_ids) if starred else cell


def _draw(lines: Sequence[Contender], measure: Measure, heads: Sequence[str]) -> Figure:
    """A bar for each contender, grouped by work, with the range of its repeats."""
    works = list(dict.fromkeys(line.work for line in lines))
    shown = sorted((line for line in lines if line.values(measure)), key=lambda line: works.index(line.work))
    places = [number + 0.6 * works.index(line.work) for number, line in enumerate(shown)]
    with style.figure(8, 0.9 + 0.24 * (places[-1] + 1)) as figure:
        axes = figure.add_subplot()
        values = [line.values(measure) for line in shown]
        middle = [median(each) for each in values]
        spread = [[median(each) - min(each) for each in values], [max(each) - median(each) for each in values]]
        errors = spread if any(len(each) > 1 for each in values) else None
        bars = axes.barh(places, middle, color=style.BLUE, height=0.7, xerr=errors, ecolor="black")
        axes.bar_label(bars, [f"{value:{measure.form}}" for value in middle], padding=3, fontsize=7.5)
        axes.set_yticks(places, [" · ".join(line.names) for line in shown])
        axes.invert_yaxis()
        axes.margins(x=0.12)
        axes.grid(visible=False, axis="y")
        axes.set_xlabel(measure.name)
        axes.set_title(
            f"by {', '.join(heads)}; bars beside each other did the same work", fontweight="normal", fontsize=8.5
        )
    return figure
