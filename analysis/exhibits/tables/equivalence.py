"""Which engine computes what plain training computes: every schedule, backend and precision."""

from collections.abc import Sequence

import pandas as pd

from analysis.exhibits import style
from analysis.exhibits.cells import NOTHING, label, table
from analysis.exhibits.exhibit import Cell, Shown, exhibited
from analysis.records.experiments import Experiments, MissingRuns, succeeded

BACKENDS = ("virtual", "cpu")
DTYPES = ("float64", "float32", "bfloat16")


@exhibited("equivalence")
def exhibit(experiments: Experiments) -> Shown:
    """The table."""
    data = numbers(experiments)
    known = set(zip(data["backend"], data["dtype"], strict=True))
    places = [(backend, dtype) for backend in BACKENDS for dtype in DTYPES if (backend, dtype) in known]
    columns = ("schedule", *(f"{backend}, {dtype}" for backend, dtype in places))
    names = sorted(set(data["name"]))
    cells = data.drop_duplicates(["name", "backend", "dtype"], keep="last").set_index(["name", "backend", "dtype"])
    return Shown(
        table=table(columns, ((label(name), *_row(cells, name, places)) for name in names)),
        words={"answer": answer(data)},
    )


def numbers(experiments: Experiments) -> pd.DataFrame:
    """One row a run of the experiment: `name`, `backend`, `dtype`, `grad_max_abs_diff`, `run_id`.

    Raises:
        MissingRuns: if there is none.
    """
    rows = succeeded(experiments.cells("equivalence"))
    if rows.empty:
        raise MissingRuns("all runs of experiment=equivalence")
    names = rows["schedule"].map(style.method_name)
    return rows.assign(name=names, dtype=[config["dtype"] for config in rows["config"]])


def answer(data: pd.DataFrame) -> str:
    """How many agree, in a sentence."""
    exact = int((data["grad_max_abs_diff"] == 0).sum())
    return f"{exact} of {len(data)} runs agree in every bit."


def _row(cells: pd.DataFrame, name: str, columns: Sequence[tuple[str, str]]) -> list[Cell]:
    places = [(name, *column) for column in columns]
    return [_cell(cells.loc[place]) if place in cells.index else NOTHING for place in places]


def _cell(row: pd.Series) -> Cell:
    value = float(row["grad_max_abs_diff"])
    return Cell(value, f"{value:.1e}" if value else "0", (row["run_id"],))
