"""The exhibit of a user's own sweep: the best choice at each size, among runs that do the same work.

The same work is the same tokens a step (microbatches, where the tokens are not known), steps, model, devices, machine
and costs, known in the same way. Only such runs are compared. Runs that differ in nothing but their seed are repeats.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from statistics import median
from typing import Any

from matplotlib.figure import Figure

from analysis.exhibits import style
from analysis.exhibits.exhibit import NOTHING, Cell, Exhibit, Table, label, ours, ranged, table
from analysis.records.runs import grouped
from rpbench.records import manifest as manifests
from rpbench.records.describe import Clock, clock
from rpbench.records.manifest import Manifest

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
        """True if it has numbers to compare; dry runs, on made-up accelerators, have none."""
        return bool(self.rows) and _is_ok(self.rows[0])

    def values(self, measure: Measure) -> list[float]:
        """A number of each repeat; none of a run that did not end well."""
        found = (measure.read(row) for row in self.rows if _is_ok(row))
        return [value for value in found if value is not None]


# --- contenders ------------------------------------------------------------------------------------------------


def what_differs(cells: Sequence[manifests.Cell]) -> tuple[list[str], dict[str, str]]:
    """Choices that are not the same in all cells, repeats left out, and those that are with their values."""
    keys = list(dict.fromkeys(key for cell in cells for key in cell.overrides))
    values = {key: {cell.overrides.get(key, "") for cell in cells} for key in keys}
    differ = [key for key in keys if len(values[key]) > 1 and key != REPEATED]
    same = {key: next(iter(values[key])) for key in keys if len(values[key]) == 1}
    return differ or list(same)[:1], same


def contenders_of(manifest: Manifest, by_id: Mapping[str, Row], keys: Sequence[str]) -> list[Contender]:
    """Every contender of a sweep in its order, repeats together; cells that failed stand for themselves."""
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
    if len(rows) == 1:  # of a duel, what its verdict is
        verdict, why = (str(rows[0].get(key) or "") for key in ("verdict", "verdict_reason"))
        return f"ok, {_ended(verdict, why)}" if verdict else "ok"
    return f"ok, {len(rows)} repeats"


def work_of(row: Row) -> Work:
    asked = row.get("config") or {}
    cost = asked.get("cost") or row.get("cost")
    tokens = row.get("tokens_per_step")
    amount = ("tokens a step", tokens) if tokens else ("microbatches", row.get("num_microbatches"))
    named = {
        "model": row.get("model"),
        "devices": row.get("num_devices"),
        amount[0]: amount[1],
        "steps": asked.get("num_steps", row.get("num_steps")),  # a search may run more of those that overlap
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


# --- the best of equal work ------------------------------------------------------------------------------------


def best_of(measure: Measure, contenders: Sequence[Contender]) -> list[Contender]:
    """The best contenders of one work: the first by the median, and all that cannot be told from it.

    The others have the same number, or repeats whose range meets that of the best. Empty where fewer than two have one.
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
    read = number_of("makespan_s")
    return lambda row: read(row) if clock(row) == unit else None


_MOST_BARS = 60
_MOST_TOLD = 6  # works whose winner is named one by one
_MOST_VALUES = 4  # of a choice that a title names
_BEST = " ★"  # stands behind the best number of equal work

_MEASURES = (
    Measure("tokens/s", number_of("tokens_per_s"), ",.0f", max),
    Measure("times as long as ours", number_of("over_own"), ".3f"),
    Measure("makespan (s)", makespan_in("seconds"), ".4g"),
    Measure("makespan (slots)", makespan_in("slots"), ",.0f"),
    Measure("bubble (%)", number_of("bubble_makespan", 100), ".2f"),
    Measure("fullest device (GB)", number_of("peak_memory_bytes", 1e-9), ".3g"),
    Measure("its own peak (GB)", number_of("accelerator_peak_memory_bytes", 1e-9), ".3g"),
    Measure("gradients apart", number_of("device_grad_max_rel_diff"), ".2g"),
    Measure("host memory (GB)", number_of("host_memory_bytes", 1e-9), ".3g"),
    Measure("exposed hops (s)", number_of("comm_exposed_s"), ".3g"),
    Measure("steps late", number_of("staleness_steps"), ".0f"),
    Measure("loss", number_of("loss"), ".4f"),
)


