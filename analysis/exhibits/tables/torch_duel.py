"""On torch's runtime: what our table costs beside torch's own schedule, and what the graph explains of a step."""

from collections.abc import Mapping
from typing import Any

import pandas as pd

from analysis.exhibits.cells import NOTHING, label, ours, short_cut, table
from analysis.exhibits.exhibit import Cell, Shown, Table, columns_of, exhibited
from analysis.exhibits.style import method_name
from analysis.records.experiments import Experiments, MissingRuns
from rpbench.run.modes.duel.contenders import OWN, TABLE, THREADS, TWIN
from rpbench.run.modes.duel.runs import MISSING

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
    """The records, as they were written.

    Raises:
        MissingRuns: if there are none.
    """
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
