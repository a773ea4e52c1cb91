"""A sweep of somebody's own as an exhibit: its runs side by side, the best of every column, and what differs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from matplotlib.figure import Figure

from analysis.exhibits import style
from analysis.exhibits.cells import NOTHING, label, ours, table
from analysis.exhibits.exhibit import Cell, Exhibit, Table
from rpbench.harness.clock import Clock, clock
from rpbench.harness.manifest import Cell as Planned
from rpbench.harness.manifest import Manifest

Row = Mapping[str, Any]

_MOST_BARS = 60
_BEST = " ★"  # stands behind the best number of a column


@dataclass(frozen=True)
class Measure:
    """A column of the comparison: what it is called, how it is read off a record, and which end of it is better."""

    name: str
    read: Callable[[Row], float | None]
    form: str
    best: Callable[..., float] = min


@dataclass(frozen=True)
class Line:
    """A run of the sweep, or a cell that left none.

    Args:
        names: what it chose, of what differs.
        row: its record; None where there is none.
        state: how it ended, in a word, and why.
    """

    names: tuple[str, ...]
    row: Row | None
    state: str


def exhibit(manifest: Manifest, rows: Sequence[Row]) -> Exhibit:
    """The runs of one sweep, compared; cells that failed or do not fit stand among them with their reason."""
    by_id = {row["run_id"]: row for row in rows}
    keys, same = _what_differs(manifest.cells)
    contended = any(len(cell.run_ids) > 1 for cell in manifest.cells)
    lines = [line for cell in manifest.cells for line in _lines(cell, keys, by_id, contended)]
    heads = (*keys, *(("contender",) if contended else ()))
    running = [line for line in lines if _is_ok(line)]
    measures = [each for each in _MEASURES if any(_read(each, line) is not None for line in running)]
    return Exhibit(
        id=f"sweep_{manifest.name}",
        title=f"Sweep {manifest.name}: {len(lines)} runs",
        caption=_caption(manifest, same, lines, measures, heads),
        evidence=tuple(sorted({str(line.row["evidence"]) for line in running if line.row and line.row["evidence"]})),
        command=manifest.command,
        draw=partial(_draw, running, measures[0], heads) if measures and 0 < len(running) <= _MOST_BARS else None,
        drawings={},
        table=_tabulate(heads, measures, lines),
        run_ids=tuple(run for cell in manifest.cells for run in cell.run_ids if run in by_id),
    )


# --- what differs --------------------------------------------------------------------------------------------


def _what_differs(cells: Sequence[Planned]) -> tuple[list[str], dict[str, str]]:
    """Choices that are not the same in all cells, and those that are with their values."""
    keys = list(dict.fromkeys(key for cell in cells for key in cell.overrides))
    values = {key: {cell.overrides.get(key, "") for cell in cells} for key in keys}
    differ = [key for key in keys if len(values[key]) > 1]
    same = {key: next(iter(values[key])) for key in keys if len(values[key]) == 1}
    return differ or list(same)[:1], same


def _lines(cell: Planned, keys: Sequence[str], by_id: Mapping[str, Row], contended: bool) -> list[Line]:
    chosen = tuple(cell.overrides.get(key, "–") for key in keys)
    found = [by_id[run] for run in cell.run_ids if run in by_id]
    if not found:
        return [Line((*chosen, "–") if contended else chosen, None, _ended(cell.state, cell.reason))]
    return [
        Line(
            (*chosen, str(row.get("contender") or "–")) if contended else chosen,
            row,
            _ended(str(row["status"]), str(row.get("reason") or "")),
        )
        for row in found
    ]


def _ended(state: str, reason: str) -> str:
    return f"{state}: {reason}" if reason else state


def _is_ok(line: Line) -> bool:
    """Whether a run has numbers to compare; a dry one, on made-up accelerators, has none."""
    return line.row is not None and line.row["status"] == "ok" and line.row["evidence"] != "dry"


# --- what is compared ----------------------------------------------------------------------------------------


def _number(key: str, factor: float = 1.0) -> Callable[[Row], float | None]:
    """A field of a record in another unit; the largest of a list, None where it is no number."""

    def read(row: Row) -> float | None:
        value = row.get(key)
        if isinstance(value, list) and value and all(isinstance(item, int | float) for item in value):
            value = max(value)
        if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
            return None
        return factor * value

    return read


def _makespan(unit: Clock) -> Callable[[Row], float | None]:
    """The makespan of runs whose times are slots, or of those whose times are seconds."""

    def read(row: Row) -> float | None:
        return _number("makespan_s")(row) if clock(row) == unit else None

    return read


_MEASURES = (
    Measure("tokens/s", _number("tokens_per_s"), ",.0f", max),
    Measure("makespan (s)", _makespan("seconds"), ".4g"),
    Measure("makespan (slots)", _makespan("slots"), ",.0f"),
    Measure("bubble (%)", _number("bubble_makespan", 100), ".2f"),
    Measure("fullest device (GB)", _number("peak_memory_bytes", 1e-9), ".3g"),
    Measure("its own peak (GB)", _number("accelerator_peak_memory_bytes", 1e-9), ".3g"),
    Measure("gradients apart", _number("device_grad_max_rel_diff"), ".2g"),
    Measure("host memory (GB)", _number("host_memory_bytes", 1e-9), ".3g"),
    Measure("exposed hops (s)", _number("comm_exposed_s"), ".3g"),
    Measure("steps late", _number("staleness_steps"), ".0f"),
    Measure("loss", _number("loss"), ".4f"),
)


def _read(measure: Measure, line: Line) -> float | None:
    return measure.read(line.row) if line.row is not None and _is_ok(line) else None


def _best(measure: Measure, lines: Sequence[Line]) -> float | None:
    """The best number of a column; None where all are the same, so that none is better."""
    values = [value for line in lines if (value := _read(measure, line)) is not None]
    return measure.best(values) if len(set(values)) > 1 else None


def _tabulate(heads: Sequence[str], measures: Sequence[Measure], lines: Sequence[Line]) -> Table:
    best = {each.name: _best(each, lines) for each in measures}
    rows = [
        (
            *map(label, line.names),
            *(_cell(each, line, best[each.name]) for each in measures),
            label(line.state),
        )
        for line in lines
    ]
    return table((*heads, *(each.name for each in measures), "how it ended"), rows)


def _cell(measure: Measure, line: Line, best: float | None) -> Cell:
    value = _read(measure, line)
    if value is None or line.row is None:
        return NOTHING
    cell = ours(value, measure.form, line.row["run_id"])
    return Cell(cell.value, cell.text + _BEST, cell.run_ids) if value == best else cell


# --- words and drawing ---------------------------------------------------------------------------------------


def _caption(
    manifest: Manifest,
    same: Mapping[str, str],
    lines: Sequence[Line],
    measures: Sequence[Measure],
    heads: Sequence[str],
) -> str:
    counts = ", ".join(f"{number} {state}" for state, number in manifest.counts.items() if number)
    held = ", ".join(f"{key}={value}" for key, value in same.items())
    held = f" The same in all: {held}." if held else ""
    text = f"What differs: {', '.join(heads)}.{held} Cells: {counts}. The best of a column bears a star."
    if not measures:
        return f"{text} No run of this sweep ended with numbers."
    first = measures[0]
    ranked = sorted(
        (line for line in lines if _read(first, line) is not None), key=lambda line: _read(first, line) or 0
    )
    if first.best is max:
        ranked.reverse()
    winner, rest = ranked[0], ranked[1:]
    said = f"Best {first.name}: {' '.join(winner.names)} with {_read(first, winner):{first.form}}"
    if rest:
        said += f", then {' '.join(rest[0].names)} with {_read(first, rest[0]):{first.form}}"
    return f"{text} {said}."


def _draw(lines: Sequence[Line], measure: Measure, heads: Sequence[str]) -> Figure:
    """A bar a run, in the order of the sweep."""
    shown = [line for line in lines if _read(measure, line) is not None]
    with style.applied():
        figure = Figure(figsize=(8, 0.9 + 0.24 * len(shown)), layout="constrained")
        axes = figure.add_subplot()
        values = [_read(measure, line) or 0.0 for line in shown]
        bars = axes.barh(range(len(shown)), values, color=style.BLUE, height=0.7)
        axes.bar_label(bars, [f"{value:{measure.form}}" for value in values], padding=3, fontsize=7.5)
        axes.set_yticks(range(len(shown)), [" · ".join(line.names) for line in shown])
        axes.invert_yaxis()
        axes.margins(x=0.12)
        axes.grid(visible=False, axis="y")
        axes.set_xlabel(measure.name)
        axes.set_title(f"by {', '.join(heads)}", fontweight="normal", fontsize=8.5)
    return figure


__all__ = ["exhibit"]