def exhibit(manifest: Manifest, rows: Sequence[Row]) -> Exhibit:
    """The runs of one sweep, compared; cells that failed or do not fit stand among them with their reason."""
    by_id = {row["run_id"]: row for row in rows}
    keys, same = what_differs(manifest.cells)
    lines = contenders_of(manifest, by_id, keys)
    contended = any(len(line.names) > len(keys) for line in lines)
    heads = (*keys, *(("contender",) if contended else ()))
    running = [line for line in lines if line.is_ok]
    measures = [each for each in _MEASURES if any(line.values(each) for line in running)]
    works = works_told(running)
    return Exhibit(
        id=f"sweep_{manifest.name}",
        title=_title(manifest, keys),
        caption=_caption(manifest, same, running, measures, heads, works),
        evidence=tuple(sorted({str(row["evidence"]) for line in running for row in line.rows if row["evidence"]})),
        command=manifest.command,
        draw=partial(_draw, running, measures[0], heads) if measures and 0 < len(running) <= _MOST_BARS else None,
        drawings={},
        table=_tabulate(heads, measures, lines),
        run_ids=tuple(run for cell in manifest.cells for run in cell.run_ids if run in by_id),
        question=_question(heads, works),
    )


# --- what was swept --------------------------------------------------------------------------------------------


def _title(manifest: Manifest, keys: Sequence[str]) -> str:
    """The swept choices: `gpipe, 1f1b and 2 more; num_microbatches 6, 12`."""
    told = []
    for key in keys:
        values = list(dict.fromkeys(cell.overrides[key] for cell in manifest.cells if key in cell.overrides))
        rest = len(values) - _MOST_VALUES
        shown = ", ".join(values[:_MOST_VALUES]) + (f" and {rest} more" if rest > 0 else "")
        told.append(shown if key in ("schedule", "schedule_file") else f"{key} {shown}")
    swept = "; ".join(told) or "one run"
    return f"{manifest.experiment}: {swept}" if manifest.experiment else swept


def _question(heads: Sequence[str], works: Mapping[Work, str]) -> str:
    chosen = [head for head in heads if head.partition(".")[0] not in SIZES] or list(heads[:1])
    what = " and ".join(chosen).replace("schedule_file", "schedule")
    return f"Which {what} is fastest at which size?" if len(works) > 1 else f"Which {what} is fastest?"


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
    held = f" The same in all: {held}." if held else ""
    text = (
        f"What differs: {', '.join(heads)}.{held} Cells: {counts}. Runs of equal work (tokens, model, devices, costs) "
    )
    text += "are compared, and no others; the best of them bears a star."
    if not measures:
        return f"{text} No run of this sweep ended with numbers."
    if any(len(line.rows) > 1 for line in running):
        text += " Repeats are shown as median (least–most); those whose ranges meet are not told apart."
    return f"{text} {_winners(measures[0], running, works)}"


def _winners(measure: Measure, running: Sequence[Contender], works: Mapping[Work, str]) -> str:
    """The best choice for each work, or its count where there are many works."""
    told, wins = [], Counter[str]()
    for work, words in works.items():
        best = best_of(measure, [line for line in running if line.work == work])
        if not best:
            continue
        names = [" ".join(_of_choice(line, running)) for line in best]
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


def _of_choice(line: Contender, running: Sequence[Contender]) -> tuple[str, ...]:
    """The names of a contender that are not the same for all of its work."""
    peers = [other for other in running if other.work == line.work]
    differ = [name for place, name in enumerate(line.names) if len({other.names[place] for other in peers}) > 1]
    return tuple(differ) or line.names


# --- table and drawing -----------------------------------------------------------------------------------------


def _tabulate(heads: Sequence[str], measures: Sequence[Measure], lines: Sequence[Contender]) -> Table:
    starred = {(each.name, id(line)) for each in measures for line in _starred(each, lines)}
    rows = [
        (
            *map(label, line.names),
            *(_cell(each, line, (each.name, id(line)) in starred) for each in measures),
            label(line.state),
        )
        for line in lines
    ]
    return table((*heads, *(each.name for each in measures), "how it ended"), rows)


def _starred(measure: Measure, lines: Sequence[Contender]) -> list[Contender]:
    """The best of each work; none where all of it are as good."""
    groups = grouped((line for line in lines if line.values(measure)), attrgetter("work"))
    found = [(best_of(measure, group), group) for group in groups.values()]
    return [line for best, group in found if len(best) < len(group) for line in best]


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
    """A bar a contender, those of equal work beside each other; a line from the least to the most of its repeats."""
    works = list(dict.fromkeys(line.work for line in lines))
    shown = sorted((line for line in lines if line.values(measure)), key=lambda line: works.index(line.work))
    places = [number + 0.6 * works.index(line.work) for number, line in enumerate(shown)]
    with style.figure(8, 0.9 + 0.24 * (places[-1] + 1)) as figure:
        axes = figure.add_subplot()
        values = [line.values(measure) for line in shown]
        middle = [median(each) for each in values]
        spread = [[m - min(each) for m, each in zip(middle, values, strict=True)]]
        spread.append([max(each) - m for m, each in zip(middle, values, strict=True)])
        repeated = any(len(each) > 1 for each in values)
        bars = axes.barh(
            places, middle, color=style.BLUE, height=0.7, xerr=spread if repeated else None, ecolor="black"
        )
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
