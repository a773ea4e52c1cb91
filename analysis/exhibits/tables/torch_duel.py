"""Gradients of the engines beside plain training's, the duel on the runtime of torch, and duels of earlier days."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.driver import duels
from analysis.exhibits import style
from analysis.exhibits.exhibit import NOTHING, Cell, Shown, Table, columns_of, exhibited, label, ours, short_cut, table
from analysis.exhibits.figures import duel as cpu_duel
from analysis.exhibits.style import method_name
from analysis.records.experiments import Experiments, MissingRuns, succeeded
from rpbench.run.modes.duel.contenders import OWN, TABLE, THREADS, TWIN
from rpbench.run.modes.duel.runs import MISSING

BACKENDS = ("virtual", "cpu")
DTYPES = ("float64", "float32", "bfloat16")


@exhibited("equivalence")
def equivalence(experiments: Experiments) -> Shown:
    """The table."""
    data = equivalence_numbers(experiments)
    known = set(zip(data["backend"], data["dtype"], strict=True))
    places = [(backend, dtype) for backend in BACKENDS for dtype in DTYPES if (backend, dtype) in known]
    columns = ("schedule", *(f"{backend}, {dtype}" for backend, dtype in places))
    names = sorted(set(data["name"]))
    cells = data.drop_duplicates(["name", "backend", "dtype"], keep="last").set_index(["name", "backend", "dtype"])
    return Shown(
        table=table(
            columns, ((label(name), *(_equivalence_cell(cells, name, *place) for place in places)) for name in names)
        ),
        words={"answer": equivalence_answer(data)},
    )


def equivalence_numbers(experiments: Experiments) -> pd.DataFrame:
    """One row a run of the experiment: `name`, `backend`, `dtype`, `grad_max_abs_diff`, `run_id`."""
    rows = succeeded(experiments.cells("equivalence"))
    if rows.empty:
        raise MissingRuns("all runs of experiment=equivalence")
    names = rows["schedule"].map(style.method_name)
    return rows.assign(name=names, dtype=[config["dtype"] for config in rows["config"]])


def equivalence_answer(data: pd.DataFrame) -> str:
    """The number of runs that agree, in a sentence."""
    exact = int((data["grad_max_abs_diff"] == 0).sum())
    return f"{exact} of {len(data)} runs agree in every bit."


def _equivalence_cell(cells: pd.DataFrame, *place: str) -> Cell:
    if place not in cells.index:
        return NOTHING
    row = cells.loc[place]
    value = float(row["grad_max_abs_diff"])
    return Cell(value, f"{value:.1e}" if value else "0", (row["run_id"],))


Row = dict[str, Any]
NAMES = {
    OWN: "torch's schedule",
    TWIN: "torch's schedule, once more",
    TABLE: "torch with our table",
    THREADS: "our threads",
}
COLUMNS = columns_of("torch_duel")


@exhibited("torch_duel")
def exhibit(experiments: Experiments) -> Shown:
    """The table."""
    rows = found_rows(experiments.cells("torch_duel"))
    return Shown(table=tabulate(rows), words={"answer": answer(rows)})


def found_rows(cells: pd.DataFrame) -> list[Row]:
    """The records, as they were written."""
    rows = [{str(key): value for key, value in row.items()} for row in cells.to_dict("records")]
    if not rows:
        raise MissingRuns("all runs of experiment=torch_duel")
    return rows


def answer(rows: list[Row]) -> str:
    """The cost of a table on torch's runtime and the share that a replay explains, in a sentence."""
    return "; ".join(_answer(row) for row in rows if row["role"] == TABLE) + "."


def _answer(row: Row) -> str:
    name = method_name(row["schedule"])
    if row["status"] != "ok":
        return f"{name}: failed, {row['reason']}"
    over, kind = ("over_own", "") if _is_there(row["over_own"]) else ("over_own_disturbed", ", disturbed runs included")
    if not _is_there(row[over]):
        return f"{name}: too few runs for a ratio"
    return (
        f"{name} as a table takes {_text(row, over)} times torch's own{kind} ({row['verdict']}), its replay explains "
        f"{_text(row, 'replay_over_wall')} of a step"
    )


def tabulate(rows: list[Row]) -> Table:
    """A row for each of them, those that failed included."""
    return table(COLUMNS, (_row(row) for row in rows))


def _row(row: Row) -> list[Cell]:
    own = row["run_id"]
    opening = [
        label(method_name(row["schedule"])),
        label(NAMES[row["role"]]),
        Cell(row["partition_layers"], short_cut(row["partition_layers"]), (own,)),
    ]
    if row["status"] != "ok":
        return [*opening, label(f"failed: {row['reason']}"), *[NOTHING] * (len(COLUMNS) - 4)]
    reason = row["verdict_reason"]
    ratios = ("over_own", "over_own_disturbed", "cpu_over_own_disturbed", "replay_over_wall", "predicted_over_wall")
    return [
        *opening,
        label(f"{row['verdict']}: {reason}" if reason else row["verdict"]),
        *(_interval(row, name) for name in ratios),
        ours(1e3 * row["overhead_per_action_s"], ".2f", own),
        *(ours(100 * row["missing_shares"][part], ".1f", own) for part in MISSING),
        ours(row["makespan_s"], ".3f", own),
        label(", ".join(f"{len(start['at_s'])}" for start in row["runs"])),
        ours(row["foreign_cpu_share"], ".2f", own),
    ]


def _interval(row: Mapping[str, Any], name: str) -> Cell:
    return Cell(row[name], _text(row, name), (row["run_id"],)) if _is_there(row.get(name)) else NOTHING


def _text(row: Mapping[str, Any], name: str) -> str:
    value, low, high = (row[f"{name}{end}"] for end in ("", "_low", "_high"))
    return f"{value:.3f} ({low:.3f}–{high:.3f})" if _is_there(low) and _is_there(high) else f"{value:.3f}"


def _is_there(value: Any) -> bool:
    return value is not None and value == value


# --- duels of earlier days, kept as tables in `analysis/kept` -------------------------------------------------


@exhibited("five_duels")
def five_duels(experiments: Experiments) -> Shown:
    """All complete duels so far."""
    return Shown(table=side_by_side((*duels.EARLIER, *duels.DUELS)))


@exhibited("aa_duel")
def same_work_duel(experiments: Experiments) -> Shown:
    """The A/A duel."""
    return Shown(table=side_by_side((duels.SAME,)))


def side_by_side(paths: Sequence[Path]) -> Table:
    """A row a contender, a column for each table that was kept."""
    kept = [(path.name, duels.read(path)) for path in paths]
    began = [min(each.started_at for each in duel.values())[:16].replace("T", " ") for _, duel in kept]
    keys = dict.fromkeys(key for _, duel in kept for key in duel)
    return table(
        ("contender", "model", *began),
        (
            [
                label(cpu_duel.NAMES.get(name, name.replace("1f1b_copy_", "1F1B, copy "))),
                label(cpu_duel.MODELS.get(model, model)),
                *(_kept_cell(duel.get((model, name)), file) for file, duel in kept),
            ]
            for model, name in keys
        ),
    )


def _kept_cell(kept: duels.Kept | None, file: str) -> Cell:
    if kept is None or not kept.has_interval:
        return label("not in it" if kept is None else f"not measured: {kept.reason}")
    source = f"analysis/kept/{file}, {kept.model} {kept.contender}"
    words = f"{kept.ratio:.3f} ({kept.low:.3f}–{kept.high:.3f}), {kept.verdict}; {kept.plan}"
    return Cell(kept.ratio, words, source=source)
