"""Gradients of the engines against plain training, the duel on torch's runtime, and earlier duels."""

from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.driver import duels
from analysis.exhibits import style
from analysis.exhibits.exhibit import (
    NOTHING,
    Cell,
    Table,
    blank,
    cut_of,
    declared_table,
    exhibit_of,
    label,
    ours,
    table,
)
from analysis.exhibits.figures import duel as cpu_duel
from analysis.exhibits.style import method_name
from analysis.records.experiments import Experiments, MissingRuns, succeeded
from rpbench.run.modes.duel.contenders import TABLE
from rpbench.run.modes.duel.runs import MISSING

BACKENDS = ("virtual", "cpu")
DTYPES = ("float64", "float32", "bfloat16")

Row = dict[str, Any]


def equivalence_numbers(experiments: Experiments) -> pd.DataFrame:
    """One row for each run: `name`, `backend`, `dtype`, `grad_max_abs_diff`, `run_id`."""
    rows = succeeded(experiments.cells("equivalence"))
    if rows.empty:
        raise MissingRuns("all runs of experiment=equivalence")
    names = rows["schedule"].map(style.method_name)
    return rows.assign(name=names, dtype=[config["dtype"] for config in rows["config"]])


def equivalence_table(data: pd.DataFrame) -> Table:
    """A row for each schedule, a column for each backend and dtype."""
    known = set(zip(data["backend"], data["dtype"], strict=True))
    places = [place for place in product(BACKENDS, DTYPES) if place in known]
    found = {tuple(row[key] for key in ("name", "backend", "dtype")): row for row in data.to_dict("records")}

    def cell(*place: str) -> Cell:
        value = found[place]["grad_max_abs_diff"] if place in found else None
        return NOTHING if value is None else ours(float(value), ".1e" if value else ".0f", found[place]["run_id"])

    names = sorted(set(data["name"]))
    rows = ((label(name), *(cell(name, *place) for place in places)) for name in names)
    return table(("schedule", *map(", ".join, places)), rows)


exhibit_of(
    "equivalence",
    equivalence_numbers,
    equivalence_table,
    answer=lambda data: f"{(data['grad_max_abs_diff'] == 0).sum()} of {len(data)} runs agree in every bit.",
)

NAMES = style.names("torch_duel")


def answer(rows: list[Row]) -> str:
    return "; ".join(_answer(row) for row in rows if row["role"] == TABLE) + "."


def _answer(row: Row) -> str:
    name = method_name(row["schedule"])
    if row["status"] != "ok":
        return f"{name}: failed, {row['reason']}"
    over, kind = ("over_own", "") if pd.notna(row["over_own"]) else ("over_own_disturbed", ", disturbed runs included")
    if pd.isna(row[over]):
        return f"{name}: too few runs for a ratio"
    return (
        f"{name} as a table takes {_text(row, over)} times torch's own{kind} ({row['verdict']}), its replay explains "
        f"{_text(row, 'replay_over_wall')} of a step"
    )


def tabulate(rows: list[Row]) -> Table:
    return declared_table("torch_duel", map(_row, rows))


def _row(row: Row) -> Row:
    shown = {"schedule": row["schedule"], "who": NAMES[row["role"]], "cut": cut_of(row)}
    if row["status"] != "ok":
        return blank("torch_duel") | shown | {"verdict": f"failed: {row['reason']}"}
    reason = row["verdict_reason"]
    ratios = ("over_own", "over_own_disturbed", "cpu_over_own_disturbed", "replay_over_wall", "predicted_over_wall")
    for name in ratios:
        known = pd.notna(row.get(name))
        shown[name] = Cell(row[name], _text(row, name), (row["run_id"],)) if known else NOTHING
    shown |= {part: 100 * row["missing_shares"][part] for part in MISSING}
    shown |= {
        "verdict": f"{row['verdict']}: {reason}" if reason else row["verdict"],
        "unexplained_ms": 1e3 * row["overhead_per_action_s"],
        "starts": ", ".join(f"{len(start['at_s'])}" for start in row["runs"]),
    }
    return row | shown


def _text(row: Mapping[str, Any], name: str) -> str:
    value, low, high = (row[f"{name}{end}"] for end in ("", "_low", "_high"))
    return f"{value:.3f} ({low:.3f}–{high:.3f})" if pd.notna(low) and pd.notna(high) else f"{value:.3f}"


exhibit_of(
    "torch_duel", lambda experiments: experiments.cells("torch_duel").to_dict("records"), tabulate, answer=answer
)


# --- earlier duels, kept as tables in `analysis/kept` ----------------------------------------------------------


def side_by_side(paths: Sequence[Path]) -> Table:
    """A row for each contender, a column for each kept table."""
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


exhibit_of("five_duels", lambda _: (*duels.EARLIER, *duels.DUELS), side_by_side)
exhibit_of("aa_duel", lambda _: (duels.SAME,), side_by_side)
