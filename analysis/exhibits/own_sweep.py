"""A sweep of somebody's own as an exhibit: which choice is best at which size, among runs that do the same work."""

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from statistics import median

from matplotlib.figure import Figure

from analysis.exhibits import style
from analysis.exhibits.cells import NOTHING, label, ours, ranged, table
from analysis.exhibits.equal_work import (
    SIZES,
    Contender,
    Measure,
    Row,
    Work,
    best_of,
    contenders_of,
    makespan_in,
    number_of,
    what_differs,
    works_told,
)
from analysis.exhibits.exhibit import Cell, Exhibit, Table
from rpbench.records.manifest import Manifest

_MOST_BARS = 60
_MOST_TOLD = 6  # works whose winner is named one by one
_MOST_VALUES = 4  # of a choice that a title names
_BEST = " ★"  # stands behind the best number of equal work

_MEASURES = (
    Measure("tokens/s", number_of("tokens_per_s"), ",.0f", max),
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
    """Who is best at each work; of many works how often each is."""
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
    groups: dict[Work, list[Contender]] = {}
    for line in lines:
        if line.values(measure):
            groups.setdefault(line.work, []).append(line)
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
    with style.applied():
        figure = Figure(figsize=(8, 0.9 + 0.24 * (places[-1] + 1)), layout="constrained")
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


__all__ = ["exhibit"]
